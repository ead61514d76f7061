"""What starts a plan: one process a server and node, with its chips, its words and the files that it reads.

The engine's file has the words (`specs.launch`), the placement says which chips (`plans.seats`), and the memory of the
plan decides what a memory fraction means. Nothing is launched here, and nothing written.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

from planner.costs.memory import Budget
from planner.errors import InputError, NoPlanError
from planner.plans.placement import Placement
from planner.plans.plan import Plan
from planner.plans.rules import chips_refusal
from planner.plans.seats import Seat, seats
from planner.plans.speculators import notes_of, placeholders, speculating, speculator_of
from planner.request import Limits, check_context, check_memory
from planner.specs.dtypes import ACTIVATION_BYTES, WEIGHTS
from planner.specs.engine import Engine
from planner.specs.hardware import Hardware
from planner.specs.launch import DIMENSIONS, Launch, Loading, Nodes, filled
from planner.specs.model import Model
from planner.specs.workload import Workload
from planner.startup import Start

HEAD_PORT = 29500
"""Port at which the nodes of the first replica find each other; the next replica's is the next."""
HIGHEST_PORT = 65535


class Process(NamedTuple):
    """One command to run on one node."""

    role: Literal["cluster", "server", "router"]
    replica: int | None
    """From 0; none = it serves all replicas."""
    node: int
    host: str
    chips: tuple[int, ...]
    """Numbers on its node; those of a process that starts others elsewhere are on each of its nodes."""
    environment: dict[str, str]
    argv: tuple[str, ...]
    files: dict[str, dict[str, Any]]
    """Content by name of what it reads."""


class Deployment(NamedTuple):
    """All processes of a plan, in the order in which they are started."""

    model: Model
    plan: Plan
    placement: Placement
    engine: Engine
    launch: Launch
    processes: tuple[Process, ...]
    notes: tuple[str, ...]
    """What must be known or done before the lines work, as sentences."""

    @property
    def hardware(self) -> Hardware:
        """The machine."""
        return self.placement.hardware


def deployment(
    model: Model,
    placement: Placement,
    engine: Engine,
    plan: Plan,
    workload: Workload,
    *,
    limits: Limits | None = None,
    asked: str | None = None,
    checkpoint: str | None = None,
    hosts: Sequence[str] = (),
    port: int | None = None,
) -> Deployment:
    """The processes that start a plan.

    Args:
        model: what is served.
        placement: the machine; chips beyond the plan's stay idle.
        engine: what serves it; its file has the words.
        plan: which way it is split.
        workload: lengths and load (1 request where none is given), which become limits of the servers.
        limits: of the memory; those of times mean nothing here.
        asked: the name that the model was asked by, which is loaded where it is one of its Hugging Face ids.
        checkpoint: the id or path of what is loaded instead.
        hosts: addresses of the nodes in order; names that stand for them where there are none.
        port: of the first server, or of the router in front of several; the engine's usual one where none is given.

    Raises:
        InputError: a context, a dtype, a port or too few hosts.
        NoPlanError: the engine serves nobody, cannot be told this plan, or would not start.
    """
    limits = limits or Limits()
    check_context(model, workload.isl, workload.osl, workload.max_context)
    check_memory(limits)
    launch = _launch_of(engine, placement.hardware)
    speculator = speculator_of(launch, engine, placement.hardware, plan, workload)
    start = _start(model, placement, engine, plan, workload, limits)
    if reason := _refusal(launch, engine, start):
        raise NoPlanError(f"{plan.label} of {model.name}: {reason}")
    placed = seats(placement, plan)
    names = _hosts(placed, hosts)
    for replica in placed:
        if reason := _node_refusal(launch, placement.hardware, engine, replica):
            raise NoPlanError(f"{plan.label} on {placement.hardware.name}: {reason}")
    if speculator is not None:
        launch = speculating(launch, speculator)
    loaded, loading = _loaded(model, launch, start, asked, checkpoint)
    first_port = _port(port, launch, plan)
    values = _values(launch, start, workload) | {"model": loaded, "weights": loading.name}
    has_router = bool(launch.router) and plan.dp > 1
    processes: list[Process] = []
    for index, replica in enumerate(placed):
        own = {"port": first_port + index + has_router, "head_port": HEAD_PORT + index}
        processes += _Replica(index, replica, names, launch, placement.hardware, loading, values | own).processes()
    if has_router:
        processes.append(_router(launch, processes, names, first_port))
    notes = [*_model_notes(model, launch, start, loaded, loading, checkpoint)]
    notes += _notes(placement, launch, start, workload, hosts, placed)
    notes += notes_of(workload.speculation, speculator)
    return Deployment(model, plan, placement, engine, launch, tuple(processes), tuple(notes))


def _launch_of(engine: Engine, hardware: Hardware) -> Launch:
    if engine.launch is None:
        why = engine.unlaunched or "its file has no key `launch`"
        raise NoPlanError(f"engine {engine.name} has no launch line: {why}; --engine names another")
    platform = hardware.devices.platform
    launch = engine.launch.on(platform)
    if launch is None:
        runs_on = ", ".join(engine.launch.platforms)
        raise NoPlanError(
            f"engine {engine.name} runs on {runs_on}; {hardware.name} is {platform}: --engine names another"
        )
    return launch


def _start(model: Model, placement: Placement, engine: Engine, plan: Plan, workload: Workload, limits: Limits) -> Start:
    """The memory of one replica of a plan that the rules allow and that fits."""
    start = Start.of(
        model,
        engine,
        plan,
        Budget.of(placement.hardware, engine, limits.memory, limits.memory_fraction),
        weights=workload.weights,
        kv_cache=workload.kv_cache,
        context=min(_context(workload), model.max_context),
        hardware=placement.hardware,
        drafts=workload.speculation.draft if workload.speculation else None,
    )
    if reason := start.refusal() or chips_refusal(placement, plan):
        raise NoPlanError(f"{plan.label} of {model.name} on {placement.hardware.name}: {reason}")
    return start


def _context(workload: Workload) -> int:
    longest = 1.0 if workload.lengths is None else workload.lengths.longest
    return max(math.ceil((workload.isl + workload.osl) * longest * (1 - 1e-12)), workload.max_context or 0)


def _refusal(launch: Launch, engine: Engine, start: Start) -> str | None:
    """What of a plan the engine cannot be told, as a sentence; none if it can be told all of it."""
    plan = start.plan
    for name in DIMENSIONS:
        degree = getattr(plan, name)
        if degree > 1 and not launch.arguments.get(name) and name not in launch.implied:
            return f"engine {engine.name} has no flag for {name} {degree} in its file (launch.arguments.{name})"
    for what, wanted in (("attention", plan.attention), ("prefill_attention", plan.prefill_attention)):
        if wanted != "heads" and not launch.arguments.get(what):
            return f"engine {engine.name} has no flag for {what} {wanted} in its file (launch.arguments.{what})"
    if plan.dp > 1 and launch.replicas is None:
        return f"engine {engine.name} starts one replica, not {plan.dp}: its file does not say how several run"
    return _dtype_refusal(launch, engine, start.formats.weights.name, start.formats.kv.name)


def _dtype_refusal(launch: Launch, engine: Engine, weights: str, kv: str) -> str | None:
    if weights not in launch.weights:
        return f"engine {engine.name} cannot load {weights} weights; it loads {', '.join(launch.weights)}"
    if kv not in launch.kv_cache:
        return f"engine {engine.name} cannot keep KV in {kv}; it has {', '.join(launch.kv_cache)}"
    needed = launch.kv_cache_with.get(kv, (weights,))
    if weights not in needed:
        return f"engine {engine.name} keeps KV in {kv} only with weights in {' or '.join(needed)}, these are {weights}"
    return None


def _node_refusal(launch: Launch, hardware: Hardware, engine: Engine, replica: tuple[Seat, ...]) -> str | None:
    """Why a replica's chips cannot be given to it, as a sentence."""
    held = _by_node(replica)
    counts = sorted({len(chips) for chips in held.values()})
    if len(held) > 1 and launch.nodes is None:
        return f"a replica of {len(replica)} chips spans {len(held)} nodes, which engine {engine.name} cannot"
    if len(held) > 1 and launch.nodes is not None and launch.nodes.even and len(counts) > 1:
        return (
            f"a replica holds {' and '.join(map(str, counts))} chips on its nodes; engine {engine.name} wants as many "
            "on each: use fewer stages, or a tp that fills whole nodes"
        )
    whole = hardware.host_chips
    if hardware.devices.variable is None and whole is not None and counts[-1] < whole:
        return f"a server sees all {whole} chips of a host of {hardware.name}, a replica has {counts[-1]} of them"
    return None


def _by_node(replica: Sequence[Seat]) -> dict[int, tuple[int, ...]]:
    """Chips by node in the order of ranks."""
    held: dict[int, tuple[int, ...]] = {}
    for seat in replica:
        held[seat.node] = (*held.get(seat.node, ()), seat.chip)
    return held


def _hosts(placed: Sequence[Sequence[Seat]], hosts: Sequence[str]) -> list[str]:
    count = 1 + max(seat.node for replica in placed for seat in replica)
    if hosts and len(hosts) < count:
        raise InputError(f"--hosts: {len(hosts)} given, the plan takes {count} nodes; name them in order, by commas")
    return list(hosts) if hosts else [f"node{index}" for index in range(count)]


def _port(port: int | None, launch: Launch, plan: Plan) -> int:
    first = launch.port if port is None else port
    if not 1 <= first <= HIGHEST_PORT - plan.dp:
        raise InputError(f"--port {first}: expected 1 to {HIGHEST_PORT - plan.dp}, {plan.dp} servers take one each")
    return first


def _loaded(
    model: Model, launch: Launch, start: Start, asked: str | None, checkpoint: str | None
) -> tuple[str, Loading]:
    """(what is loaded, how). A name in capitals stands for what only the user knows; the notes say so."""
    wanted = start.formats.weights
    loading = launch.weights[wanted.name]
    if wanted.name == model.weights and wanted.bytes < ACTIVATION_BYTES:
        loading = Loading(loading.name)  # the checkpoint itself says how it is quantised
    ids = {each.lower(): each for each in model.hf_ids}
    named = ids.get((asked or "").lower(), next(iter(model.hf_ids), "MODEL"))
    if checkpoint is not None:
        return checkpoint, loading
    return (f"{wanted.name.upper()}-CHECKPOINT" if _needs(model, launch, start) else named), loading


def _needs(model: Model, launch: Launch, start: Start) -> str | None:
    """The kind of checkpoint that a dtype of weights needs beside the model's own, or none."""
    wanted, own = start.formats.weights, WEIGHTS[model.weights]
    if wanted.name == own.name:
        return None
    if own.bytes < ACTIVATION_BYTES:
        return f"{wanted.name} weights"
    return launch.weights[wanted.name].checkpoint


def _values(launch: Launch, start: Start, workload: Workload) -> dict[str, Any]:
    """What placeholders stand for on every server."""
    plan, scheduler, context = start.plan, start.engine.scheduler, _context(workload)
    return {
        **{name: getattr(plan, name) for name in DIMENSIONS},
        "kv_cache": launch.kv_cache[start.formats.kv.name],
        "context": context,
        "output": workload.osl,
        "input": context - workload.osl,
        "memory_fraction": _memory_fraction(launch, start),
        "sequences": scheduler.max_sequences,
        "batch": min(start.requests, -(-(workload.concurrency or 1) // plan.dp)),
        "tokens": scheduler.chunk_tokens,
        "block": scheduler.block_tokens,
        "ranks": plan.replica_chips,
        **placeholders(workload.speculation),
    }


def _memory_fraction(launch: Launch, start: Start) -> float:
    """The budget as the engine counts it, rounded down to four digits."""
    share = start.budget.limit / start.budget.chip
    if launch.memory == "free":  # KV alone, of what is left beside weights, activations and runtime
        stage, space = start.fullest, start.room
        taken = float(space.weights[stage] + space.other[stage])
        share = (start.budget.limit - taken) / (start.budget.chip - taken - float(space.outside))
    return math.floor(share * 1e4 + 1e-6) / 1e4


class _Replica(NamedTuple):
    """One replica and what is known of it."""

    number: int
    seats: tuple[Seat, ...]
    hosts: list[str]
    launch: Launch
    hardware: Hardware
    loading: Loading
    values: dict[str, Any]

    def processes(self) -> Iterator[Process]:
        """Those of every node of it; what must run first comes first."""
        held = _by_node(self.seats)
        if len(held) == 1:
            ((node, chips),) = held.items()
            yield self._process("server", node, chips, self._server(), with_files=True)
            return
        nodes = self.launch.nodes
        assert nodes is not None, "refused before"
        names = [self.hosts[node] for node in held]
        shared = {"nodes": len(held), "head": names[0], "hosts": ",".join(names)}
        for place, (node, chips) in enumerate(held.items()):
            if before := nodes.first if place == 0 else nodes.rest:
                yield self._process("cluster", node, chips, _words(before, self.values | shared))
        for place, (node, chips) in enumerate(held.items()):
            if place == 0 or nodes.everywhere:
                here = shared | {"node": place, "ranks_per_node": len(chips)}
                argv = self._server(here, nodes, place > 0)
                yield self._process("server", node, chips, argv, with_files=True, by_launcher=nodes.hands_out_chips)

    def _server(
        self, here: dict[str, Any] | None = None, nodes: Nodes | None = None, is_other: bool = False
    ) -> tuple[str, ...]:
        values = self.values | (here or {}) | {"file": next(map(self._name, self.launch.files), None)}
        words = [*(nodes.prefix if nodes else ()), *self.launch.command]
        argv = list(_words(words, values))
        for name, argument in self.launch.arguments.items():
            if name in DIMENSIONS and values[name] == 1:
                continue
            template = self.loading.words if name == "weights" else argument
            argv += _words(template, values, whole=True)
        if nodes is not None:
            argv += _words((*nodes.arguments, *(nodes.others if is_other else ())), values)
        return tuple(argv)

    def _process(
        self,
        role: Literal["cluster", "server"],
        node: int,
        chips: tuple[int, ...],
        argv: tuple[str, ...],
        with_files: bool = False,
        by_launcher: bool = False,
    ) -> Process:
        variable = None if by_launcher else self.hardware.devices.variable
        environment = {variable: ",".join(map(str, chips))} if variable else {}
        files = {}
        if with_files:
            files = {self._name(suffix): _content(tree, self.values) for suffix, tree in self.launch.files.items()}
        return Process(role, self.number, node, self.hosts[node], chips, environment, argv, files)

    def _name(self, suffix: str) -> str:
        return f"replica{self.number}{suffix}"


def _words(template: Sequence[str], values: dict[str, Any], whole: bool = False) -> tuple[str, ...]:
    """Words with their values; with `whole` none at all where one of them has no value."""
    words = [filled(word, values) for word in template]
    if whole and any(word is None for word in words):
        return ()
    return tuple(_text(word) for word in words if word is not None)


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _content(tree: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """The content of a file with its values; keys whose value is missing are left out."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        part = value
        if isinstance(value, dict):
            part = _content(value, values)
        elif isinstance(value, str):
            part = filled(value, values)
        if part is not None:
            found[key] = part
    return found


def _router(launch: Launch, processes: Sequence[Process], hosts: Sequence[str], port: int) -> Process:
    """The command in front of several servers, on the first node; `{servers}` becomes a word for each."""
    ports = {each.replica: port + 1 + each.replica for each in processes if each.replica is not None}
    heads: dict[int, str] = {}
    for each in processes:
        if each.replica is not None and each.role == "server":
            heads.setdefault(each.replica, each.host)
    servers = [f"http://{heads[replica]}:{ports[replica]}" for replica in sorted(heads)]
    argv: list[str] = []
    for word in launch.router:
        argv += servers if word == "{servers}" else [_text(filled(word, {"port": port}))]
    return Process("router", None, 0, hosts[0], (), {}, tuple(argv), {})


def _model_notes(
    model: Model, launch: Launch, start: Start, loaded: str, loading: Loading, checkpoint: str | None
) -> Iterator[str]:
    """What must be known of the weights that are loaded."""
    kind, weights = _needs(model, launch, start), start.formats.weights
    if kind is not None:
        stands = f": {loaded} stands for its id or path (--checkpoint)" if checkpoint is None else ""
        yield f"{weights.name} weights need a checkpoint of {model.name} in {kind}{stands}"
    elif checkpoint is None and not model.hf_ids:
        yield f"{loaded} stands for a Hugging Face id or path: the file of {model.name} names none (--checkpoint)"
    elif checkpoint is not None and loading.words and weights.bytes < ACTIVATION_BYTES:
        words = " ".join(loading.words)
        yield f"{words} is for a checkpoint of 16 bit: leave it out if {checkpoint} is in {weights.name} already"


def _notes(
    placement: Placement,
    launch: Launch,
    start: Start,
    workload: Workload,
    hosts: Sequence[str],
    placed: Sequence[Sequence[Seat]],
) -> Iterator[str]:
    """What else must be known or done."""
    plan, model, nodes = start.plan, start.model, {seat.node for replica in placed for seat in replica}
    if plan.dp > 1 and launch.replicas:
        yield launch.replicas
    if any(len(_by_node(replica)) > 1 for replica in placed) and launch.nodes is not None:
        yield f"a replica spans nodes: {launch.nodes.about}"
    if len(nodes) > 1 and not hosts:
        to = "and" if max(nodes) == 1 else "to"
        yield f"node0 {to} node{max(nodes)} stand for the addresses of the nodes (--hosts)"
    context = _context(workload)
    if context > model.max_context:
        yield f"{context} tokens are more than the model's {model.max_context}: it must be told to extend its positions"
    wanted, most = workload.concurrency or 1, start.requests * plan.dp
    if wanted > most:
        yield f"{most} requests of {start.context} tokens run at once, {wanted} are asked: the others wait"
    if launch.memory == "free":
        share = start.budget.limit / start.budget.chip
        yield (
            f"the memory fraction is KV's share of what is free once all else is loaded; with it {share:.3g} of the "
            "chip is in use, as planned"
        )
    if launch.files and any(len(_by_node(replica)) > 1 for replica in placed):
        yield "the file that a server reads must be there on each of its nodes: a shared folder"
    if sum(len(_by_node(replica)) for replica in placed) > 1:
        yield "a server runs until it is stopped: give each command a shell of its own, on the node named above it"
    if workload.schedule == "static":
        yield "static batches are the caller's to make: a server batches what comes"
    idle = placement.gpus - plan.chips
    if idle:
        yield f"{idle} of {placement.gpus} chips stay idle"
    yield from launch.notes
