"""`plan sweep`: a ranking for every combination of some values, row by row into a file that can be continued."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import closing
from typing import Annotated, Any, cast

import typer

from planner.command import options as opt
from planner.command.question import filters_of, limits_of
from planner.errors import InputError, NoPlanError, PlannerError, StoppedError
from planner.report import tabular
from planner.report.figures import plural
from planner.report.progress import Progress
from planner.specs.lengths import lengths_of
from planner.specs.workload import ARRIVALS, SCHEDULES, Arrivals, Schedule, Workload
from planner.sweeping import (
    ASKED,
    AXES,
    COLUMNS_OF_SWEEP,
    LEAST,
    NUMBERS,
    RATES,
    Sweep,
    finished,
    rates,
    shares,
    whole_numbers,
    words,
)

Row = dict[str, Any]
_PATIENCE = 0.1  # seconds until an interrupt is looked for while a point is ranked
MOST_ROWS = 100
"""Rows of a table where a file has all of them."""
MOST_FAILURES = 3
"""Points without a plan of which the reason is shown."""
_AHEAD = 4  # points per worker that wait, so that none is idle and few are lost at the end

Models = Annotated[str, typer.Option("--model", "-m", metavar="NAME|FILE,...", help="Models.")]
Machines = Annotated[str, typer.Option("--hardware", "-H", metavar="NAME|FILE,...", help="Hardware.")]
Engines = Annotated[
    str | None, typer.Option("--engine", metavar="NAME|FILE,...", help="Engines; default: the hardware file's.")
]
Chips = Annotated[
    str | None,
    typer.Option(
        "--gpus",
        "--chips",
        metavar="N,...",
        help="Chips there are (and are paid for); default 8, under a limit on time or an arrival rate the fewest.",
    ),
]
Rates = Annotated[
    str | None,
    typer.Option(
        "--arrival-rate",
        metavar="R,...",
        help="Requests per second that come to the whole deployment, in the place of --concurrency.",
    ),
]
Isls = Annotated[str, typer.Option("--isl", metavar="N,...", help="Tokens of a prompt; differing ones: --lengths.")]
Osls = Annotated[str, typer.Option("--osl", metavar="N,...", help="Tokens of an answer.")]
Loads = Annotated[
    str | None,
    typer.Option(
        "--concurrency",
        metavar="N,...",
        help="Requests in flight in the whole deployment; default 1, searched for throughput and cost.",
    ),
]
AllWeights = Annotated[
    str | None,
    typer.Option("--weights", metavar="DTYPE,...", help="Dtypes of the weights; default: the model's own."),
]
KvCaches = Annotated[
    str | None,
    typer.Option("--kv-cache", metavar="DTYPE,...", help="Dtypes of the KV cache; default: the engine's rule."),
]
Objectives = Annotated[
    str, typer.Option("--objective", metavar="GOAL,...", help="latency, ttft, tpot, throughput or cost.")
]
SpecTokens = Annotated[
    str | None, typer.Option("--spec-tokens", metavar="N,...", help="Tokens drafted a step (speculative decoding).")
]
SpecAccepts = Annotated[
    str | None,
    typer.Option("--spec-accept", metavar="SHARE,...", help="Shares of drafted tokens that are accepted."),
]
Top = Annotated[int, typer.Option("--top", min=0, help="Plans of each point to write; 0 = all.")]
Jobs = Annotated[int, typer.Option("--jobs", "-j", min=1, help="Processes that rank; the order of rows stays.")]
GrowingCsv = Annotated[
    str | None,
    typer.Option("--csv", metavar="FILE|-", help="Write CSV row by row; a FILE of the same sweep is continued."),
]
WholeJson = Annotated[
    str | None, typer.Option("--json", metavar="FILE|-", help="Write JSON, when the sweep is through.")
]
EPILOG = (
    "Lists are joined by commas; whole numbers may be ranges: 8:64:8 adds, 1:256:x2 multiplies. Rows are those of "
    "`plan`, and in the column `asked` the command that gives a row's point alone. A point without a "
    "plan has `error`; exit status 3 only if all have. After an interruption (130) the same command continues FILE."
)


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command(epilog=EPILOG)(run)


def run(
    context: typer.Context,
    model: Models,
    hardware: Machines = "h100",
    engine: Engines = None,
    gpus: Chips = None,
    isl: Isls = "1024",
    osl: Osls = "256",
    lengths: opt.Lengths = None,
    concurrency: Loads = None,
    arrival_rate: Rates = None,
    weights: AllWeights = None,
    kv_cache: KvCaches = None,
    objective: Objectives = "latency",
    max_gpus: opt.MaxGpus = None,
    schedule: opt.Schedule = None,
    arrivals: opt.Arrivals = None,
    max_context: opt.MaxContext = None,
    max_num_seqs: opt.MaxNumSeqs = None,
    max_num_batched_tokens: opt.MaxNumBatchedTokens = None,
    prefix_hit: opt.PrefixHit = 0.0,
    spec_tokens: SpecTokens = None,
    spec_accept: SpecAccepts = None,
    draft: opt.Draft = None,
    max_ttft: opt.MaxTtft = None,
    max_tpot: opt.MaxTpot = None,
    max_latency: opt.MaxLatency = None,
    price: opt.Price = None,
    memory_limit: opt.MemoryLimit = None,
    memory_fraction: opt.MemoryFraction = None,
    tp: opt.Tp = None,
    pp: opt.Pp = None,
    dp: opt.Dp = None,
    ep: opt.Ep = None,
    cp: opt.Cp = None,
    attention: opt.Attention = None,
    prefill_attention: opt.PrefillAttention = None,
    ffn: opt.Ffn = None,
    prefill_ffn: opt.PrefillFfn = None,
    grid: opt.Grid = None,
    slice_: opt.Slice = None,
    top: Top = 1,
    jobs: Jobs = 1,
    csv: GrowingCsv = None,
    json: WholeJson = None,
    no_header: opt.NoHeader = False,
    plot: Annotated[
        str | None,
        typer.Option(
            "--plot",
            metavar="FILE.svg|png",
            help="Draw the goal's figure over what is swept, a line for each combination of the other lists.",
        ),
    ] = None,
    quiet: opt.Quiet = False,
    debug: opt.Debug = False,
) -> None:
    """Rank anew for every combination of some models, chips, lengths, loads, dtypes, drafts and goals."""
    opt.check_targets(csv, json, ("--plot", plot), specs=(model, hardware, engine, lengths))
    opt.check_plot(plot)
    given = {
        "model": model, "hardware": hardware, "engine": engine, "gpus": gpus, "isl": isl, "osl": osl,
        "concurrency": concurrency, "arrival_rate": arrival_rate, "weights": weights, "kv_cache": kv_cache,
        "objective": objective, "spec_tokens": spec_tokens, "spec_accept": spec_accept,
    }  # fmt: skip
    sweep = Sweep.of(
        {name: _values(name, text) for name, text in given.items() if text is not None},
        workload=Workload(
            schedule=cast("Schedule | None", schedule and opt.choice(schedule, "--schedule", SCHEDULES)),
            arrivals=cast("Arrivals | None", arrivals and opt.choice(arrivals, "--arrivals", ARRIVALS)),
            max_context=max_context,
            prefix_hit=prefix_hit,
            **_lengths(isl, osl, lengths),
        ),
        limits=limits_of(max_ttft, max_tpot, max_latency, memory_limit, memory_fraction),
        filters=filters_of(tp, pp, dp, ep, cp, attention, prefill_attention, ffn, prefill_ffn, grid),
        price=opt.above_zero(price, "--price"),
        slice=slice_,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        draft=draft,
        shared=_shared(context),
        top=top,
        max_gpus=max_gpus,
    )
    tabular.check_writable(json)
    if plot is not None:
        from planner.report.plot import check_lines  # noqa: PLC0415 (needed for pictures only)

        check_lines(sweep.axes, plot)
    as_table = not opt.is_piped(csv, json) and not quiet
    all_of_them = json is not None or plot is not None or (as_table and csv is None)
    rows = _Rows(sweep, csv, not no_header, keep=None if all_of_them else MOST_ROWS if as_table else 0)
    try:
        _fill(rows, jobs, quiet, bar=csv != tabular.STDOUT or not sys.stdout.isatty())
    except KeyboardInterrupt:
        raise StoppedError(f"interrupted after {rows.done} of {plural(len(sweep), 'point')}{rows.hint()}") from None
    finally:
        rows.close()
    drawn = plot if rows.failed < len(sweep) else None  # else there is nothing to draw, and an error follows
    tabular.write([(json, lambda: tabular.json_text(rows.kept)), (drawn, lambda: _picture(rows.kept, sweep, plot))])
    if as_table:
        from planner.report.sweep import Counts, print_sweep  # noqa: PLC0415 (needed for tables only)

        varying = [name for name in AXES if len(sweep.axes[name]) > 1]
        shown = rows.kept if csv is None and json is None else rows.kept[:MOST_ROWS]
        print_sweep(shown, rows.failures, Counts(len(sweep), rows.count, rows.failed), varying, csv or json)
        sys.stdout.flush()  # before the sentence on stderr
    if rows.failed == len(sweep):
        raise NoPlanError(f"none of {plural(len(sweep), 'point')} has a plan; the first: {rows.error}")
    if rows.failed and not as_table:
        opt.warn(f"{rows.failed} of {plural(len(sweep), 'point')} have no plan; the first: {rows.error}", quiet)


def _picture(rows: Sequence[Row], sweep: Sweep, plot: str | None) -> bytes:
    """What --plot draws."""
    from planner.report.plot import sweep_plot  # noqa: PLC0415 (needed where it is asked for)

    return sweep_plot(rows, sweep.axes, str(plot))


def _lengths(isl: str, osl: str, lengths: str | None) -> dict[str, Any]:
    """What of a workload --lengths says."""
    return {} if lengths is None else lengths_of(isl, osl, lengths)._asdict()


def _values(name: str, text: str) -> tuple[Any, ...]:
    option = f"--{name.replace('_', '-')}"
    if name in RATES:
        return rates(text, option)
    if name == "spec_accept":
        return shares(text, option)
    return whole_numbers(text, option, LEAST.get(name, 1)) if name in NUMBERS else words(text, option)


_OWN = frozenset((*AXES, "top", "jobs", "csv", "json", "no_header", "plot", "quiet", "debug"))


def _shared(context: typer.Context) -> str:
    """The options that all points share as they are typed to `plan`; those at their defaults are left out."""
    import shlex  # noqa: PLC0415

    found = []
    for parameter in context.command.params:
        name = parameter.name or ""
        value = context.params.get(name)
        if name not in _OWN and value is not None and value != parameter.default:
            found.append(f"{parameter.opts[0]} {shlex.quote(_typed(value))}")
    return " ".join(found)


def _typed(value: Any) -> str:
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


class _Rows:
    """Where the rows of a sweep go, and how many of its points are done and have failed.

    Args:
        sweep: whose rows they are.
        csv: where they go, as they come.
        head: whether a header goes in front.
        keep: how many of them are kept here, for a table or JSON; none = all.
    """

    def __init__(self, sweep: Sweep, csv: str | None, head: bool, keep: int | None) -> None:
        self.sweep, self.keep = sweep, keep
        self.done = self.count = self.failed = 0
        self.kept: list[Row] = []
        self.failures: list[Row] = []
        self.file: tabular.GrowingFile | None = None
        self.stdout = csv == tabular.STDOUT
        if csv is not None and not self.stdout:
            self.file = tabular.GrowingFile(csv, COLUMNS_OF_SWEEP, head)
            try:
                self._continue(self.file)
            except BaseException:
                self.file.close()
                raise
        elif self.stdout and head:
            sys.stdout.write(tabular.csv_text(COLUMNS_OF_SWEEP, []))

    def _continue(self, file: tabular.GrowingFile) -> None:
        error, asked = (COLUMNS_OF_SWEEP.index(name) for name in ("error", ASKED))
        try:
            self.done, used = finished(self.sweep, [(row[asked], bool(row[error])) for row in file.rows])
        except InputError as refusal:
            raise InputError(
                f"{file.path} exists and cannot be continued, it is of another sweep or other options: {refusal}; "
                "give another file, or remove this one"
            ) from None
        for row in file.rows[:used]:
            if row[error] or self._is_kept():
                self._note({name: tabular.value(name, text) for name, text in zip(COLUMNS_OF_SWEEP, row, strict=True)})
            else:
                self.count += 1
        file.rows.clear()
        file.start(used)

    def _is_kept(self) -> bool:
        return self.keep is None or len(self.kept) < self.keep

    def _note(self, row: Row) -> None:
        self.count += 1
        if self._is_kept():
            self.kept.append(row)
        if row["error"] is not None:
            self.failed += 1
            if len(self.failures) < MOST_FAILURES:
                self.failures.append(row)

    @property
    def error(self) -> str:
        """The first."""
        return str(self.failures[0]["error"])

    def add(self, rows: list[Row]) -> None:
        """The rows of the next point: at once where others can read them."""
        if self.file is not None:
            self.file.add(rows)
        elif self.stdout:
            sys.stdout.write(
                tabular.csv_text(None, [[tabular.cell(row[name]) for name in COLUMNS_OF_SWEEP] for row in rows])
            )
            sys.stdout.flush()
        self.done += 1
        for row in rows:
            self._note(row)

    def hint(self) -> str:
        """What to do after an interruption."""
        if self.file is not None:
            return f"; {self.file.path} has them, and the same command continues it"
        return "; with --csv FILE a sweep can be continued"

    def close(self) -> None:
        """Closes the file, if there is one."""
        if self.file is not None:
            self.file.close()


def _fill(rows: _Rows, jobs: int, quiet: bool, bar: bool) -> None:
    """Ranks the points that are left and adds their rows in order."""
    left = range(rows.done, len(rows.sweep))
    gc.enable()  # a sweep may run for hours
    jobs = min(jobs, len(left))
    found = _several(rows.sweep, left, jobs) if jobs > 1 else (rows.sweep.rows(index) for index in left)
    with closing(found), Progress("point", len(rows.sweep), rows.done, quiet, bar) as progress:
        for each in found:
            rows.add(each)
            progress.advance(each[0]["error"] is not None)


_SWEEP: Sweep  # of a worker process


def _several(sweep: Sweep, left: Sequence[int], jobs: int) -> Generator[list[Row], None, None]:
    """The rows of points, ranked by several processes, in the order of the points.

    An interrupt is noted and raised between two points: raised anywhere, it may hit the pool while that is locked.
    """
    from concurrent.futures import Future, ProcessPoolExecutor  # noqa: PLC0415
    from concurrent.futures.process import BrokenProcessPool  # noqa: PLC0415

    interrupted = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: interrupted.set())

    def result(future: Future[list[Row]]) -> list[Row]:
        while not interrupted.is_set():
            try:
                return future.result(timeout=_PATIENCE)
            except TimeoutError:
                continue
        raise KeyboardInterrupt

    # a copy of this process has all files read; elsewhere than on Linux that is not safe
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else None)
    pool = ProcessPoolExecutor(jobs, context, _begin, (sweep,))
    waiting: deque[Future[list[Row]]] = deque()
    try:
        for index in left:
            waiting.append(pool.submit(_rank, index))
            if len(waiting) > _AHEAD * jobs:
                yield result(waiting.popleft())
        while waiting:
            yield result(waiting.popleft())
    except BrokenProcessPool:
        raise PlannerError(
            "a process that ranks points was ended from outside (out of memory?); the rows so far are whole: "
            "continue with fewer --jobs"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        signal.signal(signal.SIGINT, before)


def _begin(sweep: Sweep) -> None:
    """Makes a process a worker: an interrupt is its parent's business, and it does not outlive that."""
    global _SWEEP  # noqa: PLW0603 (what a worker has instead of arguments)
    _SWEEP = sweep
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()

    def follow() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _rank(index: int) -> list[Row]:
    return _SWEEP.rows(index)
