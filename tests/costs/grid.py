"""A transformer on X x Y x Z chips in the layouts of Pope et al. 2022, moving real arrays: a witness for `layouts`.

Written from the paper's einsum notation (section 3.2, figure 2; section 3.3) and ignorant of the planner's counts.
Every chip stores d / X rows of its columns: the FFN's hidden width and the heads are divided over the YZ places. A
pass gathers weights along some axes (none, x, xy, xyz) and gives the chips along them different requests; over the
other axes a request's width is divided while it rests, and gathered before it is multiplied.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
from simulation import Array, Fabric, all_to_all, ring_all_gather, ring_all_reduce, ring_reduce_scatter
from test_sharded_transformer import Weights, activated, normalised, softmax

from planner.specs.model import Model

GATHERED = {"2d": "", "wg-x": "x", "wg-xy": "xy", "wg-xyz": "xyz"}
Columns = tuple[Array, Array]
"""Identities of columns (head x head_dim + place in the head) and their values [requests, tokens, columns]."""


def _mask(shape: tuple[int, ...], columns: Array, rows: Array) -> Array:
    mask = np.zeros(shape, dtype=bool)
    mask[np.ix_(rows, columns)] = True
    return mask


class Grid:
    """Chips that hold a model in X x YZ pieces. `attention` and `layouts` are of (decode, prefill)."""

    def __init__(
        self,
        model: Model,
        weights: Weights,
        sizes: tuple[int, int, int],
        layouts: tuple[str, str] = ("2d", "2d"),
        attention: tuple[str, str] = ("heads", "heads"),
    ) -> None:
        self.model, self.weights, self.sizes, self.layouts, self.attention = model, weights, sizes, layouts, attention
        self.places = list(product(*(range(size) for size in sizes)))
        self.chips = range(len(self.places))
        x, y, z = sizes
        self.count, self.x, self.ways = x * y * z, x, y * z
        self.heads = -(-model.attention.heads // self.count) * self.count  # padded with empty ones
        self._groups: dict[str, list[list[int]]] = {}
        self._own_group: dict[str, dict[int, list[int]]] = {}
        self.fabric, self.sums = Fabric(2), Fabric(4)
        self.read: dict[int, int] = {}  # elements of a layer's matrices that a chip multiplies with
        self.weights_moved: dict[int, tuple[float, float]] = {}  # bytes of them (sent, received)
        self.cache: dict[tuple[int, int], tuple[Array, Array]] = {}  # (layer, chip): [requests, tokens, heads, dh]

    # -------------------------------------------------------------------------------------------------- who is where

    def along(self, axes: str) -> list[list[int]]:
        """Groups of the chips that differ along these axes only."""
        if axes not in self._groups:
            self._groups[axes] = self._along(axes)
        return self._groups[axes]

    def _along(self, axes: str) -> list[list[int]]:
        groups: dict[Any, list[int]] = defaultdict(list)
        for chip, place in enumerate(self.places):
            groups[tuple(at for at, name in zip(place, "xyz", strict=True) if name not in axes)].append(chip)
        return list(groups.values())

    def group(self, chip: int, axes: str) -> list[int]:
        """The chips of this one's group."""
        if axes not in self._own_group:
            self._own_group[axes] = {member: group for group in self.along(axes) for member in group}
        return self._own_group[axes][chip]

    def own_heads(self, chip: int) -> list[int]:
        """Query heads of a chip where they are divided over all: those of its YZ place, divided over X."""
        x, y, z = self.places[chip]
        each = self.heads // self.count
        first = ((y * self.sizes[2] + z) * self.x + x) * each
        return list(range(first, first + each))

    def heads_of(self, chip: int, axes: str) -> list[int]:
        """Query heads of all chips along some axes."""
        return sorted(head for other in self.group(chip, axes) for head in self.own_heads(other))

    def kv_of(self, heads: Sequence[int]) -> list[int]:
        """KV heads that query heads need."""
        attention = self.model.attention
        real = [min(head, attention.heads - 1) for head in heads]  # an empty head may read any
        return sorted({head * attention.kv_heads // attention.heads for head in real})

    def hidden_of(self, chip: int, axes: str) -> list[int]:
        """Columns of the FFN of all chips along some axes."""
        each = self.model.ffn.hidden // self.count
        found = []
        for other in self.group(chip, axes):
            x, y, z = self.places[other]
            first = ((y * self.sizes[2] + z) * self.x + x) * each
            found += list(range(first, first + each))
        return sorted(found)

    def requests_of(self, chip: int, requests: int, axes: str) -> Array:
        """Requests that a chip has where they are divided over some axes."""
        return np.array_split(np.arange(requests), len(self.group(chip, axes)))[self.group(chip, axes).index(chip)]

    def whole_requests(self, chip: int, requests: int, gathered: str) -> Array:
        """Whole requests of a chip: those along the gathered axes, divided over the others."""
        rest = "".join(name for name in "xyz" if name not in gathered)
        group = self.group(chip, rest)
        return np.array_split(self.requests_of(chip, requests, gathered), len(group))[group.index(chip)]

    def width_of(self, chip: int, gathered: str) -> slice:
        """A resting token's part on a chip: X's part of the width divided over YZ, but for gathered axes."""
        order = ("x" if "x" not in gathered else "") + "".join(name for name in "yz" if name not in gathered)
        place, parts = 0, 1
        for name in order:
            axis = "xyz".index(name)
            place, parts = place * self.sizes[axis] + self.places[chip][axis], parts * self.sizes[axis]
        each = self.model.hidden // parts
        return slice(place * each, (place + 1) * each)

    # ------------------------------------------------------------------------------------------------------ collectives

    def gather(self, name: str, axes: str, parts: dict[int, Array]) -> dict[int, list[Array]]:
        """Every chip gets the parts of its group, which are alike in shape."""
        return self._gather(name, self.along(axes), parts)

    def _gather(self, name: str, groups: list[list[int]], parts: dict[int, Array]) -> dict[int, list[Array]]:
        if len(groups[0]) == 1:
            return {chip: [parts[chip]] for chip in parts}
        done = ring_all_gather(self.fabric, *({c: parts[c].ravel() for c in group} for group in groups), name=name)
        return {
            chip: [part.reshape(parts[chip].shape) for part in np.split(flat, len(group))]
            for group in done
            for chip, flat in group.items()
        }

    def scatter(self, name: str, axes: str, pieces: dict[int, list[Array]]) -> dict[int, Array]:
        """Every chip gets the sum of the piece of its place, over its group."""
        groups = self.along(axes)
        if len(groups[0]) == 1:
            return {chip: own[0] for chip, own in pieces.items()}
        flat = [{chip: np.concatenate([p.ravel() for p in pieces[chip]]) for chip in group} for group in groups]
        assert all(len({piece.size for chip in group for piece in pieces[chip]}) == 1 for group in groups)
        done = ring_reduce_scatter(self.fabric, *flat, name=name)
        return {
            chip: part.reshape(pieces[chip][place].shape)
            for group in done
            for place, (chip, part) in enumerate(group.items())
        }

    def exchange(
        self, name: str, axes: str, blocks: dict[int, dict[int, list[Array]]]
    ) -> dict[int, dict[int, list[Array]]]:
        """`blocks[source][target]` (of one group) to their targets, several arrays at once: result[target][source]."""
        result: dict[int, dict[int, list[Array]]] = {}
        for group in self.along(axes):
            flat = {
                source: {target: np.concatenate([b.ravel() for b in blocks[source][target]]) for target in group}
                for source in group
            }
            for target, received in all_to_all(self.fabric, flat, name=name).items():
                result[target] = {}
                for source in group:
                    shapes = [block.shape for block in blocks[source][target]]
                    ends = np.cumsum([int(np.prod(shape)) for shape in shapes])[:-1]
                    parts = np.split(received[source], ends)
                    result[target][source] = [part.reshape(s) for part, s in zip(parts, shapes, strict=True)]
        return result

    # ---------------------------------------------------------------------------------------------------------- a pass

    def forward(self, tokens: Array, start: int, decoding: bool) -> Array:
        """Logits of the last position of each request; [B, T] tokens stand from `start` on."""
        self._begin(len(tokens), start, decoding)
        rows = {chip: self.requests_of(chip, self.requests, self.gathered) for chip in self.chips}
        resting = self._embed(tokens, rows)
        for number, layer in enumerate(self.weights.layers):
            resting = self._layer(number, layer, resting)
        return self._logits(resting, rows)

    def _begin(self, requests: int, start: int, decoding: bool) -> None:
        self.fabric, self.sums = Fabric(2), Fabric(4)
        self.read = Counter()
        self.over = self.attention[0 if decoding else 1]
        self.suffix = "" if decoding else " (prefill)"
        self.gathered = GATHERED[self.layouts[0 if decoding else 1]]
        self.rest = "".join(axis for axis in "yz" if axis not in self.gathered)
        self.across = "".join(axis for axis in "xyz" if axis not in self.gathered)
        self.along_x = "" if "x" in self.gathered else "x"
        self.requests, self.start = requests, start

    def ffn(self, x: Array) -> Array:
        """The FFN of the first layer alone, in the layout of decoding: [B, T, d] to [B, T, d]."""
        self._begin(len(x), 0, True)
        rows = {chip: self.requests_of(chip, self.requests, self.gathered) for chip in self.chips}
        matrices = {name: self.weights.layers[0][name] for name in ("gate", "up", "down") if self._has(name)}
        held = self._weights(matrices)
        resting = {chip: x[rows[chip]][..., self.width_of(chip, self.gathered)] for chip in self.chips}
        parts = self.gather("inputs", self.rest, resting) if self.rest else {c: [a] for c, a in resting.items()}
        inputs = {chip: np.concatenate(received, axis=-1) for chip, received in parts.items()}
        made = self._into(inputs, held, ("gate_up",), "gate_up sums")
        hidden = {chip: {"down": self._activate(own["gate_up"])} for chip, own in made.items()}
        nothing = {chip: np.zeros_like(array) for chip, array in resting.items()}
        result = np.empty_like(x)
        for chip, array in self._out(nothing, hidden, held, "hidden").items():
            result[rows[chip], :, self.width_of(chip, self.gathered)] = array
        return result

    def _has(self, name: str) -> bool:
        return name in self.weights.layers[0]

    def _embed(self, tokens: Array, rows: dict[int, Array]) -> dict[int, Array]:
        """Each chip looks its rows of the table up; the sums are scattered to where tokens rest."""
        each = self.model.vocab // self.count
        pieces = {}
        for chip in self.chips:
            mine = (tokens >= chip * each) & (tokens < (chip + 1) * each)
            found = np.where(mine[..., None], self.weights.embedding[tokens], 0.0)
            pieces[chip] = [found[rows[c]][..., self.width_of(c, self.gathered)] for c in self.chips]
        if len({piece.size for piece in pieces[0]}) > 1:  # requests that do not divide: not what such tests look at
            return {chip: sum(own[chip] for own in pieces.values()) for chip in self.chips}
        return self.scatter("embedding", "xyz", pieces)

    def _logits(self, resting: dict[int, Array], rows: dict[int, Array]) -> Array:
        """The rows that need logits go to all chips, each of which has its part of the head."""
        ends = {chip: array[:, -1] for chip, array in resting.items()}
        if len({end.size for end in ends.values()}) == 1:
            last = self.gather("last rows", "xyz", ends)
        else:
            last = {chip: list(ends.values()) for chip in self.chips}
        each, parts = self.model.vocab // self.count, {}
        for chip, received in last.items():
            x = np.empty((self.requests, self.model.hidden))
            for source, part in zip(self.chips, received, strict=True):
                x[rows[source], self.width_of(source, self.gathered)] = part
            parts[chip] = (
                normalised(self.model, x, self.weights.final_norm)
                @ self.weights.head[:, chip * each : (chip + 1) * each]
            )
        return np.concatenate(self.gather("logits all-gather", "xyz", parts)[0], axis=1)

    def _layer(self, number: int, layer: dict[str, Array], resting: dict[int, Array]) -> dict[int, Array]:
        held = self._weights(layer)
        inputs = self._inputs(resting, layer["norms"][0][0])
        if self.model.parallel_block:
            made = self._into(inputs, held, ("qkv", "gate_up"), "qkv, gate_up sums")
            mixed = self._attention(number, {chip: own["qkv"] for chip, own in made.items()})
            out = {chip: {"out": mixed[chip], "down": self._activate(own["gate_up"])} for chip, own in made.items()}
            return self._out(resting, out, held, "heads, hidden")
        made = self._into(inputs, held, ("qkv",), "qkv sums")
        mixed = self._attention(number, {chip: own["qkv"] for chip, own in made.items()})
        resting = self._out(resting, {chip: {"out": array} for chip, array in mixed.items()}, held, "heads")
        made = self._into(self._inputs(resting, layer["norms"][1][0]), held, ("gate_up",), "gate_up sums")
        hidden = {chip: {"down": self._activate(own["gate_up"])} for chip, own in made.items()}
        return self._out(resting, hidden, held, "hidden")

    def _weights(self, layer: dict[str, Array]) -> dict[int, dict[str, Any]]:
        """What every chip multiplies with: its own, or gathered. Columns that several have, each sends a share of."""
        d, padding = self.model.hidden, self.heads - self.model.attention.heads
        flat = {
            "q": lambda w: np.pad(w, ((0, 0), (0, padding), (0, 0))).reshape(d, -1),
            "k": lambda w: w.reshape(d, -1),
            "v": lambda w: w.reshape(d, -1),
            "up": lambda w: w,
            "gate": lambda w: w,
            "out": lambda w: np.pad(w, ((0, padding), (0, 0), (0, 0))).reshape(-1, d).T,
            "down": lambda w: w.T,
        }
        columns: dict[str, Array] = {name: turn(layer[name]) for name, turn in flat.items() if name in layer}
        stored: dict[int, dict[str, tuple[Array, Array]]] = {}  # by chip and matrix: columns, rows of d
        needed: dict[int, dict[str, tuple[Array, Array]]] = {}
        for chip in self.chips:
            stored[chip] = self._pieces(chip, "x", columns, self.places[chip][0], self.x)
            whole = (0, 1) if "x" in self.gathered else (self.places[chip][0], self.x)
            needed[chip] = self._pieces(chip, "x" + self.gathered, columns, *whole)
        held: dict[int, dict[str, Any]] = {}
        for chip in self.chips:
            held[chip] = {name: (own[0], columns[name][np.ix_(own[1], own[0])]) for name, own in needed[chip].items()}
            self.read[chip] = sum(matrix.size for _, matrix in held[chip].values())
        if self.gathered:
            self._move_weights(columns, stored, needed)
        return held

    def _pieces(
        self, chip: int, axes: str, columns: dict[str, Array], part: int, parts: int
    ) -> dict[str, tuple[Array, Array]]:
        """(columns, rows of d) of each matrix."""
        heads = self.heads_of(chip, axes)
        spread = {
            "q": self._columns(heads),
            "k": self._columns(self.kv_of(heads)),
            "v": self._columns(self.kv_of(heads)),
            "out": self._columns(heads),
        }
        hidden = np.array(self.hidden_of(chip, axes))
        rows = np.array_split(np.arange(self.model.hidden), parts)[part]
        return {name: (spread.get(name, hidden), rows) for name in columns}

    def _columns(self, heads: Sequence[int]) -> Array:
        dh = self.model.attention.head_dim
        return (np.array(heads)[:, None] * dh + np.arange(dh)).ravel()

    def _move_weights(self, columns: dict[str, Array], stored: Any, needed: Any) -> None:
        """Every element goes straight to each chip that needs it, from one that stores it: the bytes of an all-gather.

        (Values need no moving: `_weights` has them; who sends what is what counts.)
        """
        for group in self.along(self.gathered):
            self._count_weights(group, columns, stored, needed)

    def _count_weights(self, group: list[int], columns: dict[str, Array], stored: Any, needed: Any) -> None:
        sizes = np.zeros((len(group), len(group)))
        for name, matrix in columns.items():
            has, wants = (
                np.stack([_mask(matrix.shape, *pieces[chip][name]) for chip in group]) for pieces in (stored, needed)
            )
            holders = has.sum(axis=0)
            assert not np.any(wants & (holders == 0))  # the group has all of it
            sizes += np.einsum("src,trc->st", has / np.maximum(holders, 1), wants)
        np.fill_diagonal(sizes, 0)
        for chip, out, into in zip(group, sizes.sum(axis=1).tolist(), sizes.sum(axis=0).tolist(), strict=True):
            self.weights_moved[chip] = 2 * out, 2 * into

    def _inputs(self, resting: dict[int, Array], gains: Array) -> dict[int, Array]:
        """Gathered over YZ and normalised; along X only sums travel."""
        parts = self.gather("inputs", self.rest, resting) if self.rest else {c: [a] for c, a in resting.items()}
        inputs = {chip: np.concatenate(received, axis=-1) for chip, received in parts.items()}
        d = self.model.hidden
        statistics = {
            chip: np.stack([(x**2).sum(-1), *([x.sum(-1)] if self.model.norm.kind == "layernorm" else [])], axis=-1)
            for chip, x in inputs.items()
        }
        if self.along_x and self.x > 1:
            groups = [{chip: statistics[chip].ravel() for chip in group} for group in self.along("x")]
            done = ring_all_reduce(self.sums, *groups, name="norm sums")
            statistics = {c: a.reshape(statistics[c].shape) for group in done for c, a in group.items()}
        normal = {}
        for chip, x in inputs.items():
            mean = statistics[chip][..., 1:] / d if statistics[chip].shape[-1] > 1 else 0.0
            square = statistics[chip][..., :1] / d - mean**2
            own = self._rows_of_d(chip)
            normal[chip] = (x - mean) / np.sqrt(square + 1e-6) * gains[own]
        return normal

    def _rows_of_d(self, chip: int) -> Array:
        part, parts = (self.places[chip][0], self.x) if self.along_x else (0, 1)
        return np.array_split(np.arange(self.model.hidden), parts)[part]

    def _into(
        self, inputs: dict[int, Array], held: dict[int, dict[str, Any]], which: Sequence[str], name: str
    ) -> dict[int, dict[str, dict[str, Columns]]]:
        """Products into the layer: columns with their sums, scattered along X where the width is divided there."""
        names = {"qkv": ("q", "k", "v"), "gate_up": tuple(n for n in ("gate", "up") if n in held[0])}
        wanted = [matrix for block in which for matrix in names[block]]
        made: dict[int, dict[str, Columns]] = {}
        pieces: dict[int, list[Array]] = {}
        for chip, x in inputs.items():
            made[chip] = {m: (held[chip][m][0], x @ held[chip][m][1]) for m in wanted}
            pieces[chip] = [
                np.concatenate(
                    [made[chip][m][1][..., self._scattered(other, m, held[other][m][0])] for m in wanted], -1
                )
                for other in (self.group(chip, "x") if self.along_x else [chip])
            ]
        if self.along_x:
            sums = self.scatter(name, "x", pieces)
            for chip, array in sums.items():
                own = {m: held[chip][m][0][self._scattered(chip, m, held[chip][m][0])] for m in wanted}
                ends = np.cumsum([len(ids) for ids in own.values()])[:-1]
                made[chip] = {
                    m: (ids, part) for (m, ids), part in zip(own.items(), np.split(array, ends, -1), strict=True)
                }
        return {chip: {block: {m: own[m] for m in names[block]} for block in which} for chip, own in made.items()}

    def _scattered(self, chip: int, matrix: str, ids: Array) -> Array:
        """Places of the columns that a chip along X gets: its heads', and its share of KV heads that others need."""
        if matrix in ("gate", "up"):
            return np.flatnonzero(np.isin(ids, self.hidden_of(chip, "")))
        if matrix == "q":
            return np.flatnonzero(np.isin(ids, self._columns(self.own_heads(chip))))
        mine = self.kv_of(self.own_heads(chip))
        sharers = [c for c in self.group(chip, "x") if self.kv_of(self.own_heads(c)) == mine]
        columns = self._columns(mine).reshape(len(mine), len(sharers), -1)[:, sharers.index(chip)]
        return np.flatnonzero(np.isin(ids, columns.ravel()))

    def _activate(self, own: dict[str, Columns]) -> Columns:
        gate = own["gate"][1] if "gate" in own else None
        return own["up"][0], activated(self.model, own["up"][1], gate)

    def _out(
        self, resting: dict[int, Array], made: dict[int, dict[str, Columns]], held: dict[int, dict[str, Any]], name: str
    ) -> dict[int, Array]:
        """Products out of the layer: columns gathered along X, partial sums scattered over YZ, the residual added."""
        sums: dict[int, Array] = {}
        together = {chip: np.concatenate([values for _, values in own.values()], -1) for chip, own in made.items()}
        received = self.gather(name, "x", together) if self.along_x else {c: [a] for c, a in together.items()}
        for chip, parts in received.items():
            total: Any = 0.0
            group = self.group(chip, "x") if self.along_x else [chip]
            for source, part in zip(group, parts, strict=True):
                ends = np.cumsum([len(ids) for ids, _ in made[source].values()])[:-1]
                for (matrix, (ids, _)), values in zip(made[source].items(), np.split(part, ends, -1), strict=True):
                    columns, weights = held[chip][matrix]
                    total = total + values @ weights[:, np.searchsorted(columns, ids)].T
            sums[chip] = total
        if not self.rest:
            return {chip: resting[chip] + total for chip, total in sums.items()}
        pieces = {chip: np.split(total, len(self.group(chip, self.rest)), -1) for chip, total in sums.items()}
        return {chip: resting[chip] + part for chip, part in self.scatter("outputs", self.rest, pieces).items()}

    # ------------------------------------------------------------------------------------------------------- attention

    def _attention(self, number: int, made: dict[int, dict[str, Columns]]) -> dict[int, Columns]:
        """From projected columns to mixed ones, placed as the queries were."""
        kept_over_batch = self.attention[0] == "batch"
        if self.over == "batch":
            whole = self._to_batch(f"heads to batch{self.suffix}", made, ("k", "v", "q"))
            mixed = {
                chip: self._attend(number, chip, own["q"], own["k"], own["v"], range(self.heads))
                for chip, own in whole.items()
            }
            return self._from_batch(mixed, made)
        if kept_over_batch:
            for chip, own in self._to_batch("KV to batch (prefill)", made, ("k", "v")).items():
                self._remember(number, chip, self._split(own["k"]), self._split(own["v"]))
        whole = self._to_heads(made)
        mixed = {}
        for chip, own in whole.items():
            heads = self.own_heads(chip)
            mixed[chip] = self._attend(number, chip, own["q"], own["k"], own["v"], heads, keep=not kept_over_batch)
        return self._from_heads(mixed, made)

    def _split(self, columns: Array) -> Array:
        dh = self.model.attention.head_dim
        return columns.reshape(*columns.shape[:2], columns.shape[2] // dh, dh)

    def _remember(self, number: int, chip: int, k: Array, v: Array) -> tuple[Array, Array]:
        if (number, chip) in self.cache:
            k, v = (np.concatenate([old, new], 1) for old, new in zip(self.cache[number, chip], (k, v), strict=True))
        self.cache[number, chip] = k, v
        return k, v

    def _attend(
        self, number: int, chip: int, q: Array, k: Array, v: Array, heads: Sequence[int], keep: bool = True
    ) -> Array:
        """Queries, keys and values [b, t, columns] of whole heads: mixed values [b, t, columns of the queries]."""
        q, k, v = self._split(q), self._split(k), self._split(v)
        if keep:
            k, v = self._remember(number, chip, k, v)
        kv = self.kv_of(heads)
        reads = [kv.index(self.kv_of([head])[0]) for head in heads]
        scores = np.einsum("bthe,bshe->bhts", q, k[:, :, reads]) / np.sqrt(self.model.attention.head_dim)
        back = self.start + np.arange(q.shape[1])[:, None] - np.arange(k.shape[1])
        mixed = np.einsum("bhts,bshe->bthe", softmax(np.where(back >= 0, scores, -np.inf)), v[:, :, reads])
        return mixed.reshape(*mixed.shape[:2], len(heads) * q.shape[3])

    def _to_batch(
        self, name: str, made: dict[int, dict[str, Columns]], which: Sequence[str]
    ) -> dict[int, dict[str, Array]]:
        """All columns of a chip's whole requests; of columns that several chips have each sends a share."""
        blocks: dict[int, dict[int, list[Array]]] = {}
        sent: dict[tuple[int, str], Array] = {}
        for group in self.along(self.across) if self.across else [[chip] for chip in self.chips]:
            for source in group:
                local = self.requests_of(source, self.requests, self.gathered)
                for matrix in which:
                    ids = made[source][matrix][0]
                    alike = [chip for chip in group if np.array_equal(made[chip][matrix][0], ids)]
                    sent[source, matrix] = np.array_split(np.arange(len(ids)), len(alike))[alike.index(source)]
                blocks[source] = {}
                for target in group:
                    rows = np.searchsorted(local, self.whole_requests(target, self.requests, self.gathered))
                    blocks[source][target] = [made[source][m][1][rows][..., sent[source, m]] for m in which]
        if self.across:
            received = self.exchange(name, self.across, blocks)
        else:
            received = {chip: {chip: own[chip]} for chip, own in blocks.items()}
        heads = {"q": self.heads, "k": self.model.attention.kv_heads, "v": self.model.attention.kv_heads}
        result: dict[int, dict[str, Array]] = {}
        for target, parts in received.items():
            shape = next(iter(parts.values()))[0].shape[:2]
            result[target] = {m: np.full((*shape, heads[m] * self.model.attention.head_dim), np.nan) for m in which}
            for source, arrays in parts.items():
                for matrix, array in zip(which, arrays, strict=True):
                    result[target][matrix][..., made[source][matrix][0][sent[source, matrix]]] = array
        return result

    def _from_batch(self, mixed: dict[int, Array], made: dict[int, dict[str, Columns]]) -> dict[int, Columns]:
        """Back to the columns of the queries, of all requests of a place."""
        if not self.across:
            return {chip: (made[chip]["q"][0], array) for chip, array in mixed.items()}
        blocks = {
            source: {target: [mixed[source][..., made[target]["q"][0]]] for target in self.group(source, self.across)}
            for source in self.chips
        }
        received = self.exchange(f"batch to heads{self.suffix}", self.across, blocks)
        return {
            chip: (made[chip]["q"][0], np.concatenate([arrays[0] for arrays in parts.values()]))
            for chip, parts in received.items()
        }

    def _to_heads(self, made: dict[int, dict[str, Columns]]) -> dict[int, dict[str, Array]]:
        """A chip's own heads of all requests, with the keys and values that they need."""
        if not self.gathered:
            return self._kv_to_heads_along_x(made)

        def exchanged(name: str, matrices: Sequence[str], wanted: dict[int, Array]) -> dict[int, list[Array]]:
            blocks = {
                source: {
                    target: [
                        made[source][m][1][..., np.searchsorted(made[source][m][0], wanted[target])] for m in matrices
                    ]
                    for target in self.group(source, self.gathered)
                }
                for source in self.chips
            }
            received = self.exchange(name, self.gathered, blocks)
            return {
                chip: [np.concatenate(arrays) for arrays in zip(*parts.values(), strict=True)]
                for chip, parts in received.items()
            }

        queries = {chip: self._columns(self.own_heads(chip)) for chip in self.chips}
        keys = {chip: self._columns(self.kv_of(self.own_heads(chip))) for chip in self.chips}
        q = exchanged(f"requests to heads{self.suffix}", "q", queries)
        copied = self.count > self.model.attention.kv_heads
        kv = exchanged(f"KV to {'all ' if copied else ''}heads{self.suffix}", "kv", keys)
        return {chip: {"q": q[chip][0], "k": kv[chip][0], "v": kv[chip][1]} for chip in self.chips}

    def _kv_to_heads_along_x(self, made: dict[int, dict[str, Columns]]) -> dict[int, dict[str, Array]]:
        """Chips along X that need the same KV heads gather what each got of them when sums were scattered."""
        groups: dict[Any, list[int]] = defaultdict(list)
        for chip in self.chips:
            groups[self.places[chip][1:], tuple(self.kv_of(self.own_heads(chip)))].append(chip)
        both = {chip: np.stack([own["k"][1], own["v"][1]]) for chip, own in made.items()}
        name = f"KV to all heads{self.suffix}"
        result = {}
        for chip, parts in self._gather(name, list(groups.values()), both).items():
            group = next(group for group in groups.values() if chip in group)
            columns = self._columns(self.kv_of(self.own_heads(chip)))
            whole = np.empty((*both[chip].shape[:-1], len(columns)))
            for source, part in zip(group, parts, strict=True):
                whole[..., np.searchsorted(columns, made[source]["k"][0])] = part
            result[chip] = {"q": made[chip]["q"][1], "k": whole[0], "v": whole[1]}
        return result

    def _from_heads(self, mixed: dict[int, Array], made: dict[int, dict[str, Columns]]) -> dict[int, Columns]:
        """Back to where the queries came from: all heads of a place for its requests."""
        if not self.gathered:
            return {chip: (made[chip]["q"][0], array) for chip, array in mixed.items()}
        blocks = {
            source: {
                target: [mixed[source][self.requests_of(target, self.requests, self.gathered)]]
                for target in self.group(source, self.gathered)
            }
            for source in self.chips
        }
        received = self.exchange(f"heads to requests{self.suffix}", self.gathered, blocks)
        result = {}
        for chip, parts in received.items():
            ids = np.concatenate([self._columns(self.own_heads(source)) for source in parts])
            values = np.concatenate([arrays[0] for arrays in parts.values()], -1)
            order = np.argsort(ids)
            result[chip] = ids[order], values[..., order]
        return result

    # ---------------------------------------------------------------------------------------------------------- counted

    def moved(self) -> dict[int, dict[str, tuple[float, float]]]:
        """By chip and name of the collective: bytes (sent, received)."""
        found: dict[int, dict[str, list[float]]] = {chip: defaultdict(lambda: [0.0, 0.0]) for chip in self.chips}
        for fabric in (self.fabric, self.sums):
            for message in fabric.messages:
                name, size = fabric.calls[message.call], message.elements * fabric.element_bytes
                if size:
                    found[message.source][name][0] += size
                    found[message.target][name][1] += size
        moved = {chip: {name: (out, into) for name, (out, into) in own.items()} for chip, own in found.items()}
        if self.gathered:
            for chip, both in self.weights_moved.items():
                moved[chip]["weights"] = both
        return moved
