"""`plan estimate`: price one given plan, or every row of a file. It never searches."""

from __future__ import annotations

import csv as csv_module
import io
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import numpy as np
import typer

from planner.command import options as opt
from planner.errors import InputError, NoPlanError
from planner.estimating import estimate_one, estimate_points
from planner.plans.plan import Plan
from planner.points import CHOICES, DEFAULTS, DEGREES, OPTIONS
from planner.report import tabular
from planner.report.figures import short
from planner.request import TIMES, check_prefix_hit
from planner.results import COLUMNS, Results
from planner.specs.catalog import load_machine, load_model
from planner.specs.engine import Engine
from planner.specs.hardware import Hardware
from planner.specs.lengths import lengths_of
from planner.specs.speculation import check_asked

Machine = tuple[Hardware, Engine]
Points = Annotated[
    str | None,
    typer.Option(
        "--points", metavar="FILE|-", help="CSV of points: columns are options, output adds the result columns."
    ),
]
PlanLabel = Annotated[str | None, typer.Option("--plan", metavar="TP8xPP2", help="The plan as `plan` prints it.")]
Against = Annotated[
    list[str] | None,
    typer.Option(
        "--against",
        metavar="FILE",
        help="Result of vllm bench serve or sglang.bench_serving: prices those runs, and says how far off; repeatable.",
    ),
]
OneModel = Annotated[
    str | None,
    typer.Option("--model", "-m", metavar="NAME|HF-ID|FILE", help="Model; for --points also a column."),
]


def register(app: typer.Typer) -> None:
    """Adds the command."""
    columns = ", ".join(OPTIONS)
    app.command(
        epilog=f"Columns of --points: {columns}. A row that cannot be priced, or breaks a limit, gets `error`."
    )(run)


def run(
    context: typer.Context,
    model: OneModel = None,
    hardware: opt.Hardware = "h100",
    engine: opt.Engine = None,
    gpus: opt.SomeGpus = None,
    plan: PlanLabel = None,
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
    objective: opt.Objective = "latency",
    isl: opt.IslOrSpread = "1024",
    osl: opt.OslOrSpread = "256",
    lengths: opt.Lengths = None,
    concurrency: opt.Concurrency = None,
    schedule: opt.Schedule = None,
    arrivals: opt.Arrivals = None,
    weights: opt.Weights = None,
    kv_cache: opt.KvCache = None,
    max_context: opt.MaxContext = None,
    max_num_seqs: opt.MaxNumSeqs = None,
    max_num_batched_tokens: opt.MaxNumBatchedTokens = None,
    prefix_hit: opt.PrefixHit = 0.0,
    spec_tokens: opt.SpecTokens = None,
    spec_accept: opt.SpecAccept = None,
    draft: opt.Draft = None,
    max_ttft: opt.MaxTtft = None,
    max_tpot: opt.MaxTpot = None,
    max_latency: opt.MaxLatency = None,
    price: opt.Price = None,
    memory_limit: opt.MemoryLimit = None,
    memory_fraction: opt.MemoryFraction = None,
    slice_: opt.Slice = None,
    points: Points = None,
    against: Against = None,
    csv: opt.Csv = None,
    json: opt.Json = None,
    no_header: opt.NoHeader = False,
    placement: opt.Placement = False,
    placement_svg: opt.PlacementSvg = None,
    quiet: opt.Quiet = False,
    debug: opt.Debug = False,
    version: opt.Version = False,
) -> None:
    """Price one plan, or every row of a CSV file. A degree left out is 1, --gpus the chips the plan uses."""
    opt.check_targets(csv, json, ("--placement-svg", placement_svg), specs=(model, hardware, engine, lengths))
    opt.check_pages(None, placement_svg)
    check_prefix_hit("--prefix-hit", prefix_hit)
    check_asked(spec_tokens, spec_accept)
    outputs = (("--csv", csv), ("--json", json), ("--placement-svg", placement_svg))
    opt.check_apart(outputs, [points, *(against or [])])
    given: dict[str, Any] = {
        "model": model, "hardware": hardware, "engine": engine, "gpus": gpus, "plan": plan, "tp": tp, "pp": pp,
        "dp": dp, "ep": ep, "cp": cp, "attention": attention, "prefill_attention": prefill_attention, "ffn": ffn,
        "prefill_ffn": prefill_ffn, "grid": grid, "objective": objective, **_lengths(isl, osl, lengths),
        "concurrency": concurrency,
        "schedule": schedule, "arrivals": arrivals, "weights": weights, "kv_cache": kv_cache,
        "max_context": max_context, "price": opt.above_zero(price, "--price"), "memory_limit": memory_limit,
        "memory_fraction": opt.above_zero(memory_fraction, "--memory-fraction"), "slice": slice_,
        "max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens, "prefix_hit": prefix_hit,
        "spec_tokens": spec_tokens, "spec_accept": spec_accept, "draft": draft,
    }  # fmt: skip
    limits = {
        name: limit
        for name, value in zip(TIMES, (max_ttft, max_tpot, max_latency), strict=True)
        if (limit := opt.above_zero(value, f"--max-{name}")) is not None
    }
    for name in DEGREES:
        given[name] = _one(given[name], f"--{name}")
    for name, allowed in CHOICES.items():
        if given[name] is not None:
            opt.choice(given[name], f"--{name.replace('_', '-')}", tuple(allowed))
    if plan is not None:
        _agree(Plan.parse(plan), given)
    as_table = not opt.is_piped(csv, json) and not quiet
    _check_placement(placement, placement_svg, points, against, as_table, quiet)
    if against:
        if points is not None:
            raise InputError("--against and --points: one at a time; the result says what to price")
        for name in ("isl", "osl"):  # the result's own, where the command line says nothing
            if getattr(context.get_parameter_source(name), "name", "") != "COMMANDLINE":
                given[name] = None
        _against(against, given, limits, csv, json, no_header, quiet)
        return
    if points is not None:
        _points(points, given, limits, csv, json, no_header, quiet)
        return
    if model is None:
        raise InputError("no model: give --model, or --points with a column `model`")
    results = estimate_one(given)
    if broken := _broken(results, limits):
        raise NoPlanError(broken[0])
    tabular.write(
        [
            (csv, lambda: tabular.results_csv(results, header=not no_header)),
            (json, lambda: tabular.json_text(results.rows())),
            (placement_svg, lambda: _placement_file(results, load_machine(hardware, engine)[0], slice_)),
        ]
    )
    if as_table:
        _print_one(results, (load_machine(hardware, engine)[0], _engine(given)), placement, slice_)


def _lengths(isl: str, osl: str, lengths: str | None) -> dict[str, Any]:
    """The options of a point that say how long requests are: two numbers, or `lengths` in their place."""
    found = lengths_of(isl, osl, lengths)
    if found.lengths is None and lengths is None:
        return {"isl": found.isl, "osl": found.osl}
    return {"isl": None, "osl": None, "lengths": lengths or f"{isl}/{osl}"}


def _check_placement(
    wanted: bool, file: str | None, points: str | None, against: list[str] | None, as_table: bool, quiet: bool
) -> None:
    """Refuses a picture of many plans, and warns where there will be none."""
    option = "--placement" if wanted else None if file is None else "--placement-svg"
    if option and (against or points is not None):
        raise InputError(f"{option} draws one plan: leave it out, or --points and --against")
    if wanted and not as_table:
        opt.warn("--placement draws below a table, and none is printed here", quiet)


def _placement_file(results: Results, hardware: Hardware, slice_: str | None) -> str:
    """What --placement-svg writes."""
    from planner.plans.placement import Placement  # noqa: PLC0415 (needed where it is asked for)
    from planner.report.page.seating import seating_file  # noqa: PLC0415

    row = results.row(0)
    return seating_file(Placement.of(hardware, row["gpus"], slice_), Plan.parse(row["plan"]))


def _print_one(results: Results, machine: Machine, placement: bool, slice_: str | None) -> None:
    """One priced plan as a table, and where it stands if that is asked for."""
    from planner.report.table import print_estimate  # noqa: PLC0415 (needed for tables only)

    hardware, engine = machine
    print_estimate(results, engine)
    if placement:
        from planner.plans.placement import Placement  # noqa: PLC0415 (needed where it is asked for)
        from planner.report.placement import print_placement  # noqa: PLC0415

        row = results.row(0)
        print()
        print_placement(Placement.of(hardware, row["gpus"], slice_), Plan.parse(row["plan"]))


def _engine(given: dict[str, Any]) -> Engine:
    """The engine as it is asked to run."""
    engine = load_machine(given["hardware"], given["engine"])[1]
    return engine.limited(given["max_num_seqs"], given["max_num_batched_tokens"])


def _one(text: str | None, option: str) -> int | None:
    values = opt.numbers(text, option)
    if len(values) > 1:
        raise InputError(
            f"{option} {text}: `plan estimate` prices one plan; `plan` ranks several, --points prices many"
        )
    return values[0] if values else None


def _agree(plan: Plan, given: dict[str, Any]) -> None:
    """Refuses degrees or sharding beside a label that says others."""
    sharding = ("attention", "prefill_attention")
    wanted = {name: given[name] or getattr(plan, name) for name in (*DEGREES, *sharding)}
    clash = next((name for name, value in wanted.items() if value != getattr(plan, name)), None)
    if clash is None:
        return
    option = f"--{clash.replace('_', '-')} {wanted[clash]}"
    if (wanted["attention"], wanted["prefill_attention"]) == ("heads", "batch"):  # cannot run: say the nearest that can
        follows = sharding[0] if given[sharding[0]] is None else sharding[1]
        wanted[follows] = "batch" if follows == "attention" else "heads"
    raise InputError(f"{option} contradicts --plan {plan.label}; write --plan {plan._replace(**wanted).label}")


def _broken(results: Results, limits: dict[str, float]) -> dict[int, str]:
    """The first limit on a time that each row breaks, as a sentence, by row; a time that does not exist breaks none."""
    broken: dict[int, str] = {}
    for name, limit in limits.items():
        times = results[f"{name}_ms"].astype(float)
        for index in (times > limit).nonzero()[0].tolist():
            text = f"{results['plan'][index]}: {name} {short(times[index])} ms is above --max-{name} {limit:g}"
            broken.setdefault(index, text)
    return broken


def _against(
    files: list[str],
    given: dict[str, Any],
    limits: dict[str, float],
    csv: str | None,
    json: str | None,
    no_header: bool,
    quiet: bool,
) -> None:
    """Every run of some results, priced beside what was measured."""
    from planner.command.served import doubt, options_of  # noqa: PLC0415 (as the report: only this needs them)
    from planner.report import against as report  # noqa: PLC0415
    from planner.specs.benchmarks import read_serving, where  # noqa: PLC0415

    paths = [str(Path(file).resolve()) for file in files]
    twice = next((path for path in paths if paths.count(path) > 1), None)
    if twice is not None:
        raise InputError(f"--against {twice}: stands twice; its runs would count twice")
    runs = [run for file in files for run in read_serving(file)]
    asked = [options_of(run, given) for run in runs]
    for model in dict.fromkeys(options["model"] for options in asked):
        load_model(model)  # a name that is not known is bad input, not a row that cannot be priced
    results = estimate_points({name: [options[name] for options in asked] for name in asked[0]}, len(runs))
    for index, broken in _broken(results, limits).items():
        results["error"][index] = broken
    priced = [index for index, error in enumerate(results["error"]) if error is None]
    if not priced:
        _fail(f"{where(runs[0])}: {results['error'][0]}", asked[0])
    rows = report.joined(results.rows(), runs)
    for text in dict.fromkeys(text for run in runs if (text := doubt(run, str(results["engine"][0])))):
        opt.warn(text, quiet)
    tabular.write_rows(rows, csv, json, not no_header)
    if not opt.is_piped(csv, json) and not quiet:
        from planner.report.table import print_estimate, print_results  # noqa: PLC0415

        if len(runs) == 1:
            print_estimate(results, _engine(given))
        else:
            print_results(results.take(np.array(priced)))
        report.print_against([rows[index] for index in priced], [runs[index] for index in priced])
    for run, error in zip(runs, results["error"], strict=True):
        if error is not None:
            opt.warn(f"{where(run)}: not priced: {error}", quiet)


def _fail(sentence: str, options: dict[str, Any]) -> NoReturn:
    """Raises what the first of some runs, none of which can be priced, is refused for: bad input, or no such plan."""
    try:
        estimate_one(options)
    except InputError:
        raise InputError(sentence) from None
    except NoPlanError:
        pass
    raise NoPlanError(sentence)


def _points(
    points: str,
    given: dict[str, Any],
    limits: dict[str, float],
    csv: str | None,
    json: str | None,
    no_header: bool,
    quiet: bool,
) -> None:
    """Every row of a file; options on the command line hold for rows that leave them empty."""
    header, columns, count = _read(points)
    known = [name for name in header if _option(name) in OPTIONS]
    unknown = [name for name in header if name not in known]
    if unknown:
        opt.warn(f"{points}: columns that are no option are passed through: {', '.join(unknown)}", quiet)
    asked: dict[str, Any] = {name: [value] for name, value in given.items() if value is not None}
    for name in known:
        fallback = given.get(_option(name), DEFAULTS.get(_option(name)))
        column = columns[name]
        asked[_option(name)] = column if fallback is None else [cell if cell.strip() else fallback for cell in column]
    results = estimate_points(asked, count)
    for index, broken in _broken(results, limits).items():
        results["error"][index] = broken
    within = " within the limits" if limits else ""
    failed = int(sum(error is not None for error in results["error"]))
    to_csv = csv or (tabular.STDOUT if json is None and not quiet else None)
    tabular.write(
        [
            (to_csv, lambda: _joined_csv(header, columns, results, not no_header)),
            (json, lambda: tabular.json_text(_joined_rows(header, columns, results))),
        ]
    )
    if failed:
        first = next(error for error in results["error"] if error is not None)
        opt.warn(f"{failed} of {count} rows could not be priced{within}; the first: {first}", quiet)
    if failed == count:
        raise NoPlanError(f"{points}: none of the {count} rows can be priced{within}")


def _option(column: str) -> str:
    return column.strip().removeprefix("--").replace("-", "_")


def _read(points: str) -> tuple[list[str], dict[str, list[str]], int]:
    """(header, cells by column, rows) of a CSV file."""
    try:
        text = sys.stdin.read() if points == tabular.STDOUT else Path(points).read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise InputError(f"--points {points}: cannot be read: {(error.strerror or str(error)).lower()}") from None
    except UnicodeDecodeError:
        raise InputError(f"--points {points}: is not text: expected CSV in UTF-8") from None
    try:
        reader = csv_module.reader(io.StringIO(text, newline=""))
        rows = [(reader.line_num, row) for row in reader if row]
    except csv_module.Error as error:
        raise InputError(f"--points {points}: is not CSV: {error}") from None
    if not rows:
        raise InputError(f"--points {points}: is empty: expected a header with option names and a row for each point")
    (_, header), *body = rows
    options = [_option(name) for name in header]
    twice = [name for name in options if options.count(name) > 1]
    if twice:
        raise InputError(f"--points {points}: the column {twice[0]} stands twice in the header")
    results = [name for name in options if name in COLUMNS and name not in OPTIONS]
    if results:
        raise InputError(
            f"--points {points}: `estimate` itself writes {', '.join(results)}; rename such columns or leave them out"
        )
    if not any(_option(name) in OPTIONS for name in header):
        raise InputError(
            f"--points {points}: no column of the header is an option; expected some of {', '.join(OPTIONS)}"
        )
    if not body:
        raise InputError(f"--points {points}: has a header but no rows")
    for number, row in body:
        if len(row) != len(header):
            raise InputError(f"--points {points}: line {number} has {_cells(len(row))}, the header {len(header)}")
    cells = zip(*(row for _, row in body), strict=True)
    return header, {name: list(column) for name, column in zip(header, cells, strict=True)}, len(body)


def _cells(count: int) -> str:
    return f"{count} cell{'' if count == 1 else 's'}"


def _new(header: list[str]) -> list[str]:
    """Result columns that the file does not have already."""
    have = {_option(name) for name in header}
    return [name for name in COLUMNS if name not in have]


def _joined_csv(header: list[str], columns: dict[str, list[str]], results: Results, head: bool) -> str:
    added = _new(header)
    cells = [*(columns[name] for name in header), *(tabular.column_cells(results, name) for name in added)]
    return tabular.csv_text([*header, *added] if head else None, zip(*cells, strict=True))


def _joined_rows(header: list[str], columns: dict[str, list[str]], results: Results) -> list[dict[str, Any]]:
    added = _new(header)
    return [
        {name: columns[name][index] for name in header} | {name: row[name] for name in added}
        for index, row in enumerate(results.rows())
    ]
