"""Which arithmetic a chip computes a format in."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from planner import InputError, SpecError, estimate, load_hardware, plan


@pytest.mark.parametrize(
    ("hardware", "wanted", "computed"),
    [("h100", "fp8", "fp8"), ("a100", "fp8", "bf16"), ("h100", "bf16", "bf16"), ("h100-lecture", "fp8", "bf16")],
)
def test_a_narrower_format_is_computed_in_16_bit_where_the_chip_has_no_peak_for_it(
    hardware: str, wanted: str, computed: str
) -> None:
    assert load_hardware(hardware).chip.compute_dtype(wanted) == computed


@pytest.mark.parametrize("weights", ["int4", "mxfp4", "int8", "fp8"])
def test_quantised_weights_run_on_a_chip_without_their_arithmetic(weights: str) -> None:
    assert estimate("llama3-8b", hardware="a100", weights=weights)["weights"] == weights


def test_a_wider_format_is_refused_with_what_the_chip_has() -> None:
    expected = "--weights fp32: needs a chip that computes in fp32, this one has bf16, fp16, fp8, int8"
    with pytest.raises(InputError, match=expected):
        plan("llama3-8b", gpus=8, weights="fp32")
    with pytest.raises(InputError, match=expected):
        estimate("llama3-8b", weights="fp32")


def test_a_peak_of_a_wider_format_comes_with_constants_and_is_then_used(tmp_path: Path) -> None:
    path = tmp_path / "wide.yaml"
    keys = {"extends": "h100-lecture", "name": "wide", "chip": {"compute_tflops": {"fp32": 50}}}
    path.write_text(yaml.safe_dump(keys))
    with pytest.raises(SpecError, match=r"kernels\.gemm\.fp32: missing"):
        load_hardware(path)
    constants = {
        "compute_fraction": 0.7,
        "memory_fraction": 0.8,
        "provenance": {"status": "assumed", "source": "a test"},
    }
    other = tmp_path / "sound.yaml"
    other.write_text(yaml.safe_dump({**keys, "name": "sound", "kernels": {"gemm": {"fp32": constants}}}))
    options = {"isl": 4096, "tp": 8}
    wide, narrow = (
        estimate("llama3-8b", hardware=name, **options, weights=dtype)
        for name, dtype in ((other, "fp32"), ("h100-lecture", "bf16"))
    )
    assert wide["ttft_ms"] > 5 * narrow["ttft_ms"]
