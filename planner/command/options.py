"""The options that commands share, each defined once, and what becomes of their texts."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from planner.errors import InputError
from planner.report import tabular
from planner.report.stderr import say
from planner.specs.speculation import AUTO

Model = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        metavar="NAME|HF-ID|FILE",
        help="Model: a name, a Hugging Face id, a YAML file or a Hugging Face config.json.",
    ),
]
Hardware = Annotated[
    str, typer.Option("--hardware", "-H", metavar="NAME|FILE", help="Hardware: a name or a YAML file.")
]
Engine = Annotated[
    str | None, typer.Option("--engine", metavar="NAME|FILE", help="Engine; default: the hardware file's.")
]
Gpus = Annotated[
    int | None,
    typer.Option(
        "--gpus",
        "--chips",
        min=1,
        help="Chips there are (and are paid for); default 8; under a limit on time or an arrival rate the fewest.",
    ),
]
MaxGpus = Annotated[
    int | None,
    typer.Option("--max-gpus", min=1, help="Without --gpus: the fewest chips up to so many [1024]; with --pareto all."),
]
ArrivalRate = Annotated[
    float | None,
    typer.Option(
        "--arrival-rate",
        metavar="REQUESTS/S",
        help="Requests per second that come to the whole deployment, in the place of --concurrency.",
    ),
]
SomeGpus = Annotated[
    int | None, typer.Option("--gpus", "--chips", min=1, help="Chips paid for; default: those the plan uses.")
]
Isl = Annotated[int, typer.Option("--isl", min=1, help="Tokens of a prompt.")]
Osl = Annotated[int, typer.Option("--osl", min=1, help="Tokens of an answer.")]
IslOrSpread = Annotated[
    str,
    typer.Option(
        "--isl", metavar="TOKENS|MEAN,P90", help="Tokens of a prompt; MEAN,P90: they differ, as a log-normal does."
    ),
]
OslOrSpread = Annotated[
    str, typer.Option("--osl", metavar="TOKENS|MEAN,P90", help="Tokens of an answer; MEAN,P90 likewise.")
]
Lengths = Annotated[
    str | None,
    typer.Option(
        "--lengths",
        metavar="FILE|ISL/OSL",
        help="CSV of requests: isl, osl, perhaps weight; or 1000,3000/256. In the place of --isl and --osl.",
    ),
]
Concurrency = Annotated[
    int | None,
    typer.Option(
        "--concurrency",
        min=1,
        help="Requests in flight in the whole deployment; default 1, searched for throughput and cost.",
    ),
]
Schedule = Annotated[
    str | None,
    typer.Option(
        "--schedule", metavar="continuous|static", help="Continuous batching, or static batches [the engine's]."
    ),
]
Arrivals = Annotated[
    str | None,
    typer.Option(
        "--arrivals", metavar="steady|waves", help="Requests come one by one, or together in waves [the engine's]."
    ),
]
Weights = Annotated[
    str | None,
    typer.Option(
        "--weights",
        metavar="DTYPE",
        help="bf16, fp16, fp8, int8, int4, mxfp4, or two of four pruned as bf16-2:4; default: the model's own.",
    ),
]
KvCache = Annotated[
    str | None, typer.Option("--kv-cache", metavar="DTYPE", help="bf16, fp16, fp8, int8; default: the engine's rule.")
]
MaxContext = Annotated[
    int | None, typer.Option("--max-context", min=1, help="Tokens a request must be able to hold; memory only.")
]
MaxNumSeqs = Annotated[
    int | None,
    typer.Option("--max-num-seqs", metavar="N", help="Requests that a replica runs at once at most [the engine's]."),
]
MaxNumBatchedTokens = Annotated[
    int | None,
    typer.Option("--max-num-batched-tokens", metavar="N", help="Tokens of an iteration at most [the engine's]."),
]
PrefixHit = Annotated[
    float, typer.Option("--prefix-hit", metavar="SHARE", help="Share of a prompt whose KV is cached, as 0.6.")
]
SpecTokens = Annotated[
    int | None, typer.Option("--spec-tokens", metavar="N", help="Tokens drafted a step (speculative decoding).")
]
SearchedSpecTokens = Annotated[
    str | None,
    typer.Option(
        "--spec-tokens",
        metavar="N|auto",
        help="Tokens drafted a step (speculative decoding); auto = the best of 1 to 8.",
    ),
]
SpecAccept = Annotated[
    float | None,
    typer.Option("--spec-accept", metavar="SHARE", help="Share of drafted tokens that are accepted, as 0.7."),
]
Draft = Annotated[
    str | None,
    typer.Option(
        "--draft", metavar="mtp|ngram|NAME|FILE", help="What drafts; default: the model's prediction modules (mtp)."
    ),
]
Objective = Annotated[str, typer.Option("--objective", metavar="GOAL", help="latency, ttft, tpot, throughput or cost.")]
MaxTtft = Annotated[
    float | None,
    typer.Option(
        "--max-ttft", metavar="MS", help="Highest time to first token, with the wait where requests arrive at a rate."
    ),
]
MaxTpot = Annotated[float | None, typer.Option("--max-tpot", metavar="MS", help="Highest time per output token.")]
MaxLatency = Annotated[
    float | None, typer.Option("--max-latency", metavar="MS", help="Highest latency of a request, likewise.")
]
Price = Annotated[
    float | None, typer.Option("--price", metavar="$", help="Dollars per chip and hour; default: the hardware file's.")
]
MemoryLimit = Annotated[
    str | None, typer.Option("--memory-limit", metavar="SIZE", help="Memory per chip, as 72GiB or 80GB.")
]
MemoryFraction = Annotated[
    float | None, typer.Option("--memory-fraction", help="Share of the chip's memory; default: the engine's.")
]
Slice = Annotated[
    str | None, typer.Option("--slice", metavar="4x4x4", help="Shape of a torus slice; default: the largest that fits.")
]
Tp = Annotated[str | None, typer.Option("--tp", metavar="N,...", help="Tensor-parallel degrees to look at.")]
Pp = Annotated[str | None, typer.Option("--pp", metavar="N,...", help="Pipeline depths to look at.")]
Dp = Annotated[
    str | None, typer.Option("--dp", metavar="N,...", help="Replica counts to look at; default: as many as fit.")
]
Ep = Annotated[str | None, typer.Option("--ep", metavar="N,...", help="Expert-parallel degrees.")]
Cp = Annotated[
    str | None,
    typer.Option(
        "--cp", metavar="N,...", help="Context-parallel degrees: groups of tp chips that share a prompt's tokens."
    ),
]
Attention = Annotated[
    str | None,
    typer.Option(
        "--attention",
        metavar="heads|batch|AxB",
        help="How attention is sharded in decode: heads, batch, heads4xbatch2, heads2xseq4.",
    ),
]
PrefillAttention = Annotated[
    str | None,
    typer.Option(
        "--prefill-attention",
        metavar="heads|batch|ring|...",
        help="The same in prefill; with --cp ring, gather or ulysses.",
    ),
]
Ffn = Annotated[
    str | None,
    typer.Option("--ffn", metavar="LAYOUT,...", help="Layout of the projections: 1d, 2d, wg-x, wg-xy, wg-xyz."),
]
Grid = Annotated[
    str | None,
    typer.Option("--grid", metavar="4x16,...", help="Chips of a group as X x YZ or X x Y x Z, for layouts beyond 1d."),
]
PrefillFfn = Annotated[str | None, typer.Option("--prefill-ffn", metavar="LAYOUT", help="The same in prefill.")]
Image = Annotated[
    str | None, typer.Option("--image", metavar="PX|WxH", help="Diffusion: pixels of the image or video [the model's].")
]
Frames = Annotated[
    int | None, typer.Option("--frames", metavar="N", help="Diffusion: frames of a video [the model's].")
]
Steps = Annotated[int | None, typer.Option("--steps", metavar="N", help="Diffusion: denoising steps [the model's].")]
Warmup = Annotated[
    int | None,
    typer.Option("--warmup", metavar="N", help="Diffusion: first steps without stale activations [the engine's]."),
]
Cfg = Annotated[str | None, typer.Option("--cfg", metavar="1,2", help="Diffusion: halves of guidance on own chips.")]
Ulysses = Annotated[str | None, typer.Option("--ulysses", metavar="N,...", help="Diffusion: Ulysses degrees.")]
Ring = Annotated[str | None, typer.Option("--ring", metavar="N,...", help="Diffusion: ring attention degrees.")]
PipeFusion = Annotated[str | None, typer.Option("--pipefusion", metavar="N,...", help="Diffusion: PipeFusion stages.")]
Patches = Annotated[
    str | None, typer.Option("--patches", metavar="N,...", help="Diffusion: patches of an image under PipeFusion.")
]
Exact = Annotated[bool, typer.Option("--exact", help="Diffusion: no plans that use stale activations.")]
ParallelVae = Annotated[bool, typer.Option("--parallel-vae", help="Diffusion: all chips of a replica decode.")]
Csv = Annotated[
    str | None, typer.Option("--csv", metavar="FILE|-", help="Write CSV; - is stdout, and nothing else goes there.")
]
Json = Annotated[str | None, typer.Option("--json", metavar="FILE|-", help="Write JSON, likewise.")]
NoHeader = Annotated[bool, typer.Option("--no-header", help="CSV without its first line.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No table, no warnings.")]


def _print_version(value: bool) -> None:
    if value:
        from planner._version import __version__  # noqa: PLC0415

        print(f"plan {__version__}")
        raise typer.Exit


Version = Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")]
Placement = Annotated[
    bool, typer.Option("--placement", help="Below the table, a picture of which chip does what: replica, stage, rank.")
]
PlacementSvg = Annotated[
    str | None, typer.Option("--placement-svg", metavar="FILE.svg", help="Draw that picture into a file.")
]
Html = Annotated[
    str | None,
    typer.Option(
        "--html", metavar="FILE.html", help="Write all of it as one page for a browser, which needs nothing else."
    ),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def numbers(text: str | None, option: str) -> tuple[int, ...]:
    """Whole numbers of a comma list.

    Raises:
        InputError: not whole numbers of at least 1.
    """
    if text is None:
        return ()
    values = []
    for part in text.split(","):
        try:
            value = int(part)
        except ValueError:
            value = 0
        if value < 1:
            raise InputError(
                f"{option}: expected whole numbers of at least 1 joined by commas, found {part.strip()!r} in {text!r}"
            )
        values.append(value)
    return tuple(values)


def choices(text: str | None, option: str, allowed: tuple[str, ...]) -> tuple[str, ...]:
    """Words of a comma list.

    Raises:
        InputError: a word that is not allowed.
    """
    if text is None:
        return ()
    words = tuple(part.strip() for part in text.split(","))
    for word in words:
        if word not in allowed:
            raise InputError(f"{option}: expected {' or '.join(allowed)}, found {word!r}")
    return words


def drafted(text: str | None) -> int | str | None:
    """Tokens drafted a step, or `auto`.

    Raises:
        InputError: neither.
    """
    if text is None or text == AUTO:
        return text
    try:
        return int(text)
    except ValueError:
        raise InputError(f"--spec-tokens: expected a whole number or {AUTO}, found {text!r}") from None


def choice(text: str, option: str, allowed: tuple[str, ...]) -> str:
    """One word.

    Raises:
        InputError: not one that is allowed.
    """
    if text not in allowed:
        raise InputError(f"{option}: expected one of {', '.join(allowed)}, found {text!r}")
    return text


def above_zero(value: float | None, option: str) -> float | None:
    """A limit or price.

    Raises:
        InputError: not above zero, or not finite.
    """
    if value is not None and not 0 < value < float("inf"):
        raise InputError(f"{option} must be above 0, found {value:g}")
    return value


def check_targets(
    csv: str | None, json: str | None, *more: tuple[str, str | None], specs: Iterable[str | None] = ()
) -> None:
    """Refuses two texts in one place, and a text in the place of a specification that the command reads.

    Args:
        csv: of --csv.
        json: of --json.
        more: (option, path or none) of further files that the command writes.
        specs: models, hardware and engines as they were given: names or paths, several joined by commas.

    Raises:
        InputError: both --csv - and --json -, the same file twice, a specification's own, or no name at all.
    """
    if csv == tabular.STDOUT and json == tabular.STDOUT:
        raise InputError("--csv - and --json - both want stdout; give one of them a file")
    seen: dict[Path, str] = {}
    for option, target in (("--csv", csv), ("--json", json), *more):
        if target is not None and not target.strip():
            raise InputError(f"{option}: expected the name of a file, found {target!r}")
        if target is None or target == tabular.STDOUT:
            continue
        other = seen.setdefault(Path(target).resolve(), f"{option} {target}")
        if other != f"{option} {target}":
            raise InputError(f"{other} and {option} {target} are the same file; give each its own")
    named = [name.strip() for names in specs if names is not None for name in names.split(",")]
    check_apart((("--csv", csv), ("--json", json), *more), [name for name in named if is_file(name)])


def check_plot(plot: str | None) -> None:
    """Refuses a picture that could not be made.

    Raises:
        InputError: as `report.plot.check_plot`.
    """
    if plot is not None:
        from planner.report.plot import check_plot as check  # noqa: PLC0415 (needed for pictures only)

        check(plot)


def check_apart(outputs: Iterable[tuple[str, str | None]], inputs: Iterable[Path | str | None]) -> None:
    """Refuses to write over what is read: measurements cannot be made again from what would stand there.

    Args:
        outputs: (option, path or none).
        inputs: files that the command reads; none and - are passed over.

    Raises:
        InputError: an output is an input, however its path is written.
    """
    read = {Path(file).resolve() for file in inputs if file is not None and str(file) != tabular.STDOUT}
    for option, target in outputs:
        if target is not None and target != tabular.STDOUT and Path(target).resolve() in read:
            raise InputError(f"{option} {target}: is read by this very command; choose another name")


def is_file(name: str | None) -> bool:
    """Whether a name or path of the command line is a file, and not a name of the catalogue."""
    try:
        return name is not None and Path(name).is_file()
    except OSError:  # too long for a path
        return False


def is_piped(csv: str | None, json: str | None) -> bool:
    """Whether stdout belongs to CSV or JSON."""
    return tabular.STDOUT in (csv, json)


def warn(text: str, quiet: bool = False) -> None:
    """A warning on stderr."""
    if not quiet:
        say(text)


def check_pages(html: str | None, placement_svg: str | None) -> None:
    """Refuses a page, or a picture of a placement, that could not be written.

    Raises:
        InputError: another kind of file, or one that cannot be written.
    """
    for option, target, kinds in (("--html", html, (".html", ".htm")), ("--placement-svg", placement_svg, (".svg",))):
        if target is not None:
            if not target.lower().endswith(kinds):
                raise InputError(f"{option} {target}: expected the name of a file that ends in {kinds[0]}")
            tabular.check_writable(target)


_NO_QUESTION = frozenset((
    "csv", "json", "no_header", "html", "plot", "placement", "placement_svg", "launch", "rejected", "top", "quiet",
    "debug", "version",
))  # fmt: skip
"""Options that say where an answer goes, not what is asked."""


def asked(context: typer.Context, command: str) -> str:
    """The command that asks the same question, as a shell takes it: options at their defaults are left out."""
    import shlex  # noqa: PLC0415 (pages only)

    words = command.split()
    for parameter in context.command.params:
        value = context.params.get(parameter.name or "")
        if parameter.name in _NO_QUESTION or value is None or value == parameter.default:
            continue
        words.append(parameter.opts[0])
        if value is not True:
            words.append(str(int(value)) if isinstance(value, float) and value.is_integer() else str(value))
    return shlex.join(words)
