"""Sizes of memory as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner import InputError
from planner.units import GIB, HOUR, KIB, MIB, MS, TERA, US, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("72GiB", 72 * 2**30),
        ("72 GiB", 72 * 2**30),
        (" 72gib ", 72 * 2**30),
        ("80GB", 80e9),
        ("80gb", 80e9),
        ("0.5TiB", 2**39),
        ("1TB", 1e12),
        ("1.5e3MiB", 1500 * 2**20),
        ("512KiB", 2**19),
        ("512kB", 512e3),
        ("7b", 7),
        ("79454797824B", 79454797824),
        (".5GiB", 2**29),
        ("8e10B", 8e10),
    ],
)
def test_a_size_is_a_number_with_a_binary_or_a_decimal_unit(text: str, size: float) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "GiB", "lots", "72GiBs", "72 Gi B", "72G", "72GiB 3"),
        *("72", "79454797824", "8e10", "72."),  # no unit: bytes, GB and GiB are a factor of a thousand million apart
        *("-3GiB", "0", "0GiB", "1,5GiB", "nan", "inf", "0x10", "1e999GiB"),
    ],
)
def test_anything_else_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InputError, match="72GiB or 80GB") as caught:
        parse_bytes(text)
    assert repr(text) in str(caught.value)


@given(st.floats(1e-3, 1e6), st.sampled_from(["GiB", "GB", "MiB", "B"]))
def test_a_printed_size_is_read_back(value: float, unit: str) -> None:
    factor = {"GiB": 2**30, "GB": 1e9, "MiB": 2**20, "B": 1}[unit]
    assert parse_bytes(f"{value}{unit}") == pytest.approx(value * factor, rel=1e-12)


def test_units_are_si_base_units() -> None:
    assert (KIB, MIB, GIB) == (1024, 1024**2, 1024**3)
    assert (US, MS, HOUR, TERA) == (1e-6, 1e-3, 3600, 1e12)
