"""From YAML to specifications: both ways build the same, and what is wrong is told with its key path."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple

import pytest
from annotated_types import Ge, Gt, Le
from hypothesis import given, settings
from hypothesis import strategies as st

from planner import SpecError
from planner.specs.fields import Count, Fraction, Gib, MemoryGbPerS, Provenance
from planner.specs.structure import trusted, validated


class Inner(NamedTuple):
    size: Annotated[float, Gt(0), Le(100), "metres"]
    kind: Literal["soft", "hard"] = "soft"
    by_rank: dict[int, float] = {}


class Outer(NamedTuple):
    name: str
    count: Count
    inner: Inner
    many: tuple[Inner, ...] = ()
    maybe: Annotated[int, Ge(0)] | None = None
    table: dict[str, dict[str, Inner]] = {}
    flag: bool = False
    open: dict[str, Any] = {}


WHOLE = {
    "name": "x",
    "count": 3,
    "inner": {"size": 2, "by_rank": {2: 1, 4: 2.5}},
    "many": [{"size": 1.5, "kind": "hard"}, {"size": 4}],
    "maybe": 7,
    "table": {"a": {"b": {"size": 1}}},
    "flag": True,
    "open": {"anything": [1, {"two": 3}]},
}


def test_both_ways_build_the_same_object() -> None:
    built = trusted(Outer, WHOLE)
    assert built == validated(Outer, WHOLE, "file")
    assert repr(built) == repr(validated(Outer, WHOLE, "file"))
    assert built.inner == Inner(2.0, "soft", {2: 1.0, 4: 2.5})
    assert built.many == (Inner(1.5, "hard"), Inner(4.0))
    assert built.table["a"]["b"] == Inner(1.0)


def test_numbers_are_floats_where_the_type_says_so() -> None:
    built = trusted(Outer, WHOLE)
    assert type(built.inner.size) is float
    assert type(built.inner.by_rank[2]) is float
    assert type(built.count) is int


def test_what_is_left_out_has_its_default() -> None:
    raw = {"name": "x", "count": 1, "inner": {"size": 1}}
    assert trusted(Outer, raw) == validated(Outer, raw, "file") == Outer("x", 1, Inner(1.0))
    assert trusted(Outer, {**raw, "maybe": None}).maybe is None


@settings(max_examples=10, deadline=None)
@given(
    st.fixed_dictionaries(
        {
            "name": st.text(max_size=5),
            "count": st.integers(1, 10**7),
            "inner": st.fixed_dictionaries(
                {"size": st.one_of(st.integers(1, 100), st.floats(0.01, 100))},
                optional={
                    "kind": st.sampled_from(["soft", "hard"]),
                    "by_rank": st.dictionaries(st.integers(1, 64), st.integers(0, 9), max_size=3),
                },
            ),
        },
        optional={"maybe": st.none() | st.integers(0, 9), "flag": st.booleans()},
    )
)
def test_both_ways_build_the_same_of_any_valid_file(raw: dict[str, Any]) -> None:
    assert repr(trusted(Outer, raw)) == repr(validated(Outer, raw, "file"))


def changed(**keys: Any) -> dict[str, Any]:
    return {**WHOLE, **keys}


@pytest.mark.parametrize(
    ("raw", "key", "problem"),
    [
        (changed(nme="y"), "nme", "unknown key; expected one of name, count, inner, many"),
        (changed(inner={"size": 1, "sze": 2}), "inner.sze", "unknown key; expected one of size, kind, by_rank"),
        (changed(many=[{"size": 1}, {"size": 1, "x": 2}]), "many.1.x", "unknown key; expected one of size, kind"),
        (changed(table={"a": {"b": {}}}), "table.a.b.size", "missing; expected metres"),
        ({"count": 1, "inner": {"size": 1}}, "name", "missing; expected a value"),
        (changed(inner={"size": -1}), "inner.size", "found -1, expected above 0"),
        (changed(inner={"size": 2000}), "inner.size", "found 2000, expected at most 100"),
        (changed(inner={"size": "wide"}), "inner.size", "found str 'wide', expected a number"),
        (changed(inner={"size": 1, "kind": "wet"}), "inner.kind", "found 'wet', expected one of 'soft' or 'hard'"),
        (changed(inner=[2.0]), "inner", "found a list, expected a mapping"),
        (changed(inner="big"), "inner", "found str 'big', expected a mapping"),
        (changed(inner=None), "inner", "expected a mapping"),
        (changed(many={"size": 1}), "many", "found a mapping, expected a list"),
        (changed(many=[[1.0]]), "many.0", "found a list, expected a mapping"),
        (changed(count=0), "count", "found 0, expected at least 1"),
        (changed(count=1.5), "count", "found float 1.5, expected a whole number"),
        (changed(flag="maybe"), "flag", "found str 'maybe', expected true or false"),
        (changed(maybe=-1), "maybe", "found -1, expected at least 0"),
        (changed(name=["x"]), "name", "found a list, expected a text"),
    ],
)
def test_what_is_wrong_is_told_with_its_key_and_what_was_expected(raw: Any, key: str, problem: str) -> None:
    with pytest.raises(SpecError) as caught:
        validated(Outer, raw, "some/file.yaml")
    assert (caught.value.path, caught.value.key) == ("some/file.yaml", key)
    assert caught.value.problem.startswith(problem) or problem in caught.value.problem
    assert str(caught.value) == f"some/file.yaml: {key}: {caught.value.problem}"


def test_a_bound_is_told_with_its_unit() -> None:
    with pytest.raises(SpecError, match=r"inner\.size: found 2000, expected at most 100 .*metres"):
        validated(Outer, changed(inner={"size": 2000}), "file")


def test_further_problems_are_counted() -> None:
    with pytest.raises(SpecError, match=r"\(and 2 more\)"):
        validated(Outer, {"name": "x"} | {"count": 0, "inner": {"size": -1}, "maybe": -1}, "file")


class Even(NamedTuple):
    number: int

    def contradictions(self) -> Iterator[tuple[str, str]]:
        if self.number % 2:
            yield "number", "is odd, expected an even one"


def test_keys_that_contradict_each_other_are_told_by_the_specification_itself() -> None:
    assert validated(Even, {"number": 2}, "file") == Even(2)
    with pytest.raises(SpecError, match=r"^file: number: is odd, expected an even one$"):
        validated(Even, {"number": 3}, "file")


class Units(NamedTuple):
    memory_gib: Gib = 80.0
    memory_bandwidth_gb_per_s: MemoryGbPerS = 3350.0
    share: Fraction = 0.9
    provenance: Provenance = Provenance("assumed", "a test")


@pytest.mark.parametrize(
    ("key", "slip"),
    [
        ("memory_gib", 80 * 2**30),  # bytes
        ("memory_gib", 81920),  # MiB
        ("memory_bandwidth_gb_per_s", 3.35),  # TB/s
        ("memory_bandwidth_gb_per_s", 3.35e12),  # B/s
        ("memory_bandwidth_gb_per_s", 3_350_000),  # MB/s
        ("share", 90),  # percent
    ],
)
def test_a_value_in_the_wrong_unit_falls_outside_its_range(key: str, slip: float) -> None:
    with pytest.raises(SpecError, match=f"^file: {key}: found .* is the unit right"):
        validated(Units, {key: slip}, "file")
    assert getattr(validated(Units, {key: getattr(Units(), key)}, "file"), key) == getattr(Units(), key)


def test_a_status_of_provenance_is_one_of_those_that_are_defined() -> None:
    with pytest.raises(SpecError, match=r"provenance\.status: found 'guessed', expected one of .*'assumed'"):
        validated(Units, {"provenance": {"status": "guessed", "source": "me"}}, "file")
    with pytest.raises(SpecError, match=r"provenance\.source: missing"):
        validated(Units, {"provenance": {"status": "assumed"}}, "file")
