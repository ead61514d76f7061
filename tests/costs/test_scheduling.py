"""Groups of data-parallel attention: limits of each, and the step that all of them take together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import run

from planner import Engine, Hardware, Model, load_engine, load_hardware, load_model
from planner.costs.layers import Pass, causal_pairs
from planner.costs.memory import Budget
from planner.costs.rows import Rows, structure_of
from planner.costs.scheduling import budget_of, prompts_together, sequences_of
from planner.costs.serving import Estimates, Fit, Setting, fit, formats_of, price, replica_of
from planner.costs.step import PassTime, pass_time
from planner.plans.placement import Placement
from planner.plans.plan import Plan

VLLM, SGLANG, IDEAL = load_engine("vllm"), load_engine("sglang"), load_engine("ideal")
H200, DEEPSEEK = load_hardware("h200-sxm"), load_model("deepseek-v3")


def setting_for(label: str, engine: Engine, model: Model = DEEPSEEK, hardware: Hardware = H200, **more: Any) -> Setting:
    formats = formats_of(model, hardware, engine, None, None)
    structure = structure_of(Plan.parse(label))
    place, budget = Placement.of(hardware, 64), Budget.of(hardware, engine)
    return Setting(model, hardware, engine, place, formats, structure, budget, **more)


def served(label: str, setting: Setting, load: Any, isl: float = 1024, osl: float = 256) -> tuple[Rows, Fit, Estimates]:
    """Rows of a plan at loads, with their memory and times."""
    plans = [Plan.parse(label)] * np.size(load)
    rows = Rows.of_plans(plans, isl=isl, osl=osl, concurrency=np.asarray(load, dtype=float))
    fitted = fit(setting, rows, clip=False)
    return rows, fitted, price(setting, rows, fitted)


def passed(setting: Setting, rows: Rows, work: Pass) -> PassTime:
    return pass_time(replica_of(setting, rows.part(0, 1)), Pass(*(np.full(1, float(value)) for value in work)))


def test_a_core_engine_of_each_rank_has_limits_of_its_own() -> None:
    """vLLM: eight ranks of data-parallel attention run 8 x 1024 sequences and 8192 tokens a pass each."""
    scheduler = VLLM.scheduler
    assert sequences_of(scheduler, 8) == 8 * 1024
    assert budget_of(scheduler, 8) == 8192
    assert sequences_of(VLLM.limited(sequences=16).scheduler, np.array([1, 8])).tolist() == [16, 128]
    assert sequences_of(VLLM.limited(tokens=512).scheduler, 8) == 8 * 512  # each takes a token of its rank's pass


def test_one_server_shares_out_what_its_options_name() -> None:
    """SGLang: chunked_prefill_size // dp_size and max_running_requests // dp_size; its own default is of each rank."""
    assert [float(budget_of(SGLANG.scheduler, groups) or 0) for groups in (1, 2, 8, 3)] == [8192, 4096, 1024, 2730]
    assert sequences_of(SGLANG.scheduler, 8) == 8 * 2048
    asked = SGLANG.limited(sequences=100).scheduler
    assert np.asarray(sequences_of(asked, np.array([1.0, 8.0, 64.0]))).tolist() == [100, 96, 64]
    assert float(np.asarray(sequences_of(asked, 200))) == 0  # not one for each: such a server does not start
    assert budget_of(SGLANG.limited(tokens=65536).scheduler, 8) == 8192


def test_without_groups_nothing_changes() -> None:
    for engine in (VLLM, SGLANG, IDEAL):
        assert sequences_of(engine.scheduler, 1) == engine.scheduler.max_sequences
        assert budget_of(engine.scheduler, 1) == engine.scheduler.chunk_tokens
        assert prompts_together(1, 500.0, 4.0, 20.0) == 1


@pytest.mark.parametrize(("engine", "factor"), [(VLLM, 8), (SGLANG.limited(sequences=256), 1)])
def test_the_limit_of_sequences_decides_what_fits(engine: Engine, factor: int) -> None:
    engine = engine.limited(sequences=256)
    for label, groups in (("TP8xEP8", 1), ("TP8xEP8/batch8", 8)):
        setting = setting_for(label, engine)
        _, fitted, _ = served(label, setting, [1])
        assert fitted.max_concurrency[0] == min(256 * (factor if groups == 8 else 1), fitted.by_memory[0])


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        ("vllm", "at most 4 sequences in each group of a replica, 32 in all, 64 asked"),
        ("sglang", "at most 4 sequences shared out to the groups of a replica, 0 in all, 64 asked"),
    ],
)
def test_a_refusal_says_whose_the_limit_is(engine: str, reason: str) -> None:
    named = ("--max-num-seqs", 4, "--concurrency", 64, "--attention", "batch8", "--engine", engine)
    done = run("--model", "deepseek-v3", "--hardware", "h200", "--gpus", 8, *named)
    assert done.status == 3
    assert reason in done.err


def test_a_rank_with_an_eighth_of_the_tokens_takes_more_passes_for_a_prompt() -> None:
    """One request of 8192 tokens: SGLang on eight groups cuts it into eight passes of 1024, vLLM into none."""
    label = "TP8xEP8/batch8"
    for engine, passes in ((SGLANG, 8), (SGLANG.limited(tokens=65536), 1)):
        setting = setting_for(label, engine)
        rows, _, priced = served(label, setting, [1], isl=8192)
        chunk = 8192 / passes
        byhand = 0.0
        for index in range(passes):
            start, stop = index * chunk, (index + 1) * chunk
            pairs = causal_pairs(stop) - causal_pairs(start)
            ended = float(index == passes - 1)
            byhand += float(passed(setting, rows, Pass(0, 8320, chunk, pairs, start, 1, ended)).whole.total[0])
        request = engine.host.request_us * 1e-6
        assert priced.ttft[0] == pytest.approx(byhand + request, rel=0.02)


def simulated(groups: int, requests: int, passes: int, steps: int, seed: int = 1) -> float:
    """Groups with a prompt in a step that has any, on average, in a closed loop: step by step, nothing assumed.

    Every group prefills one prompt at a time, a chunk a step, beside its decodes; requests that end are followed by
    others at once. Answers differ by up to a quarter, or all would end together for ever.
    """
    random = np.random.default_rng(seed)
    slots = [[-int(random.integers(0, steps)) for _ in range(requests // groups)] for _ in range(groups)]
    waiting: list[list[int]] = [[] for _ in range(groups)]
    left = [0] * groups
    together = []
    for step in range(6 * steps):
        busy = 0
        for group in range(groups):
            if not left[group] and waiting[group]:
                left[group] = passes
            if left[group]:
                busy += 1
                left[group] -= 1
                if not left[group]:
                    slots[group][waiting[group].pop(0)] = -int(steps * random.uniform(0.75, 1.25))
            for slot, count in enumerate(slots[group]):
                if count < 0:
                    slots[group][slot] = count + 1
                    if count == -1:
                        waiting[group].append(slot)
        if step > steps and busy:
            together.append(busy)
    return float(np.mean(together))


@pytest.mark.parametrize(
    ("groups", "requests", "passes", "steps"),
    [(8, 64, 1, 100), (8, 256, 2, 200), (4, 8, 3, 60), (16, 160, 2, 80), (8, 400, 4, 100), (2, 32, 1, 40)],
)
def test_prompts_fall_together_as_in_a_simulation(groups: int, requests: int, passes: int, steps: int) -> None:
    found = float(prompts_together(float(groups), float(requests), float(passes), float(steps)))
    assert found == pytest.approx(simulated(groups, requests, passes, steps), rel=0.12)
    assert 1 <= found <= groups


def test_a_lone_request_meets_no_prompt_of_others() -> None:
    assert prompts_together(8.0, 1.0, 4.0, 16.0) == 1
    few = [float(prompts_together(8.0, 16.0, 1.0, float(steps))) for steps in (10_000, 100, 10, 1)]
    assert few == sorted(few)
    assert few[0] == pytest.approx(1, abs=0.01)
    assert few[-1] == pytest.approx(8)


def test_a_prompt_on_one_rank_holds_up_all_of_them() -> None:
    """Lock-step: eight groups of one request each wait for seven prompts of others, as one group of eight would.

    Eight replicas of their own wait for none: their only request is the one that answers.
    """
    label = "TP8xEP8/batch8"
    setting = setting_for(label, VLLM)
    rows, _, priced = served(label, setting, [8], osl=1024)
    alone = setting._replace(schedule="static")
    step = float(served(label, alone, [8], osl=1024)[2].tpot[0])
    stall = (float(priced.tpot[0]) - step) * 1023
    one_prompt = Pass(7, 1024 + 512, 1024, causal_pairs(1024), 0, 1, 1)
    instead = float(passed(setting, rows, one_prompt).whole.total[0]) - step
    assert stall == pytest.approx(7 * instead, rel=0.05)  # hardly ever do two fall together
    # and the same prompts on a group each, at once, hold up all for the time of little more than one
    together = float(passed(setting, rows, Pass(0, 1536, 8192, 8 * causal_pairs(1024), 0, 8, 8)).whole.total[0])
    assert together < 3 * (instead + step)


def test_a_step_is_that_of_the_rank_with_most_requests() -> None:
    """Nine to sixteen requests on eight groups: two on the fullest in any case, whose attention all wait for."""
    label = "TP8xEP8/batch8"
    setting = setting_for(label, IDEAL, schedule="static")
    loads = np.arange(1, 18)
    tpot = served(label, setting, loads, isl=100_000)[2].tpot
    steps = np.diff(tpot)
    another = {7, 15}  # from 8 to 9, from 16 to 17
    jumps = [gap for index, gap in enumerate(steps) if index in another]
    others = [gap for index, gap in enumerate(steps) if index not in another]
    assert min(jumps) > 2 * max(others)


def test_more_groups_share_stalls_only_where_prompts_fall_together() -> None:
    """Per token, what prompts of others add: as many prompts on more groups take no less until they are frequent."""
    stalls = {}
    for osl in (16, 4096):
        setting = setting_for("TP8xEP8/batch8", VLLM)
        still = setting._replace(schedule="static")
        mixed = served("TP8xEP8/batch8", setting, [64], osl=osl)[2].tpot[0]
        stalls[osl] = float(mixed - served("TP8xEP8/batch8", still, [64], osl=osl)[2].tpot[0]) * (osl - 1) / 63
    assert stalls[16] < 0.6 * stalls[4096]  # of a prompt: several in a pass that all wait for anyway
