"""A model as an operator graph: embedding, the attention and FFN of every layer, head, in one forward pass.

The kernels of a block are those that `costs.layers` counts for it, by a pass of a share of the requests on a rank of a
tensor-parallel group: a template of `plan` is one strategy of this graph, and costs what the analytic engine says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from planner.costs.layers import Formats, Operation, Pass, Structure, causal_pairs, gemm
from planner.costs.layouts import count
from planner.costs.step import as_run
from planner.costs.weights import (
    Elements,
    Shard,
    embedding_elements,
    final_norm_elements,
    head_elements,
    layer_elements,
    layer_weights,
)
from planner.errors import InputError
from planner.opgraph.graph import Degrees, Dim, Edge, Graph, Operator
from planner.plans.rules import tp_allowed
from planner.specs.dtypes import ACTIVATION_BYTES
from planner.specs.engine import Engine
from planner.specs.model import LayerKind, Model

Phase = Literal["decode", "prefill"]
PHASES: tuple[Phase, ...] = ("decode", "prefill")
_FFN = frozenset(("gate_up", "down", "activation"))
Part = Literal["embedding", "attention", "ffn", "experts", "block", "head"]


class Load(NamedTuple):
    """One forward pass: so many requests, each decoding one token behind `context` tokens, or prefilling as many."""

    phase: Phase
    requests: int
    context: int
    held: int
    """Tokens whose KV a request holds in memory."""

    def work(self, requests: float, tokens: float, window: int | None = None) -> Pass:
        """The pass of a share of the requests and, in prefill, of the tokens of each; `window` is the model's."""
        if self.phase == "decode":
            return Pass(requests, float(self.context))
        rows = requests * tokens
        return Pass(
            0.0,
            0.0,
            prefill_tokens=rows,
            prefill_pairs=requests * causal_pairs(float(self.context)),
            window_pairs=requests * causal_pairs(float(self.context), window),
            prompts=requests,
            prompts_ended=requests,
        )


class Setup(NamedTuple):
    """What all blocks of a graph share."""

    model: Model
    engine: Engine
    formats: Formats
    load: Load


class Block:
    """The work of one part of a model; `degrees` are those of requests, tokens and heads, widths or vocabulary.

    Blocks are equal where their part and their setup are the same, so that layers that are alike share prices.
    """

    def __init__(self, setup: Setup, part: Part) -> None:
        self.setup, self.part = setup, part
        self._shards: dict[int, Shard] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Block) and self.part == other.part and self.setup is other.setup

    def __hash__(self) -> int:
        return hash((self.part, id(self.setup)))

    def _shard(self, ranks: int) -> Shard:
        if ranks not in self._shards:
            setup = self.setup
            self._shards[ranks] = Shard.for_engine(setup.model, setup.engine, setup.formats.weights.name, ranks)
        return self._shards[ranks]

    def operations(self, degrees: Degrees) -> Sequence[Operation]:
        """The kernels of one task."""
        setup, shard = self.setup, self._shard(degrees[2])
        load = setup.load
        work = load.work(load.requests / degrees[0], load.context / degrees[1], setup.model.attention.window)
        counted, _ = count(setup.model, setup.engine, shard, work, setup.formats, Structure())
        place = {"embedding": "first", "head": "last"}.get(self.part, "layer")
        found = []
        for operation in counted:
            if operation.place != place:
                continue
            share = _share(operation.name, self.part)
            if share:
                run = as_run(setup.model, setup.engine, setup.formats, operation)
                found.append(run._replace(times=run.times * share))
        return found + (self._experts(shard, work) if self.part == "experts" else [])

    def _experts(self, shard: Shard, work: Pass) -> list[Operation]:
        """Router, routed and shared experts. Each of R rows goes to k of E experts, of which E (1 - (1 - k/E)^R) are
        then read; widths are divided over the ranks."""
        model, formats = self.setup.model, self.setup.formats
        experts, rows, d = model.experts, float(work.tokens), model.hidden
        assert experts is not None
        touched = experts.routed * (1 - (1 - experts.top_k / experts.routed) ** rows)
        matrices, each = model.ffn.inputs, formats.weights.bytes
        chosen, width = rows * experts.top_k, float(shard.expert)
        shared = float(np.ceil(experts.shared_hidden / shard.tp))
        dtype = formats.compute
        found = [
            gemm("router", rows, d, experts.routed, d * experts.routed * formats.weights.plain_bytes, formats.native)
        ]
        found.append(gemm("experts gate_up", chosen, d, matrices * width, touched * d * matrices * width * each, dtype))
        found.append(gemm("experts down", chosen, width, d, touched * d * width * each, dtype))
        if shared:
            found.append(gemm("shared gate_up", rows, d, matrices * shared, d * matrices * shared * each, dtype))
            found.append(gemm("shared down", rows, shared, d, d * shared * each, dtype))
        written = (chosen * width + rows * shared) * (matrices + 1) * ACTIVATION_BYTES
        return [*found, Operation("activation", "elementwise", formats.native, activation_bytes=written)]

    def weight_bytes(self, degrees: Degrees) -> float:
        """Bytes of the weights of one rank."""
        setup, shard = self.setup, self._shard(degrees[2])
        model, dtype = setup.model, setup.formats.weights
        if self.part == "embedding":
            return float(embedding_elements(model, shard) * dtype.plain_bytes)
        if self.part == "head":
            return float((head_elements(model, shard) + final_norm_elements(model)) * dtype.plain_bytes)
        whole = layer_elements(model, shard, LayerKind("full", self.part == "experts")).bytes(model, dtype)
        if self.part == "block":
            return float(whole)
        dense = layer_weights(model, shard)
        plain = dense.qkv_bias + dense.out_bias + model.norm.per_layer * model.norm.vectors * model.hidden / 2
        attention = Elements(attention=dense.qkv + dense.out, plain=plain).bytes(model, dtype)
        return float(attention if self.part == "attention" else whole - attention)

    def state_bytes(self, degrees: Degrees) -> float:
        """KV of a task's requests in this layer, every token kept; KV heads are copied beyond their number."""
        if self.part not in ("attention", "block"):
            return 0.0
        setup, shard = self.setup, self._shard(degrees[2])
        token = 2 * float(shard.kv_heads) * setup.model.attention.head_dim * setup.formats.kv.bytes
        return setup.load.requests / degrees[0] * setup.load.held * token


def _share(name: str, part: Part) -> float:
    """How much of a kernel of a layer (or of an end) belongs to a part: the norms go half and half."""
    if part in ("embedding", "head", "block"):
        return 1.0
    if name == "norm":
        return 0.5
    if part == "experts":
        return 0.0
    return float((name in _FFN) == (part == "ffn"))


def from_model(
    model: Model, engine: Engine, formats: Formats, load: Load, layers: int | None = None, ranks: int = 1024
) -> Graph:
    """The graph of a model's forward pass.

    Args:
        model: dense layers or experts, attention over all or some of the tokens.
        engine: whose kernels run, and which collectives.
        formats: of weights, KV and arithmetic.
        load: what the pass processes.
        layers: the first so many layers; none = all. Embedding and head are always there.
        ranks: chips there are: an operator's parameters are split at most so many ways.

    Raises:
        InputError: latent or linear attention, which are not priced, no such layers, or a context that is too long.
    """
    if model.attention.latent is not None or model.linear is not None:
        kind = "latent" if model.attention.latent is not None else "linear"
        raise InputError(f"{model.name}: {kind} attention is not priced yet (but in `plan memory`)")
    if load.context > model.max_context:
        raise InputError(f"{load.context} tokens: {model.name} attends to at most {model.max_context}")
    total = model.layers if layers is None else layers
    if not 1 <= total <= model.layers:
        raise InputError(f"--layers {total}: {model.name} has 1 to {model.layers}")
    setup = Setup(model, engine, formats, load)
    names = formats.weights.name
    ways = tuple(ways for ways in range(1, ranks + 1) if tp_allowed(model, engine, ways, names) is None)
    blocks = {part: Block(setup, part) for part in ("embedding", "attention", "ffn", "experts", "block", "head")}
    requests = Dim("requests", load.requests, "sample")
    prefill = load.phase == "prefill"
    whole = Dim("tokens", load.context if prefill else 1)
    split = Dim("tokens", load.context if prefill else 1, "attribute" if prefill else "whole")
    hidden = Dim("hidden", model.hidden)
    kinds = model.layer_kinds()[:total]

    def operator(name: str, part: Part, tokens: Dim, parameter: Dim, inputs: tuple[Edge, ...]) -> Operator:
        return Operator(name, (requests, tokens, parameter, hidden), inputs, blocks[part], ACTIVATION_BYTES)

    def closed(name: str, engine_sends: bool = True) -> Dim:
        return Dim(name, model.hidden, "parameter", "all_reduce" if engine_sends else "nothing", ways)

    operators = [operator("embedding", "embedding", whole, closed("vocabulary", engine.embedding_all_reduce), ())]
    for layer, made_of in enumerate(kinds):
        parts: list[tuple[str, Part]] = [("attention", "attention"), ("ffn", "experts" if made_of.experts else "ffn")]
        if model.parallel_block and not made_of.experts:
            parts = [("block", "block")]
        for name, part in parts:
            mixes = part in ("attention", "block")  # tokens of a request meet here
            before = Edge(len(operators) - 1, (0, None if mixes else 1, None))
            tokens, width = (whole if mixes else split), closed("heads" if mixes else "width")
            operators.append(operator(f"{layer} {name}", part, tokens, width, (before,)))
    vocabulary = Dim(
        "vocabulary", int(Shard.for_engine(model, engine, names, 1).vocab), "parameter", "all_gather", ways
    )
    one = Dim("tokens", 1)
    last = Edge(len(operators) - 1, (0, None, None), 1.0 / whole.size)
    operators.append(Operator("head", (requests, one, vocabulary), (last,), blocks["head"], ACTIVATION_BYTES))
    return Graph(f"{model.name}, {total} of {model.layers} layers" if total < model.layers else model.name, operators)
