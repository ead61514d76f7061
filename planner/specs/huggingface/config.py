"""Reading a Hugging Face config.json: every value by its key, with its kind checked, and a record of what was read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

from planner.errors import SpecError

REQUIRED: Any = object()
"""The default of a key that must be there: the transformers library's own would describe some other model."""


class Config:
    """The keys of a config.json and where each stands.

    Args:
        raw: keys and values; those of `text_config` and of an architecture's nested mappings already lifted out.
        path: the file, for errors.
        shown: key paths as they stand in the file, of keys that were lifted out of a mapping.
        above: the path of the mapping in which a key that is missing belongs, with a dot.
    """

    def __init__(
        self, raw: dict[str, Any], path: Path | str, shown: dict[str, str] | None = None, above: str = ""
    ) -> None:
        self.raw, self.path, self.shown, self.above = raw, path, shown or {}, above
        self.read: set[str] = set()
        self.assumed: list[str] = []
        """What was not in the file, and on what the value taken instead rests."""

    def refusal(self, key: str, sentence: str) -> SpecError:
        """The error that names this file and the key as it stands there."""
        return SpecError(self.path, self.shown_key(key), sentence)

    def shown_key(self, key: str) -> str:
        """The path of a key as it stands, or would stand, in the file."""
        outside = key in self.raw or key.startswith(self.above)
        return self.shown.get(key, key if outside else self.above + key)

    def inside(self, key: str) -> Config:
        """The mapping below a key, with a record of its own.

        Raises:
            SpecError: the value is none.
        """
        value = self.get(key)
        if not isinstance(value, dict):
            raise self.refusal(key, f"found {brief(value)}, expected a mapping")
        above = self.shown_key(key)
        raw = {str(name): item for name, item in value.items()}
        return Config(raw, self.path, {name: f"{above}.{name}" for name in raw}, f"{above}.")

    def get(self, key: str) -> Any:
        """The value as it stands, or None."""
        self.read.add(key)
        return self.raw.get(key)

    def count(self, key: str, least: int = 1) -> int | None:
        """A whole number of at least `least`, None where the key is missing or null.

        Raises:
            SpecError: anything else.
        """
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.refusal(key, f"found {brief(value)}, expected a whole number")
        if value < least:
            raise self.refusal(key, f"found {value}, expected at least {least}")
        return value

    def flag(self, key: str) -> bool | None:
        """True or false, None where the key is missing or null.

        Raises:
            SpecError: anything else.
        """
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.refusal(key, f"found {brief(value)}, expected true or false")
        return value

    def text(self, key: str) -> str | None:
        """A text, None where the key is missing or null.

        Raises:
            SpecError: anything else.
        """
        value = self.get(key)
        if value is not None and not isinstance(value, str):
            raise self.refusal(key, f"found {brief(value)}, expected a text")
        return value

    def listing(self, key: str) -> list[Any] | None:
        """A list, None where the key is missing, null or empty.

        Raises:
            SpecError: anything else.
        """
        value = self.get(key)
        if value is not None and not isinstance(value, list):
            raise self.refusal(key, f"found {brief(value)}, expected a list")
        return value or None

    def needed(self, key: str, least: int = 1) -> int:
        """A whole number that must be there.

        Raises:
            SpecError: it is not, or is of another kind.
        """
        value = self.count(key, least)
        if value is None:
            raise self.refusal(key, "missing; expected a whole number")
        return value


class Key(NamedTuple):
    """Which key of a config.json gives a field of our schema, and what holds where it is missing."""

    names: tuple[str, ...]
    """One key under all its names; where several are given they must agree."""
    default: Any = REQUIRED
    """The architecture's in transformers; a function of the Config computes it."""
    kind: Literal["count", "count_or_zero", "flag", "text"] = "count"
    assumed: str = ""
    """Where the default is not the library's: on what it rests; said in `unverified`."""
    nullable: bool = False
    """null is a value and means none; the key itself must be there."""
    then: str | None = None
    """What the field holds where a flag is set; it is left out where the flag is not."""

    def of(self, config: Config) -> tuple[Any, str]:
        """(value, key that gave it).

        Raises:
            SpecError: missing without a default, of another kind, or two names with different values.
        """
        found = [(name, self._read(config, name)) for name in self.names if config.get(name) is not None]
        for name, value in found[1:]:
            if value != found[0][1]:
                raise config.refusal(name, f"found {brief(value)}, but {found[0][0]} is {brief(found[0][1])}")
        if found:
            return self._meant(found[0][1]), found[0][0]
        first = self.names[0]
        if self.nullable and first in config.raw:
            return None, first
        if self.default is REQUIRED or self.nullable:
            expected = {"flag": "true or false", "text": "a text"}.get(self.kind, "a whole number")
            raise config.refusal(first, f"missing; expected {expected}")
        value = self.default(config) if callable(self.default) else self.default
        if self.assumed:
            config.assumed.append(f"{first} is missing, taken as {brief(value)}: {self.assumed}")
        return self._meant(value), first

    def _meant(self, value: Any) -> Any:
        if self.then is None:
            return value
        return self.then if value else None

    def _read(self, config: Config, name: str) -> Any:
        if self.kind == "flag":
            return config.flag(name)
        if self.kind == "text":
            return config.text(name)
        return config.count(name, least=0 if self.kind == "count_or_zero" else 1)


Rule = Callable[[Config], Any]
"""A field that several keys give together."""


def key(*names: str, default: Any = REQUIRED, assumed: str = "") -> Key:
    """A key that holds a whole number of at least 1."""
    return Key(names, default, assumed=assumed)


def zero(*names: str, default: Any = REQUIRED, assumed: str = "") -> Key:
    """A key that holds a whole number, 0 = none."""
    return Key(names, default, "count_or_zero", assumed)


def flag(*names: str, default: Any = REQUIRED, assumed: str = "", then: str | None = None) -> Key:
    """A key that holds true or false."""
    return Key(names, default, "flag", assumed, then=then)


def text(*names: str, default: Any = REQUIRED) -> Key:
    """A key that holds a text."""
    return Key(names, default, "text")


def words(text: str) -> frozenset[str]:
    """The words of a text, as a set of keys."""
    return frozenset(text.split())


def brief(value: Any) -> str:
    """A value of a config.json as an error shows it."""
    if isinstance(value, dict | list):
        return f"a {'mapping' if isinstance(value, dict) else 'list'} of {len(value)}"
    return "null" if value is None else repr(value)
