"""Which experts tokens choose: expected counts of uniform top-k routing, without any notion of bytes or time.

Every token chooses `top_k` different ones of E experts, each set equally likely; `ranks` ranks hold E / ranks of them
each. Tokens choose independently, so that the picks of one token on a rank are hypergeometric and their sum over
tokens has

    mean m = T k / R,    variance m (1 - 1/R) (E - k) / (E - 1).

All arguments are numbers or arrays that broadcast; none of it is rounded to whole tokens or experts.
"""

from __future__ import annotations

import math
from functools import cache, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Num = Any
"""A number or an array of numbers; arrays broadcast."""
Array = NDArray[np.float64]

_DISCRETE = 12.0
"""Mean number of assignments on a rank up to which they are counted one by one; above, they are nearly normal."""
_EXACT = 16
"""Assignments of all ranks together up to which their sum is kept in mind as well."""


def distinct(experts: Num, top_k: Num, tokens: Num) -> Array:
    """Different experts that `tokens` tokens touch, expected: E (1 - (1 - k/E)^T), exact for whole numbers of tokens.

    Of those on a rank that holds a share of the experts, the same share is touched on average; `touched` has those on
    a rank with more assignments than that.
    """
    experts, top_k, tokens = _arrays(experts, top_k, tokens)
    return np.asarray(-experts * np.expm1(tokens * _log_left(top_k / experts)))


def _log_left(share: Array) -> Array:
    """log(1 - share); a large negative number in place of -inf, so that no tokens times it are 0."""
    return np.asarray(np.log1p(-np.minimum(share, 1 - 1e-16)) - 1e9 * (share >= 1))


def missed(experts: Num, here: Num, top_k: Num) -> Array:
    """Probability that a token has none of its `top_k` experts among `here` of `experts`: C(E-h, k) / C(E, k)."""
    experts, here, top_k = _arrays(experts, here, top_k)
    result: Array = np.ones(np.broadcast_shapes(experts.shape, here.shape, top_k.shape))
    for place in range(math.ceil(float(top_k.max()))):
        left = np.clip((experts - here - place) / np.maximum(experts - place, 1.0), 0.0, 1.0)
        result = result * np.where(place < top_k, left, 1.0)
    return result


def destinations(experts: Num, top_k: Num, ranks: Num) -> Array:
    """Different ranks that hold the experts of one token, expected: R (1 - C(E - E/R, k) / C(E, k)), exact."""
    experts, top_k, ranks = _arrays(experts, top_k, ranks)
    return np.asarray(ranks * (1 - missed(experts, experts / ranks, top_k)))


def limited_destinations(experts: Num, top_k: Num, nodes: Num, groups: int, top_groups: int) -> Array:
    """Different nodes that hold the experts of one token where it may choose from some groups of experts only.

    A token first chooses `top_groups` of `groups` groups (uniformly), then its experts among theirs (DeepSeek-V3,
    section 2.1.2: each token goes to at most M nodes, whose experts form a group). Exact where a node holds whole
    groups, or a group fills whole nodes.

    Args:
        experts: routed experts.
        top_k: that a token chooses.
        nodes: that the experts are spread over, as many on each.
        groups: of experts, one after another.
        top_groups: that a token may choose from; `groups` or more = no limit.
    """
    if top_groups >= groups:
        return destinations(experts, top_k, nodes)
    experts, top_k, nodes = _arrays(experts, top_k, nodes)
    reach = experts * (top_groups / groups)  # experts that a token chooses from
    held = np.maximum(1.0, np.round(groups / nodes))  # groups with experts on a node
    miss: Array = np.zeros(np.broadcast_shapes(experts.shape, top_k.shape, nodes.shape))
    for chosen in range(top_groups + 1):
        share = np.minimum(chosen * experts / groups, experts / nodes)
        miss = miss + _chosen_groups(groups, held, top_groups, chosen) * missed(reach, share, top_k)
    return np.asarray(nodes * (1 - miss))


def _chosen_groups(groups: int, held: Array, top_groups: int, chosen: int) -> Array:
    """Probability that `chosen` of the groups held by a node are among a token's: hypergeometric."""
    of_all = math.comb(groups, top_groups)

    def of_node(count: float) -> float:
        here = int(count)
        return math.comb(here, chosen) * math.comb(groups - here, top_groups - chosen) / of_all

    counts, which = np.unique(held, return_inverse=True)  # few, on any number of rows
    return np.array([of_node(count) for count in counts])[which].reshape(held.shape)


def fullest(tokens: Num, top_k: Num, experts: Num, ranks: Num, imbalance: Num = 1.0, redundant: Num = 0.0) -> Array:
    """Assignments (token, expert) on the rank with most of them, expected: far above the mean in decode, near it later.

    The expected maximum over ranks whose counts are dependent, since they add up to T k: exchangeable counts with
    variance v and a fixed sum deviate from their mean like independent ones of variance v R / (R - 1) do from theirs
    (exact for normal counts; independent Poisson counts given their sum are multinomial). That variance is
    m (E - k) / (E - 1): a binomial of as many trials as give mean and variance, whose maximum is summed term by term,
    or, where the mean is large, a normal with its skewness. With few assignments in all the counts are hypergeometric
    ones instead, exact for one token and for one expert a token. Within 3 % of simulations.

    Args:
        tokens: T, that choose in this step.
        top_k: different experts of each.
        experts: E, logical ones.
        ranks: R, that hold as many each; where they do not divide, those that hold one more are the ranks.
        imbalance: load of the rank that holds the most popular experts against the mean, over many tokens: 1 = uniform.
        redundant: copies of popular experts; a token goes to one of the copies, so that there are E + redundant.

    Returns:
        Assignments, at least the mean times `imbalance` (as far as there are tokens), at most all that a rank's experts
        can get.
    """
    tokens, top_k, experts, ranks, imbalance = _arrays(tokens, top_k, experts + np.asarray(redundant), ranks, imbalance)
    held = np.ceil(experts / ranks - 1e-9)  # on a rank
    ranks = experts / held
    shape = np.broadcast_shapes(tokens.shape, top_k.shape, experts.shape, ranks.shape, imbalance.shape)
    mean = np.broadcast_to(tokens * top_k / ranks, shape)
    share = np.broadcast_to((top_k - 1) / np.maximum(experts - 1, 1.0), shape)  # of a trial: 1 - variance / mean
    most = np.broadcast_to(tokens * np.minimum(top_k, held), shape)
    over = np.broadcast_to(ranks, shape)
    result: Array = np.empty(shape)
    few = mean <= _DISCRETE
    result[few] = _largest_binomial(mean[few], share[few], over[few], most[few])
    result[~few] = _largest_normal(mean[~few], share[~few], over[~few])
    total = np.broadcast_to(tokens * top_k, shape)
    for place in map(tuple, np.argwhere((total <= _EXACT) & (over > 1))):
        result[place] = _largest_of_few(float(total[place]), float(share[place]), float(over[place]))
    least = np.minimum(np.ceil(mean - 1e-9), most)  # somebody has at least the mean, and that in whole numbers
    result = np.where(over > 1, np.maximum(result, least), mean)
    return np.asarray(np.minimum(result + (imbalance - 1) * mean, most))


def _largest_binomial(mean: Array, share: Array, ranks: Array, most: Array) -> Array:
    """sum over x of 1 - F(x)^R, F that of a binomial with this mean and variance mean (1 - share); most = its end."""
    with np.errstate(divide="ignore", invalid="ignore"):
        trials = mean / share
        first = np.where(share > 0, trials * np.log1p(-np.minimum(share, 1 - 1e-12)), -mean)
        odds = share / (1 - np.minimum(share, 1 - 1e-12))
    term = np.exp(first)
    below, result, count = term.copy(), np.zeros_like(mean), 0
    end = mean.max(initial=0.0) + 9 * math.sqrt(mean.max(initial=0.0)) + 12
    while count < end:
        result += np.where(count < most, 1 - np.minimum(below, 1.0) ** ranks, 0.0)
        # the next term of the binomial, or of the Poisson that it becomes where a trial has no share
        with np.errstate(invalid="ignore"):
            binomial = np.maximum(trials - count, 0.0) * odds
        term = term * np.where(share > 0, binomial, mean) / (count + 1)
        below += term
        count += 1
    return np.asarray(result)


def _largest_of_few(total: float, share: float, ranks: float) -> float:
    """The largest count where all add up to `total`; between whole totals by interpolation."""
    low = math.floor(total)
    part = total - low
    below = _largest_hypergeometric(low, share, ranks)
    return below if part == 0 else (1 - part) * below + part * _largest_hypergeometric(low + 1, share, ranks)


@lru_cache(maxsize=4096)
def _largest_hypergeometric(total: int, share: float, ranks: float) -> float:
    """E[max] of counts that are drawn without replacement from S places, as many on each rank: exact.

    S gives them the variance m (1 - 1/R) (1 - share) of a sum over tokens: S share = total - 1 + share; one token draws
    from the experts themselves, and without a share counts are multinomial. P(max <= x) is the coefficient of
    z^total in (sum over j <= x of C(S/R, j) z^j)^R, over that without a limit.
    """
    places = (total - 1 + share) / share / ranks if share > 0 else math.inf
    weights = [1.0]
    for count in range(total):
        left = 1.0 if places == math.inf else max(places - count, 0.0)
        weights.append(weights[-1] * left / (count + 1))
    every = _coefficient(weights, total, ranks)
    return sum(1 - _coefficient(weights[: limit + 1], total, ranks) / every for limit in range(total))


def _coefficient(weights: list[float], degree: int, power: float) -> float:
    """Coefficient of z^degree in (sum of weights[j] z^j)^power, weights[0] = 1, by Miller's recurrence."""
    found = [1.0]
    for n in range(1, degree + 1):
        reach = range(1, min(n, len(weights) - 1) + 1)
        found.append(sum(((power + 1) * j - n) * weights[j] * found[n - j] for j in reach) / n)
    return found[degree]


def _largest_normal(mean: Array, share: Array, ranks: Array) -> Array:
    """mean + s (E[M] + skewness / 6 (E[M^2] - 1)), M the largest of R standard normals (Cornish and Fisher)."""
    deviation = np.sqrt(mean * (1 - share))
    skewness = np.where(deviation > 0, (1 - 2 * share) / np.maximum(deviation, 1e-12), 0.0)
    sizes, first, second = _largest_normals()
    log = np.log(ranks)
    top, square = np.interp(log, sizes, first), np.interp(log, sizes, second)
    return np.asarray(mean + deviation * (top + skewness / 6 * (square - 1)))


@cache
def _largest_normals() -> tuple[Array, Array, Array]:
    """(log R, E[M], E[M^2]) of the largest M of R standard normals, by integration, for R from 1 to 4096."""
    ranks = np.unique(np.round(2.0 ** np.arange(0, 12.01, 0.125)))
    at = np.linspace(-9.0, 9.0, 3601)
    density = np.exp(-(at**2) / 2) / math.sqrt(2 * math.pi)
    step = at[1] - at[0]
    below = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2 * step)])
    largest = np.diff(np.minimum(below, 1.0) ** ranks[:, None], axis=1)
    middle = (at[1:] + at[:-1]) / 2
    return np.log(ranks), largest @ middle, largest @ middle**2


def touched(assignments: Num, tokens: Num, top_k: Num, experts: Num, ranks: Num) -> Array:
    """Different experts that are chosen on one rank with so many assignments by so many tokens, expected.

    A token with experts on the rank has j of them there on average; A / j such tokens leave an expert out with
    probability (1 - j/e)^(A/j), e experts on the rank. Equal to `distinct` on a rank that holds all.
    """
    assignments, tokens, top_k, experts, ranks = _arrays(assignments, tokens, top_k, experts, ranks)
    held = np.ceil(experts / ranks - 1e-9)
    each = top_k * held / experts / np.maximum(1 - missed(experts, held, top_k), 1e-12)
    each = np.clip(np.maximum(each, assignments / np.maximum(tokens, 1.0)), 1.0, held)
    left = np.maximum(assignments, 0.0) / each * _log_left(each / held)
    return np.asarray(np.minimum(-held * np.expm1(left), np.maximum(assignments, 0.0)))


def _arrays(*values: Num) -> tuple[Array, ...]:
    return tuple(np.asarray(value, dtype=float) for value in values)
