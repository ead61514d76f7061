"""Speculative decoding as it is asked for: how many tokens are drafted, by what, and how many are accepted."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any, Literal, NamedTuple

from planner.errors import InputError
from planner.specs.model import Model

AUTO = "auto"
MOST_TOKENS = 64
"""Drafted tokens of a step beyond which a number is a slip of the keyboard."""
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


def check_asked(tokens: Any, accept: Any) -> None:
    """Refuses what cannot be --spec-tokens and --spec-accept, where they are given.

    Raises:
        InputError: no number, or out of range.
    """
    if tokens is not None:
        check_tokens("--spec-tokens", tokens)
    if accept is not None:
        check_accept("--spec-accept", accept)


def check_tokens(name: str, value: Any) -> None:
    """Refuses what is no number of drafted tokens; `name` is how the user knows it.

    Raises:
        InputError: not whole, or out of range.
    """
    if not isinstance(value, Integral) or isinstance(value, bool) or not 0 <= int(value) <= MOST_TOKENS:
        raise InputError(f"{name} must be a whole number from 0 to {MOST_TOKENS}, found {value!r}")


def check_accept(name: str, value: Any) -> None:
    """Refuses what is no probability.

    Raises:
        InputError: no number, or none from 0 to 1.
    """
    if not isinstance(value, Real) or isinstance(value, bool):
        raise InputError(f"{name} must be a number, found {value!r}")
    if not 0 <= float(value) <= 1:
        raise InputError(
            f"{name} must be from 0 to 1, the share of drafted tokens that are accepted, found {float(value):g}"
        )
