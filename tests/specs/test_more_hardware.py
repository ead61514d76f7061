"""Chips that nobody measured for this planner: data sheets and analogies, which say so and stay within reason."""

from __future__ import annotations

from collections.abc import Iterator

from helpers import every

from planner import Hardware, estimate, load_hardware, load_machine
from planner.specs.catalog import ENGINES, names
from planner.specs.fields import Provenance

_NAMES = """
    a100-40gb-sxm a100-40gb-pcie a100-80gb-pcie h100-pcie h100-nvl h20 b300-sxm gb200-nvl72 gb300-nvl72
    l4 a10g t4 v100-sxm2 rtx-3090 rtx-4090 rtx-5090 rtx-pro-6000 mi250x mi325x mi355x gaudi2 gaudi3
    tpu-v5p tpu-v6e tpu-v7x trainium1 trainium2
"""
UNMEASURED = _NAMES.split()
KERNELS_MEASURED = {"b300-sxm", "gb200-nvl72", "gb300-nvl72", "h20"}
"""Some kernels were measured (`planner/evidence/kernels`); no engine was."""
PRODUCTS_OF_EXPERTS_MEASURED = {"h20"}
ALIASES = {
    "a100-40gb": "a100-40gb-sxm",
    "a100-pcie": "a100-80gb-pcie",
    "b300": "b300-sxm",
    "gb200": "gb200-nvl72",
    "gb300": "gb300-nvl72",
    "v100": "v100-sxm2",
    "trillium": "tpu-v6e",
    "ironwood": "tpu-v7x",
    "trn1": "trainium1",
    "trn2": "trainium2",
}
of_every_chip = every("name", UNMEASURED)


def provenances(machine: Hardware) -> Iterator[Provenance]:
    """Of every group of constants of a hardware file."""
    for kind, rows in machine.kernels.items():
        if kind == "grouped_gemm" and machine.name in PRODUCTS_OF_EXPERTS_MEASURED:
            continue
        yield from (constants.provenance for constants in rows.values())
    yield from (row.provenance for row in machine.collectives)


@every("name", [name for name in UNMEASURED if name not in KERNELS_MEASURED])
@every("engine", [None, *names(ENGINES)])
def test_no_constant_looks_measured_under_any_engine(name: str, engine: str | None) -> None:
    """Nor those that an engine measured on the chip that a file extends."""
    machine = load_hardware(name) if engine is None else load_machine(name, engine)[0]
    assert {provenance.status for provenance in provenances(machine)} == {"assumed"}


@every(("alias", "name"), ALIASES.items())
def test_usual_names_find_the_file(alias: str, name: str) -> None:
    assert load_hardware(alias) == load_hardware(name)


@of_every_chip
def test_a_variant_does_not_take_over_the_price_of_what_it_extends(name: str) -> None:
    shipped = {load_hardware(base).price for base in ("l40s", "mi300x", "a100-80gb-sxm", "a100-80gb-pcie", "tpu-v5e")}
    assert name == "a100-80gb-pcie" or load_hardware(name).price is None or load_hardware(name).price not in shipped


@of_every_chip
def test_decoding_takes_longer_than_reading_the_weights_but_not_much(name: str) -> None:
    """8.03e9 parameters in 16 bit over four chips: at least their bytes at the peak, at most a few times that."""
    machine = load_hardware(name)
    row = estimate("llama3-8b", hardware=name, engine="ideal", plan="PP4", concurrency=1, isl=128, osl=16)
    bound_ms = 1000 * 15e9 / machine.chip.memory_bandwidth  # without the embedding table
    assert bound_ms < row["tpot_ms"] < 2.5 * bound_ms


@every("name", ["t4", "v100-sxm2"])
def test_a_chip_without_bf16_computes_bf16_weights_in_fp16(name: str) -> None:
    machine = load_hardware(name)
    assert "bf16" not in machine.chip.compute_tflops
    assert machine.chip.compute_dtype("bf16") == machine.chip.compute_dtype("fp8") == "fp16"
