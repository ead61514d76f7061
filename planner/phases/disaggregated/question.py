"""What is asked of two pools: the request of each, the chips there are, and where replicas of both may stand."""

from __future__ import annotations

from typing import Literal, NamedTuple

from planner.errors import InputError
from planner.request import Request, check
from planner.units import MS

Affinity = Literal["high", "low"]
AFFINITIES: tuple[Affinity, ...] = ("high", "low")
"""high: wires between nodes carry the KV, so that any replica feeds any other (DistServe's algorithm 1); low: both
phases of an instance stand in the same nodes, stage by stage, and the KV stays inside them (its algorithm 2)."""
BUSY = 0.8
"""Share of their time that prefill replicas work where no limit on TTFT says less, and that wires may at most."""
NEARLY = 0.9
"""Of the requests that may break a limit, those that break one of the two where nearly all of them do."""
MOST_NODES = 8
"""Nodes that a replica spans at most."""


class Question(NamedTuple):
    """Both requests have the same model and workload; limits, rate and filters are those of the prefill one."""

    prefill: Request
    decode: Request
    prefill_chips: int | None = None
    """Of the prefill pool; none = as many of `chips` as serve best."""
    decode_chips: int | None = None
    affinity: tuple[Affinity, ...] = AFFINITIES
    overlapped: bool = True
    """KV is sent layer by layer while the prompt computes; else when it is done."""
    share: float | None = None
    """Of the requests, those that keep both limits; none = means keep them."""
    prefill_share: float | None = None
    """... and those that keep the limit on TTFT; none = as many as keep the one on TPOT."""

    @property
    def chips(self) -> int:
        """Chips there are, or may be, in all."""
        if self.prefill_chips is not None and self.decode_chips is not None:
            return self.prefill_chips + self.decode_chips
        return self.prefill.gpus

    @property
    def pools(self) -> tuple[int, int] | None:
        """Chips of the pools where they are given: if one is, the other has the rest."""
        if self.prefill_chips is None and self.decode_chips is None:
            return None
        prefill = self.chips - (self.decode_chips or 0) if self.prefill_chips is None else self.prefill_chips
        return prefill, self.chips - prefill

    @property
    def shares_nodes(self) -> bool:
        """Whether replicas of both phases may stand in the same nodes: on one kind of machine, which has nodes."""
        return not self.mixed and self.prefill.hardware.domain is not None and self.pools is None

    @property
    def rate(self) -> float | None:
        """Requests per second that come; none = as many as can be served."""
        return self.prefill.workload.arrival_rate

    @property
    def mixed(self) -> bool:
        """Whether the pools are different machines."""
        return self.prefill.hardware.name != self.decode.hardware.name

    @property
    def shares(self) -> tuple[float, float] | None:
        """Of the requests, those that keep the limit of each phase, where one has nothing to do with the other."""
        if self.share is None:
            return None
        prefill = float(self.share**0.5) if self.prefill_share is None else self.prefill_share
        return prefill, self.share / prefill

    @property
    def splits(self) -> tuple[Question, ...]:
        """The question with each way that is looked at to divide what may break a limit between the two phases."""
        if self.share is None:
            return (self,)
        most = self.share + NEARLY * (1 - self.share)
        return tuple(self._replace(prefill_share=share) for share in (None, self.share / most, most))

    @property
    def bounded(self) -> bool:
        """Whether there are limits; else the frontier is asked for."""
        return self.prefill.limits.ttft is not None


def check_question(question: Question) -> None:
    """Refuses what makes no sense whatever the plans.

    Raises:
        InputError: one limit without the other, no answers to decode, pools of no chips, or a torus whose pools are
            not given.
    """
    for request in (question.prefill, question.decode):
        check(request)
    limits, work = question.prefill.limits, question.prefill.workload
    if (limits.ttft is None) != (limits.tpot is None):
        given, other = ("tpot", "ttft") if limits.ttft is None else ("ttft", "tpot")
        raise InputError(
            f"--max-{given} {getattr(limits, given) / MS:g}: one phase without a limit could be made as slow as one "
            f"likes; give --max-{other} too, or neither for the frontier"
        )
    if not question.bounded and question.rate is not None:
        raise InputError("--arrival-rate asks for the fewest chips within limits: give --max-ttft and --max-tpot")
    if work.osl < 2:
        raise InputError(f"--osl {work.osl:g}: one token comes from the prompt, and nothing is left to decode apart")
    if work.concurrency is not None:
        raise InputError("--concurrency: the load of each pool is what its limits allow; give --arrival-rate instead")
    if question.share is not None and not 0 < question.share < 1:
        raise InputError(f"--attainment must be above 0 and below 1, a share of the requests, found {question.share:g}")
    if question.share is not None and not question.bounded:
        raise InputError("--attainment: the share of requests that keep limits needs --max-ttft and --max-tpot")
    if work.speculation is not None and question.mixed:
        raise InputError("--spec-tokens: drafts on different machines for prefill and decode are not priced")
    _check_pools(question)


def _check_pools(question: Question) -> None:
    for name in ("prefill", "decode"):
        count = getattr(question, f"{name}_chips")
        if count is not None and count < 1:
            raise InputError(f"--{name}-gpus must be at least 1, found {count}: a pool without chips serves nothing")
    pools = question.pools
    if pools is not None and min(pools) < 1:
        raise InputError(
            f"--prefill-gpus, --decode-gpus: of {question.chips} chips {pools[0]} would be left for prefill and "
            f"{pools[1]} for decode; each pool needs one"
        )
    if pools is not None and question.rate is not None:
        raise InputError(
            "--arrival-rate finds how many chips each pool needs: no --prefill-gpus, --decode-gpus with it"
        )
    if question.affinity == ("low",) and not question.shares_nodes:
        raise InputError("--affinity low: pools of different machines, of given sizes, or on a torus share no node")
    torus = next((each.hardware for each in (question.prefill, question.decode) if each.hardware.torus), None)
    if torus is not None and pools is None:
        raise InputError(f"{torus.name} is a torus, its pools are slices: say which with --prefill-gpus, --decode-gpus")
    if question.chips < 2:
        raise InputError("--gpus 1: two pools need a chip each, at least 2")
