"""A model as an operator graph: embedding, the attention and FFN of every layer, head, in one forward pass.

The kernels of a block are those that `costs.layers` counts for it, by a pass of a share of the requests on a rank of a
tensor-parallel group: a template of `plan` is one strategy of this graph, and costs what the analytic engine says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from planner.costs.counting import count
from planner.costs.experts import Spread, expert_operations
from planner.costs.layers import Formats, Operation, Pass, Structure, causal_pairs, ffn_operations
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
from planner.specs.engine import Engine, Exchange
from planner.specs.model import LayerKind, Model

Phase = Literal["decode", "prefill"]
PHASES: tuple[Phase, ...] = ("decode", "prefill")
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
    """The work of one part of a model; `degrees` are those of requests, tokens and heads, widths or vocabulary, and of
    experts where whole ones are spread.

    Blocks are equal where their part and their setup are the same, so that layers that are alike share prices.
    """

    def __init__(self, setup: Setup, part: Part) -> None:
        self.setup, self.part = setup, part
        self._shards: dict[tuple[int, int], Shard] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Block) and self.part == other.part and self.setup is other.setup

    def __hash__(self) -> int:
        return hash((self.part, id(self.setup)))

    def _ranks(self, degrees: Degrees) -> tuple[int, int]:
        """(ranks that share an operator's weights, of them those with different experts)."""
        ep = degrees[3] if self.part == "experts" else 1
        return degrees[2] * ep, ep

    def _shard(self, degrees: Degrees) -> Shard:
        key = self._ranks(degrees)
        if key not in self._shards:
            setup, (ranks, ep) = self.setup, key
            self._shards[key] = Shard.for_engine(setup.model, setup.engine, setup.formats.weights.name, ranks, ep=ep)
        return self._shards[key]

    def operations(self, degrees: Degrees) -> Sequence[Operation]:
        """The kernels of one task: those of its part of what the engine runs in such a layer, or at the ends."""
        setup, shard = self.setup, self._shard(degrees)
        model, engine, formats, load = setup.model, setup.engine, setup.formats, setup.load
        work = load.work(load.requests / degrees[0], load.context / degrees[1], model.attention.window)
        spread, layered = None, self.part not in ("embedding", "head")
        if self.part == "experts":
            ranks, ep = self._ranks(degrees)
            exchange = engine.exchange or Exchange()
            padded = engine.expert_rows == "all"  # every rank has all tokens here
            spread = Spread(ep, ranks / ep, 1, exchange.redundant, exchange.imbalance, padded=padded)
        counted, _ = count(model, engine, shard, work, formats, Structure(), spread)
        after: set[str] = set()
        if spread is not None:
            after = {each.name for each in expert_operations(model, shard, work, formats, spread)}
        elif layered:
            after = {each.name for each in ffn_operations(model, shard, work, formats)}
        place = {"embedding": "first", "head": "last"}.get(self.part, "layer")
        found = []
        for operation in counted:
            share = self._share(operation.name, after) if operation.place == place else 0.0
            if share:
                run = as_run(model, engine, formats, operation)
                found.append(run._replace(times=run.times * share))
        return found

    def _share(self, name: str, after: set[str]) -> float:
        """How much of a kernel belongs to the part: `after` are the FFN's, the norms go half and half."""
        if self.part in ("embedding", "head", "block"):
            return 1.0
        if name == "norm":
            return 0.5
        return float((name in after) == (self.part in ("ffn", "experts")))

    def weight_bytes(self, degrees: Degrees) -> float:
        """Bytes of the weights of one rank."""
        setup, shard = self.setup, self._shard(degrees)
        model, dtype = setup.model, setup.formats.weights
        if self.part == "embedding":
            return float(embedding_elements(model, shard) * dtype.plain_bytes)
        if self.part == "head":
            return float((head_elements(model, shard) + final_norm_elements(model)) * dtype.plain_bytes)
        dense, norms = layer_weights(model, shard), model.norm.per_layer * model.norm.vectors * model.hidden
        whole = layer_elements(model, shard, LayerKind("full", False)).bytes(model, dtype)
        ffn = Elements(ffn=dense.gate_up + dense.down, plain=dense.gate_up_bias + dense.down_bias + norms / 2)
        attention, latent = whole - ffn.bytes(model, dtype), model.attention.latent
        copies = 0.0
        if latent is not None and setup.engine.memory.latent_copies:  # what decoding absorbs, kept a second time
            copies = latent.kv_rank * shard.heads * (latent.nope_dim + latent.value_dim) * ACTIVATION_BYTES
        if self.part in ("attention", "block"):
            return float(copies + (whole if self.part == "block" else attention))
        if self.part == "experts":
            whole = layer_elements(model, shard, LayerKind("full", True)).bytes(model, dtype)
        return float(whole - attention)

    def state_bytes(self, degrees: Degrees) -> float:
        """KV of a task's requests in this layer, every token kept; KV heads are copied beyond their number, the latent
        vector stands on every rank."""
        if self.part not in ("attention", "block"):
            return 0.0
        setup, shard, attention = self.setup, self._shard(degrees), self.setup.model.attention
        elements = 2 * float(shard.kv_heads) * attention.head_dim
        if attention.latent is not None:
            elements = float(attention.latent.cached)
        return setup.load.requests / degrees[0] * setup.load.held * elements * setup.formats.kv.bytes


def from_model(
    model: Model, engine: Engine, formats: Formats, load: Load, layers: int | None = None, ranks: int = 1024
) -> Graph:
    """The graph of a model's forward pass.

    Args:
        model: dense layers or experts; attention over all or some of the tokens, or latent.
        engine: whose kernels run, and which collectives.
        formats: of weights, KV and arithmetic.
        load: what the pass processes.
        layers: the first so many layers; none = all. Embedding and head are always there.
        ranks: chips there are: an operator's parameters are split at most so many ways.

    Raises:
        InputError: linear attention, which is not priced, no such layers, or a context that is too long.
    """
    if model.linear is not None:
        raise InputError(f"{model.name}: linear attention is not priced yet (but in `plan memory`)")
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

    spread: tuple[Dim, ...] = ()
    if model.experts is not None and engine.expert_parallel is not None:  # whole experts on different ranks
        routed = model.experts.routed
        each = tuple(ways for ways in range(1, min(ranks, routed) + 1) if routed % ways == 0)
        spread = (Dim("experts", routed, "parameter", "all_reduce", each),)
    one_expert = Dim("experts", 1)

    def operator(name: str, part: Part, tokens: Dim, parameter: Dim, inputs: tuple[Edge, ...]) -> Operator:
        between = (spread or (one_expert,)) if part == "experts" else ()
        return Operator(name, (requests, tokens, parameter, *between, hidden), inputs, blocks[part], ACTIVATION_BYTES)

    def closed(name: str, engine_sends: bool = True) -> Dim:
        return Dim(name, model.hidden, "parameter", "all_reduce" if engine_sends else "nothing", ways)

    operators = [operator("embedding", "embedding", whole, closed("vocabulary", engine.embedding_all_reduce), ())]
    for layer, made_of in enumerate(kinds):
        parts: list[tuple[str, Part]] = [("attention", "attention"), ("ffn", "experts" if made_of.experts else "ffn")]
        if model.parallel_block and not made_of.experts:
            parts = [("block", "block")]
        for name, part in parts:
            mixes = part in ("attention", "block")  # tokens of a request meet here
            before = Edge(len(operators) - 1, _needs(operators[-1], 0, None if mixes else 1))
            tokens, width = (whole if mixes else split), closed("heads" if mixes else "width")
            operators.append(operator(f"{layer} {name}", part, tokens, width, (before,)))
    vocabulary = Dim(
        "vocabulary", int(Shard.for_engine(model, engine, names, 1).vocab), "parameter", "all_gather", ways
    )
    one = Dim("tokens", 1)
    last = Edge(len(operators) - 1, _needs(operators[-1], 0, None), 1.0 / whole.size)
    operators.append(Operator("head", (requests, one, vocabulary), (last,), blocks["head"], ACTIVATION_BYTES))
    return Graph(f"{model.name}, {total} of {model.layers} layers" if total < model.layers else model.name, operators)


def _needs(source: Operator, requests: int | None, tokens: int | None) -> tuple[int | None, ...]:
    """What selects a part of each dimension of a layer's output: its requests and tokens, all of the rest."""
    return (requests, tokens, *(None for _ in source.output[2:]))
