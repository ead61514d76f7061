"""A Hugging Face config.json as a model of our schema: what is read (`config`), by which table (`architectures`)."""

from planner.specs.huggingface.importer import is_config, model_from_config

__all__ = ["is_config", "model_from_config"]
