"""What is asked of a deployment: lengths, load, schedule and number formats."""

from __future__ import annotations

from typing import Literal, NamedTuple

from planner.specs.lengths import Lengths
from planner.specs.speculation import Speculation

Schedule = Literal["continuous", "static"]
Arrivals = Literal["steady", "waves"]
SCHEDULES: tuple[Schedule, ...] = ("continuous", "static")
ARRIVALS: tuple[Arrivals, ...] = ("steady", "waves")


class Workload(NamedTuple):
    """Requests of one kind.

    Args:
        isl: tokens of a prompt; the mean, which need not be whole, where there are `lengths`.
        osl: tokens of an answer, the first included; likewise.
        concurrency: requests in flight in the whole deployment; none = searched or 1, as the goal says.
        schedule: continuous batching, or a static batch that is prefilled and decoded together; none = the engine's.
        weights: dtype of the weights; none = the model's own.
        kv_cache: dtype of the KV cache; none = the engine's rule.
        max_context: tokens that a request must be able to hold; changes memory only.
        arrivals: how requests arrive, which divides a prefill's stall between TTFT and TPOT; none = the engine's rule.
        prefix_hit: share of a prompt, 0 to 1, whose KV the engine has cached; rounded down to whole blocks.
        arrival_rate: requests a second that come to the whole deployment, in the place of a concurrency; none = none.
        lengths: how prompts and answers differ from their means; none = all are alike.
        speculation: what is drafted and how much of it accepted; none = a step decodes one token of each request.
    """

    isl: float = 1024
    osl: float = 256
    concurrency: int | None = None
    schedule: Schedule | None = None
    weights: str | None = None
    kv_cache: str | None = None
    max_context: int | None = None
    arrivals: Arrivals | None = None
    prefix_hit: float = 0.0
    arrival_rate: float | None = None
    lengths: Lengths | None = None
    speculation: Speculation | None = None
