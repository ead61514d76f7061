"""Speculative decoding as it is asked for: how many tokens are drafted, by what, and how many are accepted."""

from __future__ import annotations

from typing import Literal, NamedTuple

from planner.specs.model import Model

MTP, NGRAM = "mtp", "ngram"
"""Words for drafts that are no model of their own: the model's prediction modules, and look-up in the prompt."""
Kind = Literal["mtp", "ngram", "model"]
SEARCHED_TOKENS = 0
"""In the place of k: as many as suit the goal best (`ranking.rank` tries them)."""
KINDS: dict[Kind, str] = {
    "mtp": "the model's prediction modules", "ngram": "look-up in the prompt", "model": "a draft model",
}  # fmt: skip
"""Kinds of drafts, in words."""


class Draft(NamedTuple):
    """What proposes tokens.

    mtp: the model's own prediction module, run once a token. ngram: a look-up on the host, which costs no chip time.
    model: a model of its own, one decode step a token.
    """

    kind: Kind
    model: Model | None = None
    """What runs: the smaller model, or one prediction module as a model of one layer; none = nothing."""
    modules: int = 0
    """Prediction modules that are loaded."""
    asked: str = ""
    """How a model of its own was named."""

    @property
    def label(self) -> str:
        """For people: its model's name, or the word."""
        return self.model.name if self.kind == "model" and self.model is not None else self.kind


class Speculation(NamedTuple):
    """k tokens are drafted a step, each accepted with the same probability as long as those before it were."""

    tokens: int
    """SEARCHED_TOKENS = to be chosen."""
    accept: float | None
    """None = not said, which is enough to start a server but not to price it."""
    draft: Draft


def module_of(model: Model) -> Model | None:
    """One prediction module as a model of one layer, which shares embedding and head; none where there is none.

    It is a layer of the last kind (full attention; experts where the model has them), as DeepSeek-V3's is. The
    projection that joins the token's embedding to the hidden state is priced apart (`costs.speculation`).
    """
    if model.prediction is None:
        return None
    experts = None if model.experts is None else model.experts._replace(first_dense=0, every=1)
    return model._replace(
        name=f"{model.name} prediction module",
        layers=1,
        attention_pattern=("full",),
        attention=model.attention._replace(window=None),
        experts=experts,
        linear=None,
        prediction=None,
        extra=(),
    )
