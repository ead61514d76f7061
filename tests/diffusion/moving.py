"""A small diffusion transformer in numpy whose data really move between devices; every byte that leaves one is counted.

One block is attention over all tokens with identity projections; that is all that decides what must be sent.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float16]
BYTES = 2


class Wires:
    """Counts the bytes that each device sends."""

    def __init__(self, devices: int) -> None:
        self.sent = [0] * devices

    def move(self, source: int, target: int, data: Array) -> Array:
        """A copy at the target; what stays costs nothing."""
        if source != target:
            self.sent[source] += data.size * BYTES
        return data.copy()


def attention(q: Array, k: Array, v: Array) -> NDArray[np.float64]:
    """[rows, heads, dh] over [tokens, heads, dh]."""
    scores = np.einsum("qhd,khd->hqk", q.astype(float), k.astype(float)) / np.sqrt(q.shape[-1])
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    found: NDArray[np.float64] = np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v.astype(float))
    return found


def all_reduce(wires: Wires, parts: list[Array]) -> list[Array]:
    """Ring all-reduce in chunks: reduce-scatter, then all-gather."""
    devices = len(parts)
    chunks = [np.array_split(part.astype(np.float64).ravel(), devices) for part in parts]
    for step in range(devices - 1):
        moving = [(device, (device - step) % devices) for device in range(devices)]
        data = [wires.move(device, (device + 1) % devices, chunks[device][which]) for device, which in moving]
        for (device, which), piece in zip(moving, data, strict=True):
            chunks[(device + 1) % devices][which] = chunks[(device + 1) % devices][which] + piece
    for step in range(devices - 1):
        moving = [(device, (device + 1 - step) % devices) for device in range(devices)]
        data = [wires.move(device, (device + 1) % devices, chunks[device][which]) for device, which in moving]
        for (device, which), piece in zip(moving, data, strict=True):
            chunks[(device + 1) % devices][which] = piece
    return [np.concatenate(own).reshape(parts[0].shape) for own in chunks]


def ulysses(wires: Wires, q: list[Array], k: list[Array], v: list[Array]) -> list[Array]:
    """Tokens are cut over devices; heads for attention; then tokens again."""
    devices, heads = len(q), q[0].shape[1]
    share = heads // devices

    def to_heads(parts: list[Array]) -> list[Array]:
        return [
            np.concatenate(
                [
                    wires.move(source, target, parts[source][:, target * share : (target + 1) * share])
                    for source in range(devices)
                ]
            )
            for target in range(devices)
        ]

    own = [attention(*each) for each in zip(to_heads(q), to_heads(k), to_heads(v), strict=True)]
    rows = q[0].shape[0]
    return [
        np.concatenate(
            [
                wires.move(source, target, own[source][target * rows : (target + 1) * rows].astype(np.float16))
                for source in range(devices)
            ],
            axis=1,
        )
        for target in range(devices)
    ]


def ring(wires: Wires, q: list[Array], k: list[Array], v: list[Array]) -> list[NDArray[np.float64]]:
    """Keys and values go round; partial sums are merged with their largest score (flash attention)."""
    devices = len(q)
    held = list(zip(k, v, strict=True))
    top = [np.full((part.shape[1], part.shape[0], 1), -np.inf) for part in q]
    total = [np.zeros_like(each) for each in top]
    out = [np.zeros((part.shape[1], part.shape[0], part.shape[2])) for part in q]
    for hop in range(devices):
        for device in range(devices):
            keys, values = held[device]
            scores = np.einsum("qhd,khd->hqk", q[device].astype(float), keys.astype(float)) / np.sqrt(q[0].shape[-1])
            new = np.maximum(top[device], scores.max(-1, keepdims=True))
            scale, weights = np.exp(top[device] - new), np.exp(scores - new)
            total[device] = total[device] * scale + weights.sum(-1, keepdims=True)
            out[device] = out[device] * scale + np.einsum("hqk,khd->hqd", weights, values.astype(float))
            top[device] = new
        if hop < devices - 1:
            held = [
                tuple(wires.move((device - 1) % devices, device, part) for part in held[(device - 1) % devices])
                for device in range(devices)
            ]
    return [(part / whole).transpose(1, 0, 2) for part, whole in zip(out, total, strict=True)]


def all_gather(wires: Wires, parts: list[Array]) -> list[Array]:
    """Ring all-gather."""
    devices = len(parts)
    have = [{device: parts[device]} for device in range(devices)]
    for step in range(devices - 1):
        moving = [(device, (device - step) % devices) for device in range(devices)]
        for device, which in moving:
            have[(device + 1) % devices][which] = wires.move(device, (device + 1) % devices, have[device][which])
    return [np.concatenate([own[index] for index in range(devices)]) for own in have]


class Pipeline:
    """PipeFusion: stages of blocks, patches of tokens, keys and values of the step before where none are fresh."""

    def __init__(self, stages: int, layers: int, patches: int, image: Array) -> None:
        self.wires = Wires(stages)
        self.stages, self.patches = stages, patches
        self.layers = layers // stages
        self.rows = image.shape[0] // patches
        self.image = image.astype(float)
        self.kv = [[image.astype(float).copy() for _ in range(self.layers)] for _ in range(stages)]
        self.ticks = 0
        self.busy = [0] * stages

    def run(self, steps: int) -> None:
        """All steps: in a tick each stage works on at most one patch, and hands it on at the tick's end."""
        waiting: list[list[tuple[int, NDArray[np.float64]]]] = [[] for _ in range(self.stages)]
        waiting[0] = [(patch, self._patch(patch)) for patch in range(self.patches)]
        started, finished = self.patches, 0
        while finished < steps * self.patches:
            moved = []
            for stage in range(self.stages):
                if waiting[stage]:
                    patch, data = waiting[stage].pop(0)
                    moved.append((stage, patch, self._work(stage, patch, data)))
                    self.busy[stage] += 1
            for stage, patch, data in moved:
                target = (stage + 1) % self.stages  # the last hands its output to the first: the next step's input
                sent = self.wires.move(stage, target, data.astype(np.float16)).astype(float)
                if target:
                    waiting[target].append((patch, sent))
                    continue
                finished += 1
                self.image[patch * self.rows : (patch + 1) * self.rows] = sent
                if started < steps * self.patches:
                    waiting[0].append((patch, sent))
                    started += 1
            self.ticks += 1

    def _patch(self, patch: int) -> NDArray[np.float64]:
        return self.image[patch * self.rows : (patch + 1) * self.rows]

    def _work(self, stage: int, patch: int, data: NDArray[np.float64]) -> NDArray[np.float64]:
        for layer in range(self.layers):
            context = self.kv[stage][layer]
            context[patch * self.rows : (patch + 1) * self.rows] = data  # fresh here, a step old elsewhere
            data = attention(data, context, context)
        return data

    @property
    def kv_elements(self) -> int:
        """Elements of keys that a stage keeps (values are as many)."""
        return sum(layer.size for layer in self.kv[0])
