"""What schedulers let run: requests of a replica, tokens of a pass, and prompts of several groups in the same pass.

Groups of data-parallel attention have requests of their own and go in step. Their schedulers are as an engine's file
says: one a group with limits of its own, or limits for the whole replica that are shared out.
"""

from __future__ import annotations

import numpy as np

from planner.costs.weights import Num
from planner.specs.engine import Scheduler


def sequences_of(scheduler: Scheduler, groups: Num, drafted: Num | None = None) -> Num:
    """Requests that a replica with so many groups runs at most.

    Args:
        scheduler: its limits.
        groups: of data-parallel attention.
        drafted: tokens that each request drafts a step; none = nothing is drafted. In mixed iterations a request takes
            1 + k of the tokens.
    """
    own: Num = scheduler.max_sequences
    if scheduler.group_sequences == "shared":
        own = np.floor(own / np.asarray(groups))  # none at all where there are more groups
    budget = budget_of(scheduler, groups)
    if drafted is not None and scheduler.prefill == "mixed" and budget is not None:
        own = np.minimum(own, np.floor(budget / (drafted + 1.0)))
    return own * groups


def budget_of(scheduler: Scheduler, groups: Num) -> Num | None:
    """Tokens of a group in one pass at most; none = a prompt is never cut."""
    if scheduler.chunk_tokens is None or scheduler.group_tokens == "each":
        return scheduler.chunk_tokens
    return np.maximum(1.0, np.floor(scheduler.chunk_tokens / np.asarray(groups)))


def prompts_together(groups: Num, requests: Num, passes: Num, steps: Num) -> Num:
    """Prompts in a pass that has any, expected, where those of different groups come independently of each other.

    While a request decodes for `steps` steps, each of its group's others is prefilled once, in `passes` passes. So a
    step of one group holds a prompt with probability p = passes x requests / groups / steps (1 at most), and one of any
    group with 1 - (1 - p)^G. All groups wait for such a pass, which G p / (1 - (1 - p)^G) prompts share.

    Args:
        groups: G, of a replica; those beyond its requests have nothing to do.
        requests: that run on it.
        passes: that a prompt takes beside which the others' steps go on; 1 where its passes follow each other.
        steps: of an answer.
    """
    busy = np.maximum(1.0, np.minimum(groups, requests))
    share = np.minimum(1.0 - 1e-12, passes * np.maximum(1.0, requests / busy) / np.maximum(steps, 1.0))
    together = busy * share / -np.expm1(busy * np.log1p(-share))
    return np.where(busy > 1, np.maximum(1.0, together), 1.0)
