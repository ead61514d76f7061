"""`plan search`: strategies beyond TP x PP x DP, operator by operator, and what they gain over the best template."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Annotated

import typer

from planner.command import options as opt
from planner.costs.serving import formats_of
from planner.errors import InputError, PlannerError
from planner.opgraph.chain import Chain
from planner.opgraph.cluster import Cluster, kind_of
from planner.opgraph.comparing import (
    Comparison,
    Named,
    best_template,
    chip_room,
    graph_problem,
    load_of,
    model_problem,
    tied,
)
from planner.opgraph.problem import Devices, Problem
from planner.opgraph.proposals import MOVES
from planner.opgraph.searching import SLICE, SMALL, Outcome, chains_of, exhaustive, outcome
from planner.opgraph.sharding import best_grid
from planner.opgraph.stages import FORMS
from planner.opgraph.strategies import Strategy
from planner.opgraph.transformer import PHASES, Phase, from_model
from planner.report import search as report
from planner.report import stages as stages_report
from planner.report import tabular
from planner.report.figures import plural
from planner.report.progress import Progress
from planner.specs.catalog import load_graph, load_machine, load_model
from planner.units import MS, parse_bytes

Model = Annotated[
    str | None,
    typer.Option("--model", "-m", metavar="NAME|HF-ID|FILE", help="Model whose layers are searched; or --graph."),
]
GraphOption = Annotated[
    str | None,
    typer.Option("--graph", metavar="NAME|FILE", help="An operator graph of your own: a YAML file (docs/search.md)."),
]
Gpus = Annotated[int, typer.Option("--gpus", "--chips", min=1, help="Chips there are.")]
PhaseOption = Annotated[
    str, typer.Option("--phase", metavar="decode|prefill", help="Which pass: a decode step, or the prompts' prefill.")
]
Requests = Annotated[int, typer.Option("--concurrency", min=1, help="Requests in the pass.")]
Layers = Annotated[
    str | None,
    typer.Option("--layers", metavar="N|all", help="Layers that are searched, beside both ends [4; all for stages]."),
]
Method = Annotated[
    str,
    typer.Option(
        "--method",
        metavar="NAME",
        help="exhaustive, mcmc, auto (all strategies where they are few, else Markov chains); stages (a pipeline); "
        "sharding (all chips as one mesh; needs scipy).",
    ),
]
Chains = Annotated[int, typer.Option("--chains", min=1, help="Markov chains, each from a start of its own.")]
BudgetOption = Annotated[
    int, typer.Option("--budget", min=2, help="Strategies that a chain simulates; half of it without a gain ends it.")
]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Of the random numbers.")]
Beta = Annotated[
    float | None,
    typer.Option("--beta", metavar="1/MS", help="Inverse temperature, held; default: as docs/search.md says."),
]
Restart = Annotated[
    int | None, typer.Option("--restart", min=1, help="Proposals without a gain until a chain begins anew.")
]
MovesOption = Annotated[
    str,
    typer.Option(
        "--moves",
        metavar="mixed|single",
        help="Chains change one operator or several at a time, or one as in the paper.",
    ),
]
DevicesOption = Annotated[
    str, typer.Option("--devices", metavar="blocks|any", help="Tasks on blocks of neighbours, or on any chips.")
]
Microbatches = Annotated[
    int, typer.Option("--microbatches", min=1, help="For stages: parts that the requests of a pass are cut into.")
]
FormOption = Annotated[
    str,
    typer.Option(
        "--form", metavar="NAME", help="For stages: training, sum + (microbatches - 1) max; inference, stages x max."
    ),
]
Beside = Annotated[
    str | None,
    typer.Option("--beside", metavar="NAME:N", help="For stages: N more chips of another kind, as a100-80gb-sxm:8."),
]
Jobs = Annotated[int, typer.Option("--jobs", "-j", min=1, help="Processes that run chains; the result stays.")]
Plot = Annotated[
    str | None, typer.Option("--plot", metavar="FILE.svg|.png", help="Draw the timeline and the placement.")
]


METHODS = ("auto", "exhaustive", "mcmc", "stages", "sharding")


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(run)


def run(
    model: Model = None,
    graph: GraphOption = None,
    hardware: opt.Hardware = "h100",
    engine: opt.Engine = None,
    gpus: Gpus = 8,
    phase: PhaseOption = "decode",
    isl: opt.Isl = 1024,
    osl: opt.Osl = 256,
    concurrency: Requests = 16,
    layers: Layers = None,
    weights: opt.Weights = None,
    kv_cache: opt.KvCache = None,
    memory_limit: opt.MemoryLimit = None,
    method: Method = "auto",
    chains: Chains = 4,
    budget: BudgetOption = 1000,
    seed: Seed = 0,
    beta: Beta = None,
    restart: Restart = None,
    moves: MovesOption = "mixed",
    devices: DevicesOption = "blocks",
    microbatches: Microbatches = 4,
    form: FormOption = "training",
    beside: Beside = None,
    jobs: Jobs = 1,
    csv: opt.Csv = None,
    json: opt.Json = None,
    plot: Plot = None,
    no_header: opt.NoHeader = False,
    quiet: opt.Quiet = False,
    debug: opt.Debug = False,
) -> None:
    """Searches beyond TP x PP x DP: every operator split and placed by itself, simulated, against the best template.

    A step is one forward pass of all requests, without the engine's host time. Ctrl-C ends a search with the best so
    far.
    """
    opt.check_targets(csv, json, ("--plot", plot), specs=(model, graph, hardware, engine))
    opt.check_plot(plot)
    _refuse(graph, layers, method, devices, beside, plot)
    opt.choice(moves, "--moves", MOVES)
    if method == "stages":
        asked = (isl, osl, concurrency, layers, weights, kv_cache, memory_limit, phase)
        _stages(model, graph, hardware, engine, gpus, *asked, microbatches, form, beside, (csv, json, no_header, quiet))
        return
    problem, what = _problem(
        model, graph, hardware, engine, gpus, phase, isl, osl, concurrency, layers or "4", weights, kv_cache,
        memory_limit,
        opt.choice(devices, "--devices", ("blocks", "any")),
    )  # fmt: skip
    if method == "sharding":
        sharded = best_grid(problem.graph, problem.machine, problem.memory)
        tabular.write_rows(stages_report.sharding_rows(sharded), csv, json, not no_header)
        if not opt.is_piped(csv, json) and not quiet:
            stages_report.print_sharding(sharded, what)
        return
    inverse = opt.above_zero(beta, "--beta")
    template, many = best_template(problem)
    if method == "exhaustive" or (method == "auto" and problem.size <= SMALL and devices == "blocks"):
        with Progress("strategy", problem.size, quiet=quiet) as progress:
            found = exhaustive(problem, lambda count: _advance(progress, count))
    else:
        starts = _starts(problem, template)
        beta_ = None if inverse is None else inverse / MS
        made = chains_of(
            problem, chains, budget, seed, beta_, restart, starts, "single" if moves == "single" else "mixed"
        )
        with Progress("evaluation", budget * len(made), quiet=quiet) as progress:
            found = _chains(problem, made, min(jobs, len(made)), progress)
    if not found.complete:
        opt.warn("interrupted: this is the best so far", quiet)
    if template is not None and template.cost < found.cost:  # one whose tasks stand on no blocks
        found = found._replace(strategy=template.strategy, cost=template.cost)
    compared = Comparison(problem, found, template, many)
    pictures: list[tabular.Output] = []
    if plot is not None:
        from planner.report.timeline import timeline_plot  # noqa: PLC0415 (needed for pictures only)

        pictures = [(plot, lambda: timeline_plot(compared, plot))]
    tabular.write_rows(report.rows(compared), csv, json, not no_header, pictures)
    if not opt.is_piped(csv, json) and not quiet:
        report.print_search(compared, what, problem.devices, seed)


def _starts(problem: Problem, template: Named | None) -> list[tuple[str, Strategy]]:
    """The best template, and what comes of it where alike operators change together."""
    if template is None:
        return []
    changed = tied(problem, template.strategy)
    starts = [(template.label, template.strategy)]
    return starts if changed == template.strategy else [*starts, ("alike operators together", changed)]


def _refuse(
    graph: str | None, layers: str | None, method: str, devices: str, beside: str | None, plot: str | None
) -> None:
    """Refuses options that do not go together.

    Raises:
        InputError: which.
    """
    opt.choice(method, "--method", METHODS)
    if plot is not None and method in ("stages", "sharding"):
        raise InputError(f"--plot {plot}: draws the timeline of a strategy; not there for --method {method}")
    if method == "exhaustive" and devices != "blocks":
        raise InputError("--method exhaustive: looks at blocks of devices; leave out --devices")
    if graph is not None and layers is not None:
        raise InputError(f"--layers {layers}: is for --model; a graph is searched whole")
    if beside is not None and method != "stages":
        raise InputError("--beside: chips of several kinds are for --method stages")


def _stages(
    model: str | None,
    graph: str | None,
    hardware: str,
    engine: str | None,
    gpus: int,
    isl: int,
    osl: int,
    concurrency: int,
    layers: str | None,
    weights: str | None,
    kv_cache: str | None,
    memory_limit: str | None,
    phase: str,
    microbatches: int,
    form: str,
    beside: str | None,
    output: tuple[str | None, str | None, bool, bool],
) -> None:
    """`--method stages`."""
    wanted = next((each for each in FORMS if each == form), None)
    if wanted is None:
        raise InputError(f"--form {form}: expected one of {', '.join(FORMS)}")
    each = -(-concurrency // microbatches)
    memory = None if memory_limit is None else parse_bytes(memory_limit)
    kinds = []
    for name, software_name, chips in [(hardware, engine, gpus), *([_beside(beside)] if beside else [])]:
        machine, software = load_machine(name, software_name)
        if graph is not None:
            if model is not None:
                raise InputError("give either --model or --graph, not both")
            problem = graph_problem(load_graph(graph), machine, software, chips, memory, "blocks")
            kinds.append(kind_of(problem.graph, machine, software, chips, problem.memory))
            continue
        spec = load_model(_named(model))
        formats = formats_of(spec, machine, software, weights, kv_cache)
        load = load_of(software, _phase(phase), each, isl, osl)
        load = load._replace(held=load.held * microbatches)
        built = from_model(spec, software, formats, load, _layers(layers or "all", spec.layers), chips)
        free = chip_room(spec, machine, software, chips, formats, memory)
        kinds.append(kind_of(built, machine, software, chips, free))
    cluster = Cluster(kinds)
    found = cluster.solve(wanted, microbatches)
    csv, json, no_header, quiet = output
    tabular.write_rows(stages_report.rows(cluster, found), csv, json, not no_header)
    if not opt.is_piped(csv, json) and not quiet:
        work = "" if graph is not None else f", {phase} of {plural(each, 'request')}"
        stages_report.print_stages(cluster, found, wanted, microbatches, work)


def _beside(text: str) -> tuple[str, None, int]:
    """(hardware, no engine of its own, chips) of --beside."""
    name, _, count = text.rpartition(":")
    if not name or not count.isdigit() or int(count) < 1:
        raise InputError(f"--beside {text}: expected hardware and chips, as a100-80gb-sxm:8")
    return name, None, int(count)


def _named(model: str | None) -> str:
    if model is None:
        raise InputError("give either --model or --graph: a model's layers, or an operator graph of your own")
    return model


def _phase(word: str) -> Phase:
    found = next((each for each in PHASES if each == word), None)
    if found is None:
        raise InputError(f"--phase {word}: expected one of {', '.join(PHASES)}")
    return found


def _problem(
    model: str | None,
    graph: str | None,
    hardware: str,
    engine: str | None,
    gpus: int,
    phase: str,
    isl: int,
    osl: int,
    concurrency: int,
    layers: str,
    weights: str | None,
    kv_cache: str | None,
    memory_limit: str | None,
    devices: str,
) -> tuple[Problem, str]:
    """(what is searched, a sentence that says so)."""
    if (model is None) == (graph is None):
        raise InputError("give either --model or --graph: a model's layers, or an operator graph of your own")
    machine, software = load_machine(hardware, engine)
    memory = None if memory_limit is None else parse_bytes(memory_limit)
    placed: Devices = "any" if devices == "any" else "blocks"
    if graph is not None:
        problem = graph_problem(load_graph(graph), machine, software, gpus, memory, placed)
        return problem, f"{problem.graph.name} on {problem.machine.devices} x {machine.name}."
    spec, kind = load_model(str(model)), _phase(phase)
    formats = formats_of(spec, machine, software, weights, kv_cache)
    load = load_of(software, kind, concurrency, isl, osl)
    wanted = _layers(layers, spec.layers)
    problem = model_problem(spec, machine, software, gpus, formats, load, wanted, memory, placed)
    work = (
        f"a decode step of {plural(concurrency, 'request')} at {load.context} tokens"
        if kind == "decode"
        else f"the prefill of {plural(concurrency, 'prompt')} of {load.context} tokens"
    )
    return problem, (
        f"{problem.graph.name} ({formats.weights.name}) on {problem.machine.devices} x {machine.name}, engine "
        f"{software.name} {software.version}: {work}, without host time."
    )


def _layers(text: str, most: int) -> int | None:
    if text == "all":
        return None
    if not text.isdigit() or int(text) < 1:
        raise InputError(f"--layers: expected a whole number of at least 1, or all, found {text!r}")
    return min(int(text), most)


def _advance(progress: Progress, count: int) -> None:
    for _ in range(count):
        progress.advance()


def _chains(problem: Problem, chains: list[Chain], jobs: int, progress: Progress) -> Outcome:
    """Runs chains slice by slice, in this process or in several; what an interrupt leaves is the best so far."""
    if jobs > 1:
        return _several(problem, chains, jobs, progress)
    try:
        for chain in chains:
            while not chain.done:
                before = chain.evaluations
                chain.advance(problem, SLICE)
                _advance(progress, chain.evaluations - before)
    except KeyboardInterrupt:
        return outcome([chain for chain in chains if chain.evaluations] or chains[:1], complete=False)
    return outcome(chains)


_PROBLEM: Problem  # of a worker process
_PATIENCE = 0.2


def _several(problem: Problem, chains: list[Chain], jobs: int, progress: Progress) -> Outcome:
    """Chains go to workers for a slice and come back, so that whatever is in hand is a result."""
    from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait  # noqa: PLC0415
    from concurrent.futures.process import BrokenProcessPool  # noqa: PLC0415

    interrupted = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: interrupted.set())
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else None)
    pool = ProcessPoolExecutor(jobs, context, _begin, (problem,))
    latest = list(chains)
    try:
        running: dict[Future[Chain], int] = {pool.submit(_slice, chain): place for place, chain in enumerate(chains)}
        while running and not interrupted.is_set():
            for future in wait(running, _PATIENCE, FIRST_COMPLETED).done:
                place = running.pop(future)
                chain = future.result()
                _advance(progress, chain.evaluations - latest[place].evaluations)
                latest[place] = chain
                if not chain.done:
                    running[pool.submit(_slice, chain)] = place
    except BrokenProcessPool:
        raise PlannerError("a process that searches was ended from outside (out of memory?); fewer --jobs") from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        signal.signal(signal.SIGINT, before)
    known: Sequence[Chain] = [chain for chain in latest if chain.evaluations] or [chains[0].advance(problem, 1)]
    return outcome(known, complete=not interrupted.is_set())


def _begin(problem: Problem) -> None:
    """Makes a process a worker: an interrupt is its parent's business, and it does not outlive that."""
    global _PROBLEM  # noqa: PLW0603 (what a worker has instead of arguments)
    _PROBLEM = problem
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()

    def follow() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _slice(chain: Chain) -> Chain:
    return chain.advance(_PROBLEM, SLICE)
