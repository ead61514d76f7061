"""From what a user says of speculative decoding to what is priced: names become models, what is missing is named."""

from __future__ import annotations

from planner.errors import InputError
from planner.specs.catalog import load_model
from planner.specs.model import Model
from planner.specs.speculation import AUTO, MTP, NGRAM, SEARCHED_TOKENS, Draft, Speculation, check_asked, module_of

VOCABULARY_PADDING = 512
"""Rows by which two tables of the same tokens may differ: makers pad them to different multiples."""


def speculation_of(
    tokens: int | str | None, accept: float | None, draft: str | None, model: Model, *, priced: bool = True
) -> Speculation | None:
    """What is drafted for a model; none where nothing is.

    Args:
        tokens: drafted a step; none or 0 = no speculation, AUTO = as many as suit the goal best.
        accept: probability that a drafted token is accepted, those before it being so.
        draft: `mtp`, `ngram`, or a model by name or file; none = the model's own prediction modules.
        model: the target.
        priced: whether `accept` is needed.

    Raises:
        InputError: out of range, something missing, or a draft that cannot draft for this model.
    """
    check_asked(None if tokens == AUTO else tokens, accept)
    if tokens is None:
        for option, value in (("--spec-accept", accept), ("--draft", draft)):
            if value is not None:
                raise InputError(f"{option} {value}: says nothing without --spec-tokens, the tokens drafted a step")
        return None
    if tokens == 0:
        return None
    if accept is None and priced:
        raise InputError(
            "--spec-accept is missing: the share of drafted tokens that are accepted depends on your text and draft "
            "(0.6 to 0.8 are usual); engines log it"
        )
    return Speculation(
        SEARCHED_TOKENS if tokens == AUTO else int(tokens),
        None if accept is None else float(accept),
        draft_of(draft, model),
    )


def draft_of(name: str | None, model: Model) -> Draft:
    """What drafts for a model.

    Raises:
        InputError: no prediction modules where these are wanted, an unknown model, or one with other tokens.
    """
    if name == NGRAM:
        return Draft("ngram")
    if name in (None, MTP):
        module = module_of(model)
        if module is None or model.prediction is None:
            why = "--draft mtp" if name else "--spec-tokens without --draft"
            raise InputError(
                f"{why}: {model.name} has no prediction modules of its own; give --draft a smaller model of the same "
                "tokenizer, or ngram (look-up in the prompt)"
            )
        return Draft("mtp", module, model.prediction.modules)
    assert name is not None
    drafter = load_model(name)
    if abs(drafter.vocab - model.vocab) > VOCABULARY_PADDING:
        raise InputError(
            f"--draft {name}: {drafter.name} has {drafter.vocab} tokens, {model.name} {model.vocab}; a draft needs the "
            "same tokenizer"
        )
    return Draft("model", drafter, asked=name)
