"""From parsed YAML to specification objects, by two ways that give the same result.

A file of the user's is validated by pydantic: every key known, every value in range, each error with its path.
The shipped files passed the same validation in the test-suite, and are built here from the type annotations
alone: importing pydantic's validator costs more time than planning does.
"""

from __future__ import annotations

import types
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from planner.errors import SpecError

Spec = TypeVar("Spec")


def trusted(cls: type[Spec], raw: Any) -> Spec:
    """The object of a shipped file, without checks."""
    built: Spec = _convert(cls, raw)
    return built


def validated(cls: type[Spec], raw: Any, path: Path | str) -> Spec:
    """The object of a user's file.

    Raises:
        SpecError: the first thing wrong, with the path of its key and what was expected.
    """
    from pydantic import ValidationError  # noqa: PLC0415 (see above)

    _refuse_lists(cls, raw, path, "")
    try:
        built: Spec = _validator(cls).validate_python(raw)  # type: ignore[arg-type]
    except ValidationError as error:
        problems = error.errors(include_url=False)
        raise SpecError(path, *_sentence(problems[0], len(problems) - 1, cls)) from None
    if hasattr(built, "contradictions"):
        for key, problem in built.contradictions():
            raise SpecError(path, key, problem)
    return built


@cache
def _validator(cls: Any) -> Any:
    from pydantic import TypeAdapter  # noqa: PLC0415

    return TypeAdapter(cls)


@cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def _refuse_lists(kind: Any, raw: Any, path: Path | str, key: str) -> None:
    """Refuses a list where a mapping belongs, which pydantic would read as a NamedTuple's values in order."""
    kind = _unwrap(kind)
    if _is_spec(kind):
        if isinstance(raw, list):
            raise SpecError(path, key, "found a list, expected a mapping of keys to values")
        if isinstance(raw, dict):
            hints = _hints(kind)
            for name in raw.keys() & hints.keys():
                _refuse_lists(hints[name], raw[name], path, f"{key}.{name}" if key else str(name))
    elif get_origin(kind) is tuple and isinstance(raw, list):
        for index, item in enumerate(raw):
            _refuse_lists(get_args(kind)[0], item, path, f"{key}.{index}")
    elif get_origin(kind) is dict and isinstance(raw, dict):
        for name, item in raw.items():
            _refuse_lists(get_args(kind)[1], item, path, f"{key}.{name}")


def _is_spec(kind: Any) -> bool:
    """Whether a type is one of our specifications: a NamedTuple, whose keys are those of a mapping in a file."""
    return isinstance(kind, type) and hasattr(kind, "_fields")


def _convert(kind: Any, raw: Any) -> Any:  # noqa: PLR0911 (one return a shape of type)
    if raw is None:
        return None
    if _is_spec(kind):
        hints = _hints(kind)
        return kind(**{key: _convert(hints[key], value) for key, value in raw.items()})
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is tuple:
        return tuple(_convert(arguments[0], value) for value in raw)
    if origin is dict:
        key_kind, value_kind = arguments
        return {_convert(key_kind, key): _convert(value_kind, value) for key, value in raw.items()}
    if origin in (Union, types.UnionType):
        return _convert(next(argument for argument in arguments if argument is not types.NoneType), raw)
    if kind is float:
        return float(raw)
    return raw


_EXPECTED = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "a text",
    "dict_type": "a mapping of keys to values",
    "tuple_type": "a list",
}


def _sentence(problem: Any, more: int, cls: type) -> tuple[str, str]:
    """(key path, what is wrong) of one of pydantic's error records."""
    key = ".".join(str(part) for part in problem["loc"] if part not in ("function-after", "[key]"))
    kind, found, context = problem["type"], problem.get("input"), problem.get("ctx", {})
    rest = f" (and {more} more)" if more else ""
    if kind in ("unexpected_keyword_argument", "extra_forbidden"):
        owner = _type_at(cls, problem["loc"][:-1])
        known = list(owner._fields) if _is_spec(owner) else []
        expected = f"expected one of {', '.join(known)}" if known else "expected no such key"
        return key, f"unknown key; {expected}{rest}"
    if kind in ("missing", "missing_argument"):
        return key, f"missing; expected {_unit(cls, problem['loc']) or 'a value'}{rest}"
    if kind == "value_error":
        return key, f"{context.get('error', problem['msg'])}{rest}"
    if kind == "literal_error":
        return key, f"found {found!r}, expected one of {context['expected']}{rest}"
    bounds = {"greater_than": "above", "greater_than_equal": "at least", "less_than_equal": "at most"}
    unit = _unit(cls, problem["loc"])
    if kind in bounds:
        limit = next(iter(context.values()))
        doubt = f" (in {unit}; is the unit right?)" if unit else ""
        return key, f"found {found!r}, expected {bounds[kind]} {limit:g}{doubt}{rest}"
    expected = _EXPECTED.get(kind, problem["msg"])
    if _is_spec(_type_at(cls, problem["loc"])):  # pydantic's versions name this error differently
        expected = "a mapping of keys to values"
    shown = f"{type(found).__name__} {found!r}" if not isinstance(found, (dict, list)) else f"a {_shape(found)}"
    return key, f"found {shown}, expected {expected}{f' ({unit})' if unit and unit not in expected else ''}{rest}"


def _shape(value: Any) -> str:
    return "mapping" if isinstance(value, dict) else "list"


def _unit(cls: type, path: tuple[Any, ...]) -> str | None:
    """The text that an Annotated type at this path ends with: its unit."""
    notes = getattr(_type_at(cls, path, extras=True), "__metadata__", ())
    return next((note for note in notes if isinstance(note, str)), None)


def _type_at(cls: Any, path: tuple[Any, ...], extras: bool = False) -> Any:
    kind: Any = cls
    for part in path:
        kind = _unwrap(kind)
        if _is_spec(kind):
            kind = get_type_hints(kind, include_extras=True).get(str(part))
        elif get_origin(kind) in (tuple, dict):
            kind = get_args(kind)[-1] if get_origin(kind) is dict else get_args(kind)[0]
        else:
            return None
    if get_origin(kind) in (Union, types.UnionType):
        kind = next(argument for argument in get_args(kind) if argument is not types.NoneType)
    return kind if extras else _unwrap(kind)


def _unwrap(kind: Any) -> Any:
    if hasattr(kind, "__metadata__"):
        kind = get_args(kind)[0]
    if get_origin(kind) in (Union, types.UnionType):
        return _unwrap(next(argument for argument in get_args(kind) if argument is not types.NoneType))
    if get_origin(kind) is Literal:
        return str
    return kind
