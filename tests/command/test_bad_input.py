"""Bad input: a clear sentence, the right exit status, nothing on stdout, nothing half written, never a traceback."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers import CONFIGS, Completed, run, run_process

import planner

MODEL = ("--model", "llama3-8b")
unprivileged = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read and write everything"
)


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are named relative to a directory of the test's own."""
    monkeypatch.chdir(tmp_path)


def refused(done: Completed, status: int, *parts: str) -> str:
    """The sentence of a refusal that is as it must be; each part is a regular expression that must be found in it."""
    assert done.status == status, done
    assert done.out == ""
    assert "Traceback" not in done.err
    assert "internal error" not in done.err
    sentence = " ".join(done.err.split())
    assert sentence
    for part in parts:
        assert re.search(part, sentence), (part, sentence)
    return sentence


# --- numbers and words ------------------------------------------------------------------------------------------------

AT_LEAST_1 = "at least 1"
WHOLE = "whole number"
NUMBER = "number"
OPTIONS: list[tuple[str, str, tuple[str, ...]]] = [
    # option, value, what the sentence must name
    ("--gpus", "0", (AT_LEAST_1,)),
    ("--gpus", "-1", (AT_LEAST_1,)),
    ("--gpus", "abc", (WHOLE,)),
    ("--gpus", "1.5", (WHOLE,)),
    ("--isl", "0", (AT_LEAST_1,)),
    ("--isl", "abc", (WHOLE,)),
    ("--osl", "0", (AT_LEAST_1,)),
    ("--concurrency", "0", (AT_LEAST_1,)),
    ("--max-context", "0", (AT_LEAST_1,)),
    ("--max-num-seqs", "0", ("--max-num-seqs", "from 1 to")),
    ("--max-num-seqs", "9000", ("at most 8192 tokens", "--max-num-batched-tokens of at least 9000")),
    ("--max-num-batched-tokens", "-1", ("--max-num-batched-tokens", "from 1 to")),
    ("--max-num-batched-tokens", "1.5", (WHOLE,)),
    ("--prefix-hit", "1.5", ("--prefix-hit", "from 0 to 1", "1.5")),
    ("--prefix-hit", "-0.1", ("from 0 to 1",)),
    ("--prefix-hit", "nan", ("from 0 to 1",)),
    ("--prefix-hit", "60%", (NUMBER,)),
    ("--tp", "0", ("at least 1", "'0'")),
    ("--tp", "x", ("whole number", "'x'")),
    ("--tp", "", ("whole number",)),
    ("--tp", "2,,4", ("whole number", "'2,,4'")),
    ("--pp", "-2", ("at least 1", "'-2'")),
    ("--dp", "1.5", ("whole number", "1.5")),
    ("--ep", "x", ("whole number",)),
    ("--cp", "0", ("at least 1",)),
    ("--objective", "speed", ("latency, ttft, tpot, throughput, cost", "'speed'")),
    ("--schedule", "never", ("continuous, static", "'never'")),
    ("--arrivals", "tidal", ("steady, waves", "'tidal'")),
    ("--weights", "int2", ("bf16.*fp8.*int4", "'int2'")),
    ("--kv-cache", "int4", ("bf16.*fp8", "'int4'")),
    ("--attention", "tails", ("heads", "tails")),
    ("--prefill-attention", "tails", ("heads", "tails")),
    ("--ffn", "3d", ("1d", "3d")),
    ("--prefill-ffn", "3d", ("1d", "3d")),
    ("--memory-limit", "lots", ("'lots'", "72GiB")),
    ("--memory-limit", "80 apples", ("72GiB",)),
    ("--memory-limit", "0", ("positive", "72GiB")),
    ("--memory-limit", "-3GiB", ("positive",)),
    ("--memory-limit", "90GiB", (r"90(\.0)? ?GiB", r"79\.2 GiB")),
    ("--memory-fraction", "0", ("above 0",)),
    ("--memory-fraction", "-1", ("above 0",)),
    ("--memory-fraction", "2", ("at most 1", "2")),
    ("--memory-fraction", "nan", ("above 0|nan",)),
    ("--memory-fraction", "half", (NUMBER,)),
    ("--price", "-1", ("above 0", "-1")),
    ("--price", "0", ("above 0",)),
    ("--price", "inf", ("inf",)),
    ("--slice", "4x4", ("h100-sxm is not a torus",)),
    ("--max-ttft", "0", ("above 0",)),
    ("--max-ttft", "abc", (NUMBER,)),
    ("--max-tpot", "-1", ("above 0", "-1")),
    ("--max-latency", "nan", ("above 0|nan",)),
]
OF_RANK: list[tuple[str, str, tuple[str, ...]]] = [
    ("--top", "-1", ("at least 0",)),
]
OF_ESTIMATE: list[tuple[str, str, tuple[str, ...]]] = [
    ("--plan", "nonsense", ("'nonsense'", "TP8xPP2xDP2")),
    ("--plan", "TP0", ("'TP0'", "TP8xPP2xDP2")),
    ("--plan", "TP2xTP4", ("each once",)),
    ("--plan", "TP2/tails", ("/heads, /batch or a product as /heads4xbatch2",)),
    ("--plan", "", ("plan",)),
    ("--tp", "4,8", ("4,8", "one plan", "--points")),
]
EVERY = [
    *((("rank",), *case) for case in [*OPTIONS, *OF_RANK]),
    *((("estimate",), *case) for case in [*OPTIONS, *OF_ESTIMATE]),
]


@pytest.mark.parametrize(
    ("command", "option", "value", "parts"), EVERY, ids=[f"{c[0]} {o} {v or 'nothing'}" for c, o, v, _ in EVERY]
)
def test_a_value_that_makes_no_sense_is_refused(
    command: tuple[str], option: str, value: str, parts: tuple[str, ...]
) -> None:
    # a sentence says which option was wrong, unless the value it quotes says so already
    sentence = refused(run(*command, *MODEL, option, value), 2, *parts)
    assert option in sentence or option.strip("-").replace("-", "_") in sentence or repr(value) in sentence


@pytest.mark.parametrize("command", ["rank", "estimate"])
@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (("-m", "lama3-70b"), ("unknown model 'lama3-70b'", "did you mean llama3-70b", "plan models")),
        (("-m", "Meta-Llama-3-8B"), ("unknown model", "llama3-8b")),
        (("-m", "xyzzy"), ("unknown model 'xyzzy'", "llama3-8b", "qwen3-8b")),
        ((*MODEL, "-H", "h10"), ("unknown hardware 'h10'", "did you mean h100-sxm", "plan hardware")),
        ((*MODEL, "-H", "llama3-8b"), ("unknown hardware 'llama3-8b'", "h100-sxm")),
        ((*MODEL, "--engine", "vlm"), ("unknown engine 'vlm'", "did you mean vllm", "plan engines")),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest_ones(
    command: str, words: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    refused(run(command, *words), 2, *parts)


def test_show_suggests_over_all_families() -> None:
    refused(run("show", "h10"), 2, "unknown .*'h10'", "h100-sxm")
    refused(run("show", "lama3-8b"), 2, "llama3-8b")
    refused(run("show", "vlm"), 2, "vllm")


def test_a_model_is_needed() -> None:
    refused(run(), 2, "--model")
    refused(run("--gpus", "8"), 2, "--model")
    refused(run("estimate", "--tp", "8"), 2, "--model")
    refused(run("show"), 2, "NAME")


@pytest.mark.parametrize(
    "label", ["TP8", "TP4xPP2"]
)  # the label is one way to give the degrees; a second one that differs is a mistake, not a preference
def test_a_plan_that_contradicts_a_degree_is_refused(label: str) -> None:
    refused(run("estimate", *MODEL, "--plan", label, "--tp", "2"), 2, "tp", "contradicts", label)
    refused(run("estimate", *MODEL, "--plan", label, "--pp", "3"), 2, "pp", "contradicts", label)


@pytest.mark.parametrize(
    "words", [("--plan", "TP8", "--attention", "batch"), ("--plan", "TP8/batch", "--attention", "heads")]
)
def test_a_plan_that_contradicts_the_attention_is_refused_and_the_option_not_dropped(words: tuple[str, ...]) -> None:
    refused(run("estimate", *MODEL, "--engine", "ideal", *words), 2, "attention", "contradicts")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--plan TP8 --attention batch", "--attention batch contradicts --plan TP8; write --plan TP8/batch"),
        (
            "--plan TP8 --prefill-attention batch",
            "--prefill-attention batch contradicts --plan TP8; write --plan TP8/batch/batch",
        ),
        (
            "--plan TP8/batch/batch --attention heads",
            "--attention heads contradicts --plan TP8/batch/batch; write --plan TP8",
        ),
        ("--plan TP8 --tp 4 --pp 2", "--tp 4 contradicts --plan TP8; write --plan TP4xPP2"),
    ],
)
def test_an_option_that_contradicts_the_plan_is_told_with_a_plan_that_works(words: str, sentence: str) -> None:
    command = ("estimate", *MODEL, "--engine", "ideal", "--quiet")
    assert refused(run(*command, *words.split()), 2) == f"plan: {sentence}"
    assert run(*command, "--plan", sentence.rsplit(maxsplit=1)[1]).status == 0


def test_more_tokens_than_the_models_context_are_refused_unless_a_context_is_given() -> None:
    for command in ("rank", "estimate"):
        words = (command, *MODEL, "--isl", "8000", "--osl", "193")
        refused(run(*words), 2, "8193", "8192", "--max-context")
        assert run(*words, "--max-context", "16384").status == 0
        assert run(command, *MODEL, "--isl", "8000", "--osl", "192").status == 0


def test_more_chips_than_anyone_has_are_refused_at_once() -> None:
    """A slip of the keyboard must not keep the planner busy for hours."""
    done = run_process(*MODEL, "--gpus", "1" + "0" * 20, timeout=5)
    refused(done, 2, "--gpus")


@pytest.mark.parametrize(
    "goal", [("--objective", "tpot"), ("--pareto",), ("--max-tpot", "20")], ids=lambda goal: goal[0]
)
def test_an_answer_of_one_token_has_no_time_per_token_to_go_by(goal: tuple[str, ...]) -> None:
    done = run(*MODEL, "--osl", "1", *goal, "--csv", "-")
    if goal[0] == "--max-tpot":  # a time that does not exist is not too long
        assert (done.status, done.err) == (0, "")
        assert {row["tpot_ms"] for row in done.rows} == {""}
    else:
        refused(done, 2, "--osl", goal[-1])


def test_unknown_options_and_extra_words_are_refused() -> None:
    refused(run(*MODEL, "--gpu", "8"), 2, "--gpu")
    refused(run(*MODEL, "more"), 2, "more")
    refused(run("models", "more"), 2, "more")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--gpus abc", "--gpus: 'abc' is not a whole number"),
        ("--gpus 0", "--gpus: 0 is not at least 1"),
        ("--top -1", "--top: -1 is not at least 0"),
        ("--max-tpot abc", "--max-tpot: 'abc' is not a number"),
        ("--gpus 8 estimate", "the command word comes first: plan estimate ..."),
        ("some more", "unexpected word: 'some more'"),
    ],
)
def test_a_usage_error_is_a_sentence_as_any_other(words: str, sentence: str) -> None:
    assert run(*MODEL, *words.split()) == Completed(2, "", f"plan: {sentence}\n")


def test_a_word_that_is_empty_is_refused_as_well() -> None:
    refused(run(*MODEL, ""), 2, "unexpected word: ''")


@pytest.mark.parametrize("words", ["--modle x", "--model", "--quiet=3 -m x", "--gpus 3", "show"])
def test_usage_errors_of_any_kind_are_one_line(words: str) -> None:
    done = run(*words.split())
    refused(done, 2)
    assert re.fullmatch(r"plan: .*[^.\n]\n", done.err)


@pytest.mark.parametrize("command", [("rank", *MODEL), ("estimate", *MODEL), ("models",), ("show", "h100")])
def test_two_streams_cannot_share_one_stdout(command: tuple[str, ...]) -> None:
    refused(run(*command, "--csv", "-", "--json", "-"), 2, "--csv -", "--json -", "stdout")


@pytest.mark.parametrize("command", [("rank", *MODEL), ("estimate", *MODEL), ("models",), ("show", "h100")])
def test_two_texts_cannot_share_one_file(command: tuple[str, ...]) -> None:
    refused(run(*command, "--csv", "out", "--json", "./out"), 2, "--csv out and --json ./out are the same file")
    assert not Path("out").exists()


# --- plans that no machine can run ------------------------------------------------------------------------------------


def test_a_split_that_does_not_divide_the_heads_says_why_and_what_is_near() -> None:
    for words in (("--tp", "3", "--gpus", "8"), ("estimate", "--tp", "3")):
        sentence = refused(run(*words, "-m", "llama3-70b"), 3, "tp 3", "64 query heads", "nearest valid: 2 or 4")
        for tp in re.findall(r"\d+", sentence.rsplit("nearest valid:", 1)[1]):
            assert run("estimate", "-m", "llama3-70b", "--tp", tp, "--pp", "2").status == 0


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (("--pp", "33", "--gpus", "64"), ("pp 33", "32 layers")),
        (("--pp", "9", "--gpus", "8"), ("9", "8")),
        (("--dp", "100", "--gpus", "8"), ("100", "8")),
        (("--tp", "64", "--gpus", "8"), ("tp 64", "32 query heads", "nearest valid: 32")),
        (("--tp", "8", "--pp", "2", "--gpus", "8"), ("16 chips", "8")),
        (("--ep", "2"), ("ep 2", "experts")),
        (("--cp", "2"), ("cp 2",)),
        (("--attention", "batch"), ("engine vllm", "batch", "offers heads")),
        (("--engine", "ideal", "--attention", "heads", "--prefill-attention", "batch"), ("batch for both",)),
    ],
)
def test_a_plan_that_cannot_run_names_the_rule_that_it_breaks(words: tuple[str, ...], parts: tuple[str, ...]) -> None:
    refused(run(*MODEL, *words), 3, *parts)


def test_an_estimate_that_cannot_run_names_the_rule_that_it_breaks() -> None:
    refused(run("estimate", *MODEL, "--plan", "TP8", "--gpus", "4"), 3, "TP8 takes 8 chips", "4")
    refused(run("estimate", *MODEL, "--pp", "33"), 3, "pp 33", "32 layers")
    refused(run("estimate", "-m", "llama3-70b"), 3, "weights 131.4 GiB", "limit of 71.3 GiB")


def test_a_torus_slice_must_be_legal_and_of_the_chips_given() -> None:
    words = ("-m", "palm-540b", "-H", "tpu-v4")
    refused(run(*words, "--gpus", "64", "--slice", "4x4x5"), 2, "4x4x5", "legal are .*4x4x4")
    refused(run(*words, "--gpus", "65", "--slice", "4x4x4"), 2, "4x4x4", "64 chips", "--gpus is 65")


CHANGE = re.compile(r"(--[a-z-]+) ([0-9.]*\w+)")


def suggested(sentence: str) -> list[tuple[str, str]]:
    """The changes that a refusal says would do, as (option, value)."""
    assert "smallest change that would do: " in sentence
    return CHANGE.findall(sentence.rsplit("smallest change that would do: ", 1)[1])


def with_option(words: tuple[str, ...], option: str, value: str) -> tuple[str, ...]:
    """A command line with one option set or replaced."""
    kept = list(words)
    if option in kept:
        place = kept.index(option)
        del kept[place : place + 2]
    return (*kept, option, value)


TOO_LARGE = [
    ("-m", "llama3-70b", "--gpus", "1"),
    ("-m", "llama3.1-405b", "--gpus", "8"),
    ("-m", "mt-nlg-530b", "--gpus", "8", "-H", "a100", "--osl", "100"),
    ("-m", "llama3.1-405b", "--gpus", "4", "-H", "l40s"),
    ("-m", "palm-540b", "--gpus", "3", "-H", "tpu-v4"),
    ("-m", "llama2-13b", "--gpus", "1", "-H", "tpu-v5e"),
    ("-m", "llama3-70b", "--gpus", "2", "--concurrency", "500"),
    ("-m", "llama3-8b", "--gpus", "8", "--memory-limit", "1GiB"),
    ("-m", "llama3-70b", "--gpus", "8", "--tp", "1", "--pp", "1"),
]


@pytest.mark.parametrize("words", TOO_LARGE, ids=[" ".join(words) for words in TOO_LARGE])
def test_a_model_too_large_names_limit_and_numbers_and_a_change_that_works(words: tuple[str, ...]) -> None:
    sentence = refused(run(*words), 3, r"fits in memory", r"GiB|requests of \d+ tokens")
    changes = suggested(sentence)
    assert changes
    for option, value in changes:
        again = with_option(words, option, value)
        assert run(*again, "--quiet").status == 0, again


@pytest.mark.parametrize("words", TOO_LARGE[:3], ids=[" ".join(words) for words in TOO_LARGE[:3]])
def test_the_number_of_chips_that_would_do_is_the_smallest(words: tuple[str, ...]) -> None:
    needed = int(dict(suggested(refused(run(*words), 3)))["--gpus"])
    had = int(words[words.index("--gpus") + 1])
    for fewer in range(had + 1, needed):
        assert run(*with_option(words, "--gpus", str(fewer)), "--quiet").status == 3


def test_the_concurrency_that_would_do_is_the_largest() -> None:
    words = ("-m", "llama3-8b", "--gpus", "8", "--concurrency", "1000000")
    most = int(dict(suggested(refused(run(*words), 3)))["--concurrency"])
    assert run(*with_option(words, "--concurrency", str(most)), "--quiet").status == 0
    assert run(*with_option(words, "--concurrency", str(most + 1)), "--quiet").status == 3


@pytest.mark.parametrize("objective", ["latency", "throughput"])
@pytest.mark.parametrize("option", ["--max-tpot", "--max-ttft", "--max-latency"])
def test_an_impossible_limit_names_the_best_that_is_reached_and_that_limit_works(objective: str, option: str) -> None:
    column = f"{option.removeprefix('--max-')}_ms"
    words = ("-m", "llama3-70b", "--gpus", "8", "--objective", objective)
    sentence = refused(run(*words, option, "0.5"), 3, "llama3-70b on 8 x h100-sxm", rf"{option} 0\.5")
    best = re.search(r"the best is ([\d.]+) ms by ([\w/]+)", sentence)
    assert best
    free = run("-m", "llama3-70b", "--gpus", "8", "--csv", "-", "--top", "0").rows
    reached = min(free, key=lambda row: float(row[column]))
    assert best[2] == reached["plan"]
    assert float(best[1]) == pytest.approx(float(reached[column]), rel=1e-3)
    # the limit that would do is that figure, or given apart; it must not be rounded to below what is reached
    apart = re.search(rf"smallest change that would do: .*{option} ([\d.]+)", sentence)
    limit = apart[1] if apart else best[1]
    assert float(limit) == pytest.approx(float(reached[column]), rel=1e-3)
    assert run(*words, option, limit, "--quiet").status == 0


def test_limits_that_only_exclude_each_other_are_told_from_impossible_ones() -> None:
    words = ("-m", "llama3-8b", "-H", "h100-lecture", "--gpus", "8", "--isl", "2000")
    rows = run(*words, "--csv", "-", "--top", "0").rows
    by_ttft, by_tpot = (min(rows, key=lambda row: float(row[name])) for name in ("ttft_ms", "tpot_ms"))
    assert by_ttft["plan"] != by_tpot["plan"]
    limits = {"--max-ttft": float(by_ttft["ttft_ms"]) * 1.001, "--max-tpot": float(by_tpot["tpot_ms"]) * 1.001}
    given = [word for limit in limits.items() for word in limit]
    sentence = refused(run(*words, *given), 3, "reachable alone", r"\d ms")
    changes = suggested(sentence)
    assert changes
    for option, value in changes:
        limits[option] = float(value)
    assert run(*words, *(word for limit in limits.items() for word in limit), "--quiet").status == 0


def test_pareto_refuses_as_well() -> None:
    refused(run(*MODEL, "--pareto", "--max-tpot", "0.001"), 3, "--max-tpot 0.001", "the best is")


# --- files ------------------------------------------------------------------------------------------------------------


def put(name: str, content: str | bytes) -> str:
    """The whole path of a new file in the test's directory: the catalogue remembers files by what they were called."""
    path = Path(name).absolute()
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


BROKEN: list[tuple[str, str | bytes, tuple[str, ...]]] = [
    ("empty.yaml", "", ("is empty", "mapping")),
    ("comments.yaml", "# nothing yet\n", ("is empty", "mapping")),
    ("malformed.yaml", "name: [1, 2\nlayers: 3\n", ("not valid YAML", "line 2")),
    ("tabs.yaml", "name: x\nattention:\n\theads: 3\n", ("not valid YAML", "line 3")),
    ("binary.yaml", b"\x89PNG\r\n\x1a\n\x00\xff\xfe", ("not text", "UTF-8")),
    ("zeros.yaml", b"\x00\x01\x02\x03", ("not valid YAML|not text",)),
    ("list.yaml", "- a\n- b\n", ("list", "mapping")),
    ("text.yaml", "just some text\n", ("expected a mapping",)),
    ("two.yaml", "name: a\n---\nname: b\n", ("not valid YAML|document",)),
    ("object.yaml", "name: !!python/object/apply:os.getcwd []\n", ("not valid YAML|constructor",)),
    ("broken.json", '{"name": "x",', ("not valid",)),
    ("huge.yaml", b"# " + b"x" * (5 * 2**20), ("larger than|too large",)),
]


@pytest.mark.parametrize("option", ["--model", "--hardware", "--engine"])
@pytest.mark.parametrize(("name", "content", "parts"), BROKEN, ids=[name for name, *_ in BROKEN])
def test_a_file_that_is_no_specification_is_named(
    option: str, name: str, content: str | bytes, parts: tuple[str, ...]
) -> None:
    words = (option, put(name, content)) if option == "--model" else (*MODEL, option, put(name, content))
    refused(run(*words), 2, re.escape(name), *parts)
    refused(run("estimate", *words), 2, re.escape(name), *parts)


def test_a_file_that_cannot_be_read_is_named() -> None:
    Path("folder.yaml").mkdir()
    refused(run("-m", "absent.yaml"), 2, "absent.yaml", "(?i)no such file")
    refused(run("-m", "folder.yaml"), 2, "folder.yaml", "(?i)directory")
    refused(run(*MODEL, "-H", "absent.yml"), 2, "absent.yml", "(?i)no such file")
    refused(run("show", "absent.yaml"), 2, "absent.yaml")


@unprivileged
def test_a_file_that_may_not_be_read_is_named() -> None:
    path = put("secret.yaml", "extends: llama3-8b\nname: x\n")
    Path(path).chmod(0)
    refused(run("-m", path), 2, "secret.yaml", "(?i)permission denied")


@cache
def parsed(path: Path) -> dict[str, Any]:
    raw = yaml.safe_load(path.read_text())
    assert isinstance(raw, dict)
    return raw


def specification(family: str, change: Callable[[dict[str, Any]], object]) -> str:
    """A complete specification of the user's own, with one change."""
    source = {"models": "llama3-8b", "hardware": "h100-sxm", "engines": "vllm", "torus": "tpu-v4"}[family]
    folder = "hardware" if family == "torus" else family
    raw = copy.deepcopy(parsed(CONFIGS / folder / f"{source}.yaml"))
    raw["name"] = "mine"
    raw.pop("aliases", None)
    change(raw)
    return put("mine.yaml", yaml.dump(raw, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper)))


def set_at(path: str, value: Any) -> Callable[[dict[str, Any]], object]:
    """A change that sets the value at a path of keys."""
    *parents, last = (int(key) if key.isdigit() else key for key in path.split("."))

    def change(raw: dict[str, Any]) -> None:
        place: Any = raw
        for key in parents:
            place = place[key]
        place[last] = value

    return change


def without(path: str) -> Callable[[dict[str, Any]], object]:
    """A change that removes the key at a path."""
    *parents, last = (int(key) if key.isdigit() else key for key in path.split("."))

    def change(raw: dict[str, Any]) -> None:
        place: Any = raw
        for key in parents:
            place = place[key]
        del place[last]

    return change


Case = tuple[str, str, Callable[[dict[str, Any]], object], tuple[str, ...]]
WRONG: list[Case] = [
    # name of the case, family, change, what the sentence must name beside the file
    ("unknown key", "models", set_at("laers", 3), ("laers: unknown key", "layers, hidden, attention")),
    ("unknown key inside", "models", set_at("attention.kv_heds", 8), (r"attention\.kv_heds: unknown key", "kv_heads")),
    ("key that is a number", "models", set_at("attention.3", 3), (r"attention",)),
    ("missing field", "models", without("hidden"), ("hidden: missing",)),
    ("missing field inside", "models", without("attention.heads"), (r"attention\.heads: missing",)),
    ("list for a mapping", "models", set_at("attention", [32, 8, 128]), ("attention: .*list.*mapping",)),
    ("list of mappings for a mapping", "models", set_at("ffn", [{"hidden": 3}]), ("ffn: .*list.*mapping",)),
    ("nothing for a mapping", "models", set_at("attention", None), ("attention", "mapping")),
    ("text for a number", "models", set_at("hidden", "big"), ("hidden", "'big'", "whole number")),
    ("half a layer", "models", set_at("layers", 32.5), ("layers", "32.5", "whole number")),
    ("negative size", "models", set_at("layers", -1), ("layers", "-1", "at least 1")),
    ("no heads", "models", set_at("attention.heads", 0), (r"attention\.heads", "at least 1")),
    ("text for a list", "models", set_at("sources", "a paper"), ("sources", "a list")),
    ("word for a flag", "models", set_at("tied_embeddings", "perhaps"), ("tied_embeddings", "true or false")),
    ("number for a name", "models", set_at("name", 3), ("name", "a text")),
    ("unknown norm", "models", set_at("norm.kind", "batchnorm"), (r"norm\.kind", "'batchnorm'", "rmsnorm")),
    ("heads not divided", "models", set_at("attention.kv_heads", 5), (r"attention\.kv_heads", "5", "32")),
    ("unknown dtype", "models", set_at("weights", "int2"), ("weights", "'int2'", "bf16")),
    (
        "negative bandwidth",
        "hardware",
        set_at("chip.memory_bandwidth_gb_per_s", -3350),
        (r"chip\.memory_bandwidth_gb_per_s", "-3350", "at least 20"),
    ),
    (
        "memory in bytes",
        "hardware",
        set_at("chip.memory_gib", 80 * 2**30),
        (r"chip\.memory_gib", "GiB", "at most 4096", "unit"),
    ),
    (
        "memory bandwidth in TB/s",
        "hardware",
        set_at("chip.memory_bandwidth_gb_per_s", 3.35),
        (r"chip\.memory_bandwidth_gb_per_s", "3.35", "GB/s", "at least 20", "unit"),
    ),
    (
        "memory bandwidth in B/s",
        "hardware",
        set_at("chip.memory_bandwidth_gb_per_s", 3.35e12),
        (r"chip\.memory_bandwidth_gb_per_s", "GB/s", "at most 100000", "unit"),
    ),
    (
        "link in bytes",
        "hardware",
        set_at("network.0.bandwidth_gb_per_s", 450e9),
        (r"network\.0\.bandwidth_gb_per_s", "GB/s", "at most", "unit"),
    ),
    (
        "link in TB/s",
        "hardware",
        set_at("network.0.bandwidth_gb_per_s", 0.45),
        (r"network\.0\.bandwidth_gb_per_s", "GB/s", "at least 0.5", "unit"),
    ),
    (
        "peak in FLOP/s",
        "hardware",
        set_at("chip.compute_tflops.bf16", 989e12),
        (r"chip\.compute_tflops\.bf16", "TFLOP/s", "at most", "unit"),
    ),
    (
        "peak in PFLOP/s",
        "hardware",
        set_at("chip.compute_tflops.bf16", 0.989),
        (r"chip\.compute_tflops\.bf16", "TFLOP/s", "at least 1", "unit"),
    ),
    ("power in kW", "hardware", set_at("chip.tdp_w", 0.7), (r"chip\.tdp_w", "watts", "at least 1", "unit")),
    ("price below zero", "hardware", set_at("price.usd_per_chip_hour", -1), (r"price\.usd_per_chip_hour", "above 0")),
    (
        "fraction in percent",
        "hardware",
        set_at("kernels.gemm.bf16.memory_fraction", 82),
        (r"kernels\.gemm\.bf16\.memory_fraction", "82", "at most 1.5"),
    ),
    ("not a number", "hardware", set_at("chip.memory_gib", float("nan")), (r"chip\.memory_gib", "nan")),
    (
        "infinite",
        "hardware",
        set_at("chip.memory_bandwidth_gb_per_s", float("inf")),
        (r"chip\.memory_bandwidth_gb_per_s", "inf"),
    ),
    ("list for a chip", "hardware", set_at("chip", [1, 2]), ("chip: .*list.*mapping",)),
    ("mapping for a list", "hardware", set_at("network", {"name": "nvlink"}), ("network", "a list")),
    ("no source", "hardware", without("kernels.gemm.bf16.provenance"), (r"kernels\.gemm\.bf16\.provenance: missing",)),
    (
        "unknown status",
        "hardware",
        set_at("kernels.gemm.bf16.provenance.status", "guessed"),
        (r"provenance\.status", "'guessed'", "assumed"),
    ),
    (
        "unknown algorithm",
        "hardware",
        set_at("collectives.0.algorithm", "circle"),
        (r"collectives\.0\.algorithm", "'circle'", "ring"),
    ),
    ("kind of kernel missing", "hardware", without("kernels.attention_prefill"), ("kernels", "attention_prefill")),
    ("kind of kernel unknown", "hardware", set_at("kernels.gem", {}), (r"kernels\.gem", "gemm")),
    ("16-bit constants missing", "hardware", without("kernels.gemm.bf16"), (r"kernels\.gemm", "bf16")),
    ("no peak", "hardware", set_at("chip.compute_tflops", {}), (r"chip\.compute_tflops",)),
    ("no network", "hardware", set_at("network", []), ("network",)),
    (
        "level that is not there",
        "hardware",
        set_at("collectives.0.level", "nvlnk"),
        (r"collectives\.0\.level", "'?nvlnk'?", "nvlink"),
    ),
    ("engine that is not there", "hardware", set_at("engine", "vlm"), ("engine", "'vlm'", "vllm")),
    ("slice that is no shape", "torus", set_at("network.0.slices", ["4y4"]), (r"network\.0\.slices", "4y4")),
    ("slice of nothing", "torus", set_at("network.0.slices", ["0x4"]), (r"network\.0\.slices", "0x4")),
    ("torus without slices", "torus", set_at("network.0.slices", []), (r"network\.0\.slices",)),
    ("memory in percent", "engines", set_at("memory.fraction", 90), (r"memory\.fraction", "90", "at most 1 ")),
    ("no sequences", "engines", set_at("scheduler.max_sequences", 0), (r"scheduler\.max_sequences", "at least 1")),
    ("unknown prefill", "engines", set_at("scheduler.prefill", "eager"), (r"scheduler\.prefill", "'eager'", "mixed")),
    ("unknown attention", "engines", set_at("attention", ["tails"]), ("attention", "tails", "heads")),
    ("no attention", "engines", set_at("attention", []), ("attention",)),
    ("unknown cache dtype", "engines", set_at("kv_cache", {"default": "int3"}), (r"kv_cache\.default", "int3", "bf16")),
    (
        "override of an unknown key",
        "engines",
        set_at("chips.h100-sxm.chip", {"memory_gb": 3}),
        ("memory_gb", "memory_gib"),
    ),
    ("override that is a list", "engines", set_at("chips.h100-sxm", [1]), (r"chips\.h100-sxm", "mapping")),
    (
        "override with a slip of unit",
        "engines",
        set_at("chips.h100-sxm.chip", {"memory_gib": 8e10}),
        ("memory_gib", "GiB", "at most 4096"),
    ),
]


@pytest.mark.parametrize(("family", "change", "parts"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_a_wrong_specification_names_file_and_key_and_what_was_expected(
    family: str, change: Callable[[dict[str, Any]], object], parts: tuple[str, ...]
) -> None:
    path = specification(family, change)
    words = {"models": ("-m", path), "engines": (*MODEL, "--engine", path)}.get(family, (*MODEL, "-H", path))
    refused(run(*words, "--gpus", "4"), 2, r"mine\.yaml", *parts)


def test_the_specifications_that_the_wrong_ones_are_made_of_are_right() -> None:
    def nothing(raw: dict[str, Any]) -> None:
        pass

    for family, words in (("models", ("-m",)), ("hardware", (*MODEL, "-H")), ("engines", (*MODEL, "--engine"))):
        path = Path(specification(family, nothing)).rename(Path(f"{family}.yaml").absolute())
        assert run(*words, path, "--quiet").status == 0
    assert run(*MODEL, "-H", specification("torus", nothing), "--gpus", "4", "--quiet").status == 0


def test_extends_of_an_unknown_name_suggests_the_nearest() -> None:
    path = put("mine.yaml", "extends: lama3-8b\nname: mine\n")
    refused(run("-m", path), 2, "mine.yaml", "extends", "'lama3-8b'", "llama3-8b")


def test_extends_must_be_a_name() -> None:
    path = put("mine.yaml", "extends: [llama3-8b]\nname: mine\n")
    refused(run("-m", path), 2, "mine.yaml", "extends")


def test_extends_in_a_circle_is_refused() -> None:
    put("two.yaml", "extends: three.yaml\nname: two\n")
    put("three.yaml", "extends: one.yaml\nname: three\n")
    for path in (
        put("one.yaml", "extends: two.yaml\nname: one\n"),
        put("self.yaml", "extends: self.yaml\nname: self\n"),
    ):
        refused(run("-m", path), 2, re.escape(path), "extends", "circle")


def test_a_file_of_another_family_is_refused() -> None:
    path = put("mine.yaml", "extends: h100-sxm\nname: mine\n")
    refused(run("-m", path), 2, "mine.yaml", "extends", "h100-sxm")
    refused(run(*MODEL, "-H", str(CONFIGS / "models" / "llama3-8b.yaml")), 2, "llama3-8b.yaml")


# --- output -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["--csv", "--json"])
@pytest.mark.parametrize("command", [("rank", *MODEL), ("estimate", *MODEL), ("hardware",), ("show", "h100")])
def test_a_target_that_cannot_be_written_is_named(command: tuple[str, ...], option: str) -> None:
    Path("folder").mkdir()
    refused(run(*command, option, "absent/plans.csv"), 2, "absent/plans.csv", "cannot be written", "(?i)no such")
    refused(run(*command, option, "folder"), 2, "folder", "cannot be written", "directory")
    put("file", "")
    refused(run(*command, option, "file/plans.csv"), 2, "file/plans.csv", "cannot be written")
    refused(run(*command, option, ""), 2, "cannot be written|--csv|--json")
    assert sorted(path.name for path in Path().iterdir()) == ["file", "folder"]


@unprivileged
def test_a_target_that_may_not_be_written_is_named_and_kept() -> None:
    put("plans.csv", "old\n")
    Path("plans.csv").chmod(0o444)
    refused(run(*MODEL, "--csv", "plans.csv"), 2, "plans.csv", "cannot be written", "permission")
    assert Path("plans.csv").read_text() == "old\n"
    Path("closed").mkdir(mode=0o555)
    refused(run(*MODEL, "--csv", "closed/plans.csv"), 2, "closed/plans.csv", "permission")


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (("-m", "lama3-8b"), 2),
        (("-m", "llama3-70b", "--gpus", "1"), 3),
        (("-m", "llama3-70b", "--tp", "3"), 3),
        (("-m", "llama3-70b", "--max-tpot", "0.1"), 3),
        (("estimate", "-m", "llama3-70b", "--tp", "3"), 3),
        (("estimate", *MODEL, "--points", "absent.csv"), 2),
        (("show", "lama3-8b"), 2),
    ],
)
def test_a_file_that_was_there_keeps_its_content_when_the_command_fails(words: tuple[str, ...], status: int) -> None:
    put("plans.csv", "old\n")
    put("plans.json", "[]\n")
    refused(run(*words, "--csv", "plans.csv", "--json", "plans.json"), status)
    assert Path("plans.csv").read_text() == "old\n"
    assert Path("plans.json").read_text() == "[]\n"
    assert sorted(path.name for path in Path().iterdir()) == ["plans.csv", "plans.json"]


@pytest.mark.parametrize("command", [("rank", *MODEL), ("estimate", *MODEL), ("models",), ("show", "h100")])
def test_nothing_is_written_when_one_of_two_targets_cannot_be(command: tuple[str, ...]) -> None:
    put("plans.csv", "old\n")
    refused(run(*command, "--csv", "plans.csv", "--json", "absent/plans.json"), 2, "absent/plans.json")
    assert Path("plans.csv").read_text() == "old\n"
    refused(run(*command, "--csv", "-", "--json", "absent/plans.json"), 2, "absent/plans.json")


@pytest.mark.parametrize("command", ["", "explain", "compare", "sweep", "memory", "estimate"])
@pytest.mark.parametrize("output", ["--csv", "--json"])
def test_a_specification_is_not_written_over(command: str, output: str, tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("extends: h100-sxm\n")
    words = [command] * bool(command) + ["TP1", "TP2"] * (command == "compare")
    done = run(*words, "-m", "llama3-8b", "-H", mine, output, tmp_path / "." / "mine.yaml")
    assert (done.status, done.out) == (2, "")
    assert done.err == f"plan: {output} {mine}: is read by this very command; choose another name\n"
    assert mine.read_text() == "extends: h100-sxm\n"


# --- points -----------------------------------------------------------------------------------------------------------

NOT_POINTS: list[tuple[str, str | bytes, tuple[str, ...]]] = [
    ("empty", "", ("is empty", "header")),
    ("blank lines", "\n\n\n", ("is empty", "header")),
    ("header only", "model,tp\n", ("no rows",)),
    ("ragged, too long", "model,tp\nllama3-8b,1\nllama3-8b,1,2\n", ("line 3", "3 cells", "2")),
    ("ragged, too short", "model,tp\nllama3-8b\n", ("line 2", "1 cell", "2")),
    ("ragged behind a blank line", "model,tp\n\nllama3-8b,1\n\nllama3-8b,1,2\n", ("line 5",)),
    ("column twice", "model,tp,tp\nllama3-8b,1,2\n", ("twice", "tp")),
    ("column under two names", "model,max-context,max_context\nllama3-8b,9000,10000\n", ("twice", "max.context")),
    ("no option", "a,b\n1,2\n", ("no column", "model")),
    ("binary", b"\x89PNG\r\n\x1a\n\x00\xff\xfe", ("not text", "UTF-8")),
    ("no model", "tp,isl\n1,100\n", ("model",)),
]


@pytest.mark.parametrize(("content", "parts"), [case[1:] for case in NOT_POINTS], ids=[case[0] for case in NOT_POINTS])
def test_a_file_that_holds_no_points_is_named(content: str | bytes, parts: tuple[str, ...]) -> None:
    put("points.csv", content)
    done = run("estimate", "--points", "points.csv", "--csv", "out.csv")
    if parts == ("model",):  # rows without a model are each in error, which is another status
        refused(done, 3, "points.csv", "no model")
        return
    refused(done, 2, "points.csv", *parts)
    assert not Path("out.csv").exists()


def test_a_points_file_that_cannot_be_read_is_named() -> None:
    refused(run("estimate", "--points", "absent.csv"), 2, "absent.csv", "(?i)no such file")
    Path("folder.csv").mkdir()
    refused(run("estimate", "--points", "folder.csv"), 2, "folder.csv", "(?i)directory")
    refused(run("estimate", "--points", "-", stdin=""), 2, "is empty")


def test_a_points_target_that_cannot_be_written_is_named() -> None:
    put("points.csv", "model\nllama3-8b\n")
    refused(run("estimate", "--points", "points.csv", "--csv", "absent/out.csv"), 2, "absent/out.csv")


# --- words and faults of our own --------------------------------------------------------------------------------------


def test_an_unknown_command_word_suggests_the_nearest() -> None:
    refused(run("modles"), 2, "unknown command 'modles'", "did you mean models")
    refused(run("estimat", *MODEL), 2, "'estimat'", "estimate")
    refused(run("xyzzy"), 2, "'xyzzy'", "rank.*estimate.*models")


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (("-m", "lama3-8b"), 2),
        (("-m", "llama3-70b", "--tp", "3"), 3),
        (("estimate", "-m", "llama3-70b", "--tp", "3"), 3),
        (("modles",), 2),
    ],
)
def test_debug_shows_where_and_keeps_the_exit_status(words: tuple[str, ...], status: int) -> None:
    done = run(*words, "--debug")
    assert "Traceback" in done.err
    assert (done.status, done.out) == (status, "")
    assert "Traceback" not in run(*words).err


def test_a_fault_of_our_own_is_one_line_and_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    from planner.command import rank  # noqa: PLC0415 (the package imports it when the command runs)

    def broken(*_: object) -> None:
        raise ZeroDivisionError("a made-up fault")

    monkeypatch.setattr(rank, "rank", broken)
    done = run(*MODEL)
    assert (done.status, done.out) == (1, "")
    assert len(done.err.splitlines()) == 1
    assert "internal error" in done.err
    assert "ZeroDivisionError: a made-up fault" in done.err
    assert "--debug" in done.err
    debugged = run(*MODEL, "--debug")
    assert (debugged.status, debugged.out) == (1, "")
    assert "Traceback" in debugged.err
    assert "a made-up fault" in debugged.err


def test_bad_input_of_a_real_process_is_the_same() -> None:
    done = run_process("-m", "llama3-70b", "--tp", "3")
    assert done == run("-m", "llama3-70b", "--tp", "3")
    refused(done, planner.NoPlanError.exit_status, "64 query heads")
