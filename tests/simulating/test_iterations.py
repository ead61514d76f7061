"""Iteration times from tables against the cost engine itself, on mixes of prompts and decodes drawn at random."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray
from simulating.problems import Problem, problem

from planner.costs.layers import Pass, causal_pairs
from planner.costs.rows import Rows
from planner.costs.serving import replica_of
from planner.costs.speculation import Drafting
from planner.costs.step import pass_time
from planner.errors import InputError
from planner.simulating.iterations import IterationTime
from planner.specs.drafts import draft_of

Array = NDArray[np.float64]
COUNT = 80
CASES = {
    "dense": ("llama3-8b", "h100", "vllm", "TP1"),
    "across nodes": ("llama3-70b", "h100", "vllm", "TP16"),
    "pipeline": ("llama3-70b", "h100", "vllm", "TP4xPP3"),
    "windows": ("gemma-2-27b", "h100", "vllm", "TP2"),
    "experts": ("mixtral-8x7b", "a100", "vllm", "TP2"),
    "latent": ("deepseek-v3", "h200", "vllm", "TP8"),
    "textbook": ("llama3-70b", "h100-lecture", "vllm", "TP8"),
    "torus": ("palm-62b", "tpu-v4", "pope", "TP16/batch"),
    "context": ("llama3-70b", "h100", "ideal", "TP4xCP2"),
    "groups": ("deepseek-v3", "h200", "vllm", "TP8/heads1xbatch8"),
}


SEVERAL = ("dense", "windows", "torus", "groups")
"""Those where several prompts in one pass are told apart, and one where they are not."""


class Mix(NamedTuple):
    """Passes, as the cost engine has them."""

    decodes: Array
    context: Array
    new: Array
    prior: Array
    prompts: Array

    def exact(self, known: Problem) -> tuple[Array, Array]:
        """Seconds (whole, slowest) by the cost engine."""
        window, each, before = known.setting.model.attention.window, self.new / self.prompts, self.prior / self.prompts
        pairs, near = (
            self.prompts * (causal_pairs(before + each, seen) - causal_pairs(before, seen)) for seen in (None, window)
        )
        rows = Rows.of_plans([known.plan], isl=np.zeros(len(self.new)), osl=1, concurrency=1)
        ended = self.prompts * (self.new > 0)
        work = Pass(self.decodes, self.context, self.new, pairs, self.prior, ended, ended, window_pairs=near)
        time = pass_time(replica_of(known.setting, rows), work)
        return np.asarray(time.whole.total), np.asarray(time.slowest.total)

    def looked_up(self, known: Problem) -> Array:
        """[passes, (whole, slowest)] from the tables."""
        each, before = self.new / self.prompts, self.prior / self.prompts
        pairs = self.prompts * (causal_pairs(before + each) - causal_pairs(before))
        columns = (self.new, pairs, self.prior, self.decodes, self.decodes * self.context, self.prompts.astype(int))
        return np.array([known.clock(*row) for row in zip(*(column.tolist() for column in columns), strict=True)])


def mixes(known: Problem, kind: str) -> Mix:
    random = np.random.default_rng(3)

    def between(low: float, high: float) -> Array:
        return np.round(np.exp(random.uniform(np.log(low), np.log(high), COUNT)))

    scheduler = known.setting.engine.scheduler
    budget, longest = scheduler.chunk_tokens or 4096, min(known.setting.model.max_context, 65536)
    decodes = between(1, min(512, scheduler.max_sequences))
    if kind != "decodes":
        decodes[::4] = 0.0  # prompts alone
    new = np.zeros(COUNT) if kind == "decodes" else np.minimum(between(1, budget), np.maximum(1, budget - decodes))
    prior = np.where(random.random(COUNT) < 0.5, 0.0, between(16, longest)) * (new > 0)
    prompts = np.minimum(random.integers(2, 5, COUNT), new) if kind == "several" else np.ones(COUNT)
    return Mix(decodes, between(20, longest), new, prior, prompts)


@pytest.mark.parametrize(
    ("case", "kind"),
    [*((case, kind) for case in CASES for kind in ("decodes", "mixed")), *((case, "several") for case in SEVERAL)],
)
def test_look_ups_are_what_the_cost_engine_says(case: str, kind: str) -> None:
    known = problem(*CASES[case])
    mix = mixes(known, kind)
    whole, slowest = mix.exact(known)
    found = mix.looked_up(known)
    # groups: whole requests are divided between them, a saw-tooth of which the grid has the first teeth only
    allowed = 0.02 if case == "groups" and kind != "decodes" else 0.01
    assert np.abs(found[:, 0] / whole - 1).max() < allowed
    assert np.abs(found[:, 1] / slowest - 1).max() < allowed
    assert np.abs(found[:, 0] / whole - 1).mean() < 0.002


def test_steps_one_after_the_other_are_the_steps_one_by_one() -> None:
    row = problem(*CASES["dense"]).clock.decoding(37)
    together = row.steps(700.5, 300)
    assert together == pytest.approx([row.at(700.5 + ahead).whole for ahead in range(300)], rel=1e-12)
    assert np.all(np.diff(together) >= 0)


def test_a_longer_context_and_more_sequences_are_never_faster() -> None:
    clock = problem(*CASES["dense"]).clock
    times = np.array([clock.decoding(size).whole for size in (1, 2, 7, 30, 31, 200, 900)])
    assert np.all(np.diff(times, axis=1) >= 0)
    assert np.all(np.diff(times, axis=0) >= 0)


def test_beyond_the_grid_a_straight_line_goes_on() -> None:
    known = problem(*CASES["dense"])
    short = IterationTime(known.setting, known.plan, most_context=2048)
    far, near = short.decoding(8).at(8192).whole, known.clock.decoding(8).at(8192).whole
    assert far == pytest.approx(near, rel=0.02)


def test_drafts_are_refused() -> None:
    known = problem(*CASES["dense"])
    drafting = Drafting(draft_of("ngram", known.setting.model), None)
    with pytest.raises(InputError, match="--spec-tokens"):
        IterationTime(known.setting._replace(drafting=drafting), known.plan)
