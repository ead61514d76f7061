"""A ring of instances that leaves its KV on fewer of them, and several masters over what is left: data is moved."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from phases.sharing import attend

Array = NDArray[np.float64]
HEADS, DIM = 3, 4


class Partial:
    """Attention over a part of the keys, which others are merged with: output, and the logarithm of its sum."""

    def __init__(self, queries: Array) -> None:
        self.output = np.zeros_like(queries)
        self.log_sum = np.full(queries.shape[:2], -np.inf)

    def merge(self, output: Array, log_sum: Array) -> None:
        both = np.logaddexp(self.log_sum, log_sum)
        with np.errstate(invalid="ignore"):
            shares = [
                np.where(np.isfinite(each), np.exp(each - both), 0.0)[..., None] for each in (self.log_sum, log_sum)
            ]
        self.output = self.output * shares[0] + output * shares[1]
        self.log_sum = both


def part(queries: Array, at: Array, keys: Array, values: Array, places: Array) -> tuple[Array, Array]:
    """(output, logarithm of the sum) of queries at positions over keys at positions, causal."""
    if not len(keys):
        return np.zeros_like(queries), np.full(queries.shape[:2], -np.inf)
    scores = np.einsum("qhd,khd->qhk", queries, keys) / np.sqrt(DIM)
    scores = np.where((places[None, :] > at[:, None])[:, None, :], -np.inf, scores)
    top = scores.max(axis=2)
    safe = np.where(np.isfinite(top), top, 0.0)
    weights = np.exp(scores - safe[..., None])
    total = weights.sum(axis=2)
    with np.errstate(divide="ignore", invalid="ignore"):
        output = np.einsum("qhk,khd->qhd", weights, values) / np.where(total > 0, total, 1.0)[..., None]
        return output, np.log(total) + safe


class Instance:
    """Tokens' KV that an instance keeps."""

    def __init__(self) -> None:
        self.keys, self.values, self.places = np.zeros((0, HEADS, DIM)), np.zeros((0, HEADS, DIM)), np.zeros(0)

    def keep(self, keys: Array, values: Array, places: Array) -> None:
        self.keys, self.values = np.concatenate([self.keys, keys]), np.concatenate([self.values, values])
        self.places = np.concatenate([self.places, places])


def ring(q: Array, k: Array, v: Array, instances: list[Instance], home: Array) -> tuple[Array, int]:
    """A prompt over a ring: token t is computed on instance t % d (striped) and kept on `home[t]` as it passes by.

    Returns:
        (outputs, elements that one instance sent).
    """
    d, tokens = len(instances), np.arange(len(q))
    stripes = [tokens[start::d] for start in range(d)]
    partial, sent = [Partial(q[own]) for own in stripes], 0
    for hop in range(d):
        for place, instance in enumerate(instances):
            own = stripes[(place - hop) % d]  # whose keys are here now
            partial[place].merge(*part(q[stripes[place]], stripes[place], k[own], v[own], own))
            mine = own[home[own] == place]
            instance.keep(k[mine], v[mine], mine)
        sent += (2 * k[stripes[0]].size) * (hop < d - 1)
    outputs = np.empty_like(q)
    for own, each in zip(stripes, partial, strict=True):
        outputs[own] = each.output
    return outputs, sent


@pytest.mark.parametrize(("degree", "kept"), [(4, (0, 1, 2, 3)), (4, (2,)), (4, (1, 3)), (3, (0, 2)), (2, (1,))])
def test_a_batch_is_scaled_down_on_the_way_and_decodes_with_several_masters(degree: int, kept: tuple[int, ...]) -> None:
    """Wu et al. 2024, sections 4.1 and 4.2: any placement by tokens, nothing sent but the ring's own hops."""
    random = np.random.default_rng(degree)
    n = 24
    q, k, v = (random.normal(size=(n, HEADS, DIM)) for _ in range(3))
    instances = [Instance() for _ in range(degree)]
    home = random.choice(kept, n)
    outputs, sent = ring(q, k, v, instances, home)
    np.testing.assert_allclose(outputs, attend(q, k, v), atol=1e-9)
    assert sent == (degree - 1) * 2 * n / degree * HEADS * DIM  # no more than without scaling down
    for place, instance in enumerate(instances):
        assert len(instance.keys) == (home == place).sum()
        assert place in kept or not len(instance.keys)
    holders = [instances[place] for place in kept]
    for step in range(5):  # each step another master, with the KV of its own token
        token = [random.normal(size=(1, HEADS, DIM)) for _ in range(3)]
        k, v = np.concatenate([k, token[1]]), np.concatenate([v, token[2]])
        holders[step % len(holders)].keep(token[1], token[2], np.array([float(n + step)]))
        merged = Partial(token[0])
        for each in holders:  # the query goes to all, partial outputs come back
            merged.merge(*part(token[0], np.array([n + step]), each.keys, each.values, each.places))
        np.testing.assert_allclose(merged.output, attend(token[0], k, v), atol=1e-9)
