"""The command word, help, and what becomes of exceptions."""

from __future__ import annotations

import gc
import re
import sys

import pytest
from helpers import ROOT, run

from planner import command

CONTRACT = {
    "--model -m --hardware -H --engine --gpus --chips --isl --osl --concurrency --schedule --weights --kv-cache "
    "--max-context --arrivals --objective --price --memory-limit --memory-fraction --tp --pp --dp --ep --cp "
    "--attention --prefill-attention --ffn --prefill-ffn "
    "--max-ttft --max-tpot --max-latency --version --csv --json --no-header --quiet --debug": (
        "rank",
        "estimate",
    ),
    "--plan --model -m --hardware -H --engine --gpus --chips --isl --osl --concurrency --schedule --weights --kv-cache "
    "--max-context --arrivals --objective --price --memory-limit --memory-fraction --tp --pp --dp --ep --cp "
    "--attention --max-ttft --max-tpot --max-latency --csv --json --no-header --quiet --debug": ("explain", "compare"),
    "--model -m --hardware -H --engine --gpus --chips --isl --osl --concurrency --schedule --weights --kv-cache "
    "--max-context --arrivals --objective --price --memory-limit --memory-fraction --tp --pp --dp --ep --cp "
    "--attention --prefill-attention --ffn --prefill-ffn --max-ttft --max-tpot --max-latency --csv --json --no-header "
    "--quiet --debug --top --jobs": ("sweep",),
    "--vary --from --to --model --hardware --engine --gpus --isl --osl --concurrency --objective --tp --attention "
    "--ffn --grid --slice --arrival-rate --plot --csv --json --no-header --quiet --debug": ("crossover",),
    "--model --hardware --engine --gpus --replica --base --threshold --isl --osl --concurrency --arrival-rate "
    "--trace --burstiness --requests --seed --weights --kv-cache --csv --json --no-header --quiet --debug": ("shift",),
    "--model --hardware --engine --gpus --tp --short --long --long-share --osl --arrival-rate --requests --seed "
    "--trace --chunk --slo-scale --attainment --weights --kv-cache --csv --json --no-header --quiet --debug": (
        "elastic",
    ),
    "--image --frames --steps --warmup": ("rank", "explain", "launch", "diagnose", "crossover"),
    "--cfg --ulysses --ring --pipefusion --patches --exact --parallel-vae": ("rank",),
    "--model --hardware --engine --gpus --isl --osl --concurrency --weights --plot --csv --json --no-header --quiet "
    "--debug": ("diagnose",),
    "--model --hardware --prefill-hardware --decode-hardware --engine --gpus --prefill-gpus --decode-gpus --max-ttft "
    "--max-tpot --arrival-rate --isl --osl --lengths --prefill-plan --decode-plan --affinity --transfer --attainment "
    "--requests --seed --tp --pp --top --csv --json --no-header --quiet --debug": ("disaggregate",),
    "--diffusion": ("validate",),
    "--top --pareto --rejected": ("rank",),
    "--plan --points --against": ("estimate",),
    "--model --hardware --engine --gpus --plan --tp --pp --dp --isl --osl --concurrency --weights --kv-cache "
    "--max-context --memory-fraction --memory-limit --checkpoint --hosts --port --output --force --csv --json "
    "--no-header --quiet --debug": ("launch",),
    "--launch": ("rank",),
    "--placement": ("rank", "estimate"),
    "--plot": ("rank", "explain", "compare", "sweep"),
    "--html": ("rank", "explain"),
    "--placement-svg": ("rank", "explain", "estimate"),
    "--model -m --graph --hardware -H --engine --gpus --phase --isl --osl --concurrency --layers --weights --kv-cache "
    "--memory-limit --method --chains --budget --seed --beta --restart --devices --microbatches --form --beside --jobs "
    "--csv --json --plot --no-header --quiet --debug": ("search",),
    "--model --hardware --engine --gpus --plan --tp --pp --dp --isl --osl --lengths --max-ttft --max-tpot --max-gap "
    "--attainment --percentile --arrival-rate --trace --burstiness --requests --seed --prefill --routing --top --csv "
    "--json --no-header --quiet --debug": ("goodput",),
    "--csv --json": ("models", "hardware", "engines", "show", "calibrate"),
    "--nccl --gemm --serving --output --engine-output --name --force --hardware --engine --model --plan --tp --pp --dp "
    "--weights --kv-cache --isl --osl --concurrency --no-header --quiet --debug": ("calibrate",),
}


@pytest.mark.parametrize(
    "name",
    [
        "rank",
        "estimate",
        "sweep",
        "explain",
        "compare",
        "crossover",
        "shift",
        "elastic",
        "disaggregate",
        "diagnose",
        "validate",
        "launch",
        "calibrate",
        "search",
        "goodput",
        "models",
        "hardware",
        "engines",
        "show",
    ],
)
def test_every_command_has_its_own_help_with_the_options_of_the_contract(name: str) -> None:
    done = run(name, "--help")
    assert (done.status, done.err) == (0, "")
    assert re.match(rf"Usage: plan{'' if name == 'rank' else f' {name}'} ", done.out)
    offered = set(re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", done.out))
    for options, commands in CONTRACT.items():
        if name in commands:
            assert set(options.split()) <= offered


def test_help_of_plan_names_every_command_and_the_exit_statuses() -> None:
    text = " ".join(run("--help").out.split())
    for name, about in command.COMMANDS.items():
        assert f"plan {name}: {about}" in text
    assert "Exit status: 0 done, 2 bad input, 3 no plan" in text
    assert "--objective latency" in text  # an example to type


def test_every_command_word_runs() -> None:
    words = {"rank": ("-m", "llama3-8b"), "estimate": ("-m", "llama3-8b"), "show": ("h100",)}
    words |= {"sweep": ("-m", "llama3-8b", "--gpus", "1,2"), "completion": ("bash",)}
    words |= {"memory": ("-m", "llama3-8b"), "validate": ("--memory",)}
    words |= {"explain": ("-m", "llama3-8b"), "compare": ("TP1", "TP2", "-m", "llama3-8b")}
    words |= {"launch": ("-m", "llama3-8b"), "crossover": ("-m", "llama3-8b", "--to", "9")}
    words |= {"search": ("--graph", "lenet", "-H", "h100-pairs", "--gpus", "2")}
    words |= {"shift": ("-m", "llama3-8b", "--gpus", "2")}
    words |= {"elastic": ("-m", "lwm-7b", "-H", "a100-80gb-sxm", "--long", "9000", "--requests", "5")}
    words |= {"disaggregate": ("-m", "llama3-8b", "--gpus", "2")}
    words |= {"goodput": ("-m", "llama3-8b", "--gpus", "1", "--arrival-rate", "2", "--requests", "60")}
    words |= {"diagnose": ("-m", "llama3-8b", "--gpus", "2")}
    words |= {"calibrate": ("-H", "h100", str(ROOT / "tests" / "data" / "gemm.csv"))}
    for name in command.COMMANDS:
        done = run(name, *words.get(name, ()))
        assert (done.status, done.err) == (0, "")
        assert done.out


def test_the_first_word_decides_even_where_it_begins_like_an_option() -> None:
    assert run("-m", "llama3-8b", "--csv", "-").out == run("rank", "-m", "llama3-8b", "--csv", "-").out


@pytest.mark.parametrize("word", ["Models", "RANK", "model", "plan", "help", ""])
def test_words_that_are_no_command_are_refused(word: str) -> None:
    done = run(word)
    assert (done.status, done.out) == (2, "")
    assert f"unknown command {word!r}" in done.err
    assert any(name in done.err for name in command.COMMANDS)


def test_a_command_reads_the_process_arguments_where_none_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["plan", "--version"])
    try:
        with pytest.raises(SystemExit) as stop:
            command.main()
    finally:
        gc.enable()
    assert stop.value.code == 0


def test_an_interrupt_is_a_word_and_the_status_of_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    from planner.command import rank  # noqa: PLC0415 (the package imports it when the command runs)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(rank, "rank", interrupted)
    done = run("-m", "llama3-8b")
    assert (done.status, done.out) == (130, "")
    assert "Traceback" not in done.err
    assert len(done.err.splitlines()) <= 1


def test_running_the_command_leaves_the_collector_of_the_tests_on() -> None:
    run("--version")
    assert gc.isenabled()
