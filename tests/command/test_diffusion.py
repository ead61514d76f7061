"""`plan` for diffusion transformers: tables, CSV, JSON, explain, launch; and options of the other kind of model."""

from __future__ import annotations

import csv
import io
import json
from itertools import pairwise
from pathlib import Path

import pytest
from helpers import CONFIGS, run

from planner.diffusion.ranking import COLUMNS

FLUX = ("--model", "flux.1-dev", "--gpus", 4)


def test_the_table_names_the_best_the_stale_and_the_assumed() -> None:
    done = run(*FLUX, "--objective", "latency", "--image", 1024)
    assert (done.status, done.err) == (0, "")
    heading, first, *_ = done.out.splitlines()
    assert heading.split()[:3] == ["#", "plan", "latency"]
    assert first.split()[0] == "1"
    text = " ".join(done.out.split())
    assert "4096 tokens and 512 of text; 50 steps, one pass a step; for latency." in text
    assert "partly one step old" in text
    assert "--exact leaves these out" in text
    assert "Assumed, not measured:" in text
    assert all(len(line) <= 100 for line in done.out.splitlines())


def test_few_steps_are_a_warning() -> None:
    assert "there is little to reuse: 25% of them are warm-up" in " ".join(
        run("-m", "flux.1-schnell", "--gpus", 2).out.split()
    )


def test_exact_leaves_the_stale_out_with_their_words() -> None:
    done = run(*FLUX, "--exact")
    assert "*" not in done.out
    assert "step old" not in done.out


def test_csv_and_json_have_every_column_and_nothing_else() -> None:
    table = run(*FLUX, "--csv", "-", "--top", 0)
    rows = list(csv.DictReader(io.StringIO(table.out)))
    objects = json.loads(run(*FLUX, "--json", "-", "--top", 0).out)
    assert tuple(rows[0]) == tuple(objects[0]) == COLUMNS
    assert [row["plan"] for row in rows] == [row["plan"] for row in objects]
    assert [row["plan"] for row in csv.DictReader(io.StringIO(run(*FLUX, "--csv", "-", "--top", 3).out))] == [
        row["plan"] for row in rows[:3]
    ]
    assert float(rows[0]["latency_ms"]) == pytest.approx(objects[0]["latency_ms"], rel=1e-5)
    bare = run(*FLUX, "--csv", "-", "--no-header").out
    assert bare.splitlines() == table.out.splitlines()[1:11]


def test_refused_plans_are_listed_with_their_reason() -> None:
    done = run(*FLUX, "--rejected", "--csv", "-", "--top", 1)
    errors = {row["plan"]: row["error"] for row in csv.DictReader(io.StringIO(done.out)) if row["error"]}
    assert "nothing to split" in errors["CFG2xDP2"]
    assert "has no tensor parallelism" in errors["TP4"]
    assert "CFG2xDP2" in run(*FLUX, "--rejected").out


def test_filters_choose_degrees() -> None:
    done = run(*FLUX, "--ulysses", "2", "--ring", "1,2", "--pipefusion", "1", "--csv", "-", "--top", 0)
    assert {(row["ulysses"], row["pipefusion"]) for row in csv.DictReader(io.StringIO(done.out))} == {("2", "1")}


def test_throughput_counts_images_and_video() -> None:
    assert "images/s" in run("-m", "sd3", "--gpus", 4, "--objective", "throughput").out
    video = run("-m", "wan2.1-t2v-1.3b", "--gpus", 4, "--objective", "throughput", "--frames", 41)
    assert "video s/s" in video.out
    assert "832x480x41 frames" in " ".join(video.out.split())


def test_explain_itemises_time_memory_and_volumes() -> None:
    done = run("explain", *FLUX, "--plan", "PF4")
    assert (done.status, done.err) == (0, "")
    assert done.out.startswith("PF4: ")
    text = " ".join(done.out.split())
    for words in ("attention", "bubbles", "warm-up", "VAE", "M S / (M S + N - 1)", "Fullest chip", "PipeFusion"):
        assert words in text
    rows = json.loads(run("explain", *FLUX, "--plan", "PF4", "--json", "-").out)
    assert sum(row["share"] for row in rows if row["part"] == "time") == pytest.approx(1.0)
    assert run("explain", *FLUX).status == 0


def test_launch_prints_the_line_of_xdit() -> None:
    done = run("launch", "-m", "pixart-alpha-xl2-1024", "-H", "a100", "--plan", "CFG2xPF2:4xU2", "--image", "2048x1024")
    assert (done.status, done.err) == (0, "")
    (line,) = [line for line in done.out.splitlines() if not line.startswith("#")]
    assert line.startswith("torchrun --nproc_per_node=8 examples/pixartalpha_example.py --model PixArt-alpha/")
    for words in (
        "--use_cfg_parallel", "--ulysses_degree 2", "--pipefusion_parallel_degree 2", "--num_pipeline_patch 4",
        "--height 1024 --width 2048", "--num_inference_steps 20", "--warmup_steps 1",
    ):  # fmt: skip
        assert words in line
    assert "--ring_degree" not in line
    nodes = run("launch", "-m", "flux", "-H", "l40", "--plan", "U4xPF4").out.splitlines()
    assert [f"--node_rank={node} --master_addr=$HEAD" in nodes[2 + node] for node in (0, 1)] == [True, True]
    video = run("launch", "-m", "cogvideox-2b", "--plan", "CFG2xU3").out
    assert "--num_frames 49" in video
    assert "torchrun" in run(*FLUX, "--launch").out


def test_an_engine_without_a_command_says_so() -> None:
    done = run("launch", "-m", "flux", "--plan", "U2", "--engine", "ideal-dit")
    assert done.status == 3
    assert "it is a bound, no product" in done.err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("-m", "llama3-8b", "--image", 512), "--image belongs to diffusion transformers"),
        (("-m", "llama3-8b", "--pipefusion", 2), "--pipefusion belongs to diffusion transformers"),
        (("explain", "-m", "llama3-8b", "--steps", 5), "--steps belongs to diffusion transformers"),
        (("-m", "flux", "--isl", 512), "--isl belongs to language models"),
        (("-m", "flux", "--concurrency", 4), "--concurrency belongs to language models"),
        (("-m", "flux", "--pp", 2), "--pp belongs to language models"),
        (("-m", "flux", "--plot", "x.svg"), "plan diagnose --plot"),
        (("-m", "flux", "--steps", 0), "--steps must be a whole number from 1"),
        (("-m", "flux", "--steps", "many"), "not a whole number"),
        (("-m", "flux", "--image", "big"), "--image: expected pixels"),
        (("-m", "flux", "--image", 1000), "try 992 or 1008"),
        (("-m", "flux", "--frames", 9), "makes single images"),
        (("-m", "hunyuanvideo", "--frames", 100), "try 97 or 101"),
        (("-m", "flux", "--objective", "tpot"), "--objective: expected one of latency, throughput, cost"),
        (("-m", "flux", "--engine", "vllm"), "vllm serves language models"),
        (("-m", "llama3-8b", "--engine", "xdit"), "xdit runs diffusion transformers"),
        (("-m", "flux", "--weights", "int3"), "unknown dtype 'int3'"),
        (("-m", "flux", "--memory-limit", "20GiB", "--memory-fraction", 0.5), "limit the same memory"),
        (("-m", "flux", "--max-latency", -1), "--max-latency must be above 0"),
        (("memory", "-m", "flux"), "flux is a diffusion transformer"),
        (("estimate", "-m", "flux", "--plan", "TP2"), "flux is a diffusion transformer"),
        (("explain", "-m", "flux", "--plan", "TP2xPP2"), "is not a plan of a diffusion transformer"),
        (("explain", "-m", "flux", "--plan", "U8", "--gpus", 4), "uses 8 chips, --gpus is 4"),
        (("-m", "flax"), "unknown model 'flax'"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_sentence(words: tuple[object, ...], says: str) -> None:
    done = run(*words)
    assert (done.status, done.out) == (2, "")
    assert says in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("-m", "flux", "--pipefusion", 4, "--patches", 3), "3 patches do not divide 64 rows"),
        (("-m", "flux", "--gpus", 2, "--hardware", "t4"), "fits"),
        (("-m", "flux", "--max-latency", 1), "no split keeps the limit"),
        (("explain", "-m", "flux", "--plan", "R7"), "neither the 64 rows"),
    ],
)
def test_where_no_plan_is_left_the_status_is_3(words: tuple[object, ...], says: str) -> None:
    done = run(*words)
    assert done.status == 3
    assert says in done.err


def test_a_file_of_ones_own_is_planned_and_its_errors_name_the_key(tmp_path: Path, fresh_catalog: None) -> None:
    own = tmp_path / "mine.yaml"
    own.write_text("extends: flux.1-dev\nkind: diffusion\nname: mine\nsteps: 8\n")
    assert "mine (11.9B, bf16)" in run("-m", own, "--gpus", 2, "--engine", "ideal-dit").out
    text = (CONFIGS / "models" / "sd3-medium.yaml").read_text()
    wrong, odd = tmp_path / "wrong.yaml", tmp_path / "odd.yaml"
    wrong.write_text(text.replace("heads: 24", "heads: 25"))
    done = run("-m", wrong)
    assert done.status == 2
    assert f"{wrong}: head_dim: found 64" in done.err
    odd.write_text(text + "colour: red\n")
    assert "colour: unknown key" in run("-m", odd).err


def test_the_catalogue_shows_both_kinds() -> None:
    rows = {row["name"]: row for row in json.loads(run("models", "--json", "-").out)}
    assert rows["flux.1-dev"]["kind"] == "diffusion"
    assert rows["flux.1-dev"]["parameters"] == 11_901_408_320
    assert rows["llama3-8b"]["kind"] == "language"
    assert {row["name"]: row["kind"] for row in json.loads(run("engines", "--json", "-").out)}["xdit"] == "diffusion"
    shown = run("show", "flux.1-dev")
    assert "mflop_per_pixel" in shown.out
    assert run("show", "black-forest-labs/FLUX.1-dev", "--yaml").out.startswith("kind: diffusion")
    assert "recalled" in run("show", "l40").out


def test_what_yaml_shows_loads_to_the_same(tmp_path: Path) -> None:
    from planner.specs.catalog import load_diffusion, load_sampler  # noqa: PLC0415

    for name, load in (("hunyuandit-v1.2", load_diffusion), ("xdit", load_sampler)):
        file = tmp_path / f"{name}.yaml"
        file.write_text(run("show", name, "--yaml").out)
        assert load(file) == load(name)


def test_crossover_finds_where_the_best_split_changes() -> None:
    words = ("crossover", "-m", "sd3", "-H", "l40", "--vary", "gpus", "--gpus", 4)
    rows = json.loads(run(*words, "--json", "-").out)
    assert [(row["from"], row["plan"]) for row in rows] == [(1, "U1"), (2, "CFG2"), (4, "CFG2xPF2")]
    for row in rows:  # each is what a ranking at its ends says
        for end in ("from", "to"):
            first = run("-m", "sd3", "-H", "l40", "--gpus", row[end], "--csv", "-", "--top", 1).rows[0]
            assert first["plan"].partition(":")[0].partition("xDP")[0] == row["plan"]
    table = run(*words)
    assert "2 changes found among 1, 2, 4" in " ".join(table.out.split())


def test_crossover_bisects_steps() -> None:
    words = ("-m", "sd3", "-H", "l40", "--gpus", 8)
    rows = json.loads(run("crossover", *words, "--vary", "steps", "--from", 2, "--to", 16, "--json", "-").out)
    assert [(row["from"], row["to"]) for row in rows] != [(2, 16)]
    for before, after in pairwise(rows):
        assert after["from"] == before["to"] + 1
        assert before["plan"] != after["plan"]
        assert before["next_plan"] == after["plan"]
        assert before["next_behind"] >= 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--vary", "isl"), "--vary isl: expected one of image, frames, steps, gpus"),
        (("--vary", "frames"), "makes single images"),
        (("--vary", "steps", "--from", 8, "--to", 8), "expected a range"),
        (("--from", 1000), "try 992 or 1008"),
    ],
)
def test_ranges_that_are_none_are_refused(words: tuple[object, ...], says: str) -> None:
    done = run("crossover", "-m", "flux", "--gpus", 2, *words)
    assert (done.status, done.out) == (2, "")
    assert says in done.err


# --- diagnose ---------------------------------------------------------------------------------------------------------


def test_the_diagnosis_prints_every_part() -> None:
    done = run("diagnose", "-m", "llama3-8b", "--gpus", 2)
    assert (done.status, done.err) == (0, "")
    text = " ".join(done.out.split())
    for words in ("FLOP/B", "quadrant", "divisible", "sequence cut", "KV cost", "topology", "precision", "messages"):
        assert words in text
    assert "decode: cutting the sequence does not pay" in text
    assert all(len(line) <= 100 for line in done.out.splitlines())
    image = run("diagnose", "-m", "flux", "--gpus", 2, "--image", 512)
    assert "cutting the sequence pays over the whole range, from 512 pixels of a side on" in " ".join(image.out.split())


@pytest.mark.parametrize(
    ("model", "gpus"), [("mixtral-8x7b", 2), ("deepseek-v3", 16), ("gpt-oss-20b", 1), ("lwm-7b", 4)]
)
def test_any_priced_model_is_diagnosed_within_a_terminal(model: str, gpus: int) -> None:
    done = run("diagnose", "-m", model, "--gpus", gpus)
    assert (done.status, done.err) == (0, "")
    assert "sequence cut" in done.out
    assert all(len(line) <= 100 for line in done.out.splitlines())


def test_csv_and_json_of_a_diagnosis_say_the_same() -> None:
    words = ("diagnose", "-m", "llama3-8b", "--gpus", 2)
    table = list(csv.DictReader(io.StringIO(run(*words, "--csv", "-").out)))
    objects = json.loads(run(*words, "--json", "-").out)
    assert [row["item"] for row in table] == [row["item"] for row in objects]
    assert {row["section"] for row in objects} == {"roofline", "spectrum", "dependencies", "verdict", "checklist"}
    ridge = next(row for row in objects if row["item"] == "ridge")
    assert ridge["value"] == pytest.approx(989e12 / 3350e9)


def test_a_roofline_is_drawn_the_same_each_time(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name in ("a.svg", "b.svg"):
        done = run("diagnose", "-m", "llama3-8b", "--gpus", 1, "--plot", tmp_path / name, "--quiet")
        assert (done.status, done.out, done.err) == (0, "", "")
    first, second = ((tmp_path / name).read_text() for name in ("a.svg", "b.svg"))
    assert first == second
    assert "decode step (TP1)" in first
    assert "ridge 295 FLOP/B" in first


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("-m", "qwen3-next-80b-a3b"), "has linear attention"),
        (("-m", "flux", "--osl", 4), "--osl belongs to language models"),
        (("-m", "llama3-8b", "--frames", 4), "--frames belongs to diffusion"),
        (("-m", "llama3-8b", "--plot", "x.pdf"), "ends in .svg or .png"),
    ],
)
def test_diagnoses_that_make_no_sense_are_refused(words: tuple[object, ...], says: str) -> None:
    done = run("diagnose", *words)
    assert (done.status, done.out) == (2, "")
    assert says in done.err
