"""Examples of every command, as its help and docs/cli.md show them; tests run them."""

from __future__ import annotations

from typing import NamedTuple


class Example(NamedTuple):
    """What to type, and what it answers."""

    about: str
    words: str
    """Behind `plan`; a line break is where the help breaks the line."""

    @property
    def lines(self) -> list[str]:
        """The command as lines that a shell takes as one."""
        first, *rest = f"plan {self.words}".split("\n")
        return " \\\n    ".join([first, *rest]).split("\n")


EXAMPLES: dict[str, tuple[Example, ...]] = {
    "rank": (
        Example("the fastest answers on two nodes", "--model llama3-70b --gpus 16 --objective latency"),
        Example(
            "the most tokens per second under a limit",
            "--model llama3-70b --gpus 8 --isl 4096\n--objective throughput --max-tpot 50",
        ),
        Example(
            "how many chips for this load and these limits",
            "--model llama3-70b --max-ttft 500 --max-tpot 25\n--arrival-rate 40",
        ),
        Example("prompts that differ: mean and p90", "-m llama3.1-70b --gpus 8 --isl 1000,2000"),
        Example("two ways only, and why others are refused", "-m llama3-70b --tp 4,8 --pp 1 --rejected"),
        Example("a picture of latency against throughput", "-m llama3-70b --gpus 16 --plot tradeoff.svg"),
        Example("all of it as one page for a browser", "-m llama3-70b --gpus 16 --html report.html"),
        Example("every plan, for a script", "-m llama3-70b --csv - --top 0"),
        Example("a diffusion transformer", "-m flux.1-dev --gpus 8 --image 2048 --steps 28"),
    ),
    "estimate": (
        Example("one plan", "estimate -m llama3-70b --plan TP8 --concurrency 64"),
        Example("and which chip does what", "estimate -m llama3-70b --plan TP8xPP2 --placement"),
        Example("every row of a table", "estimate --points points.csv --csv priced.csv"),
        Example("a benchmark of your own beside its price", "estimate --against result.json"),
    ),
    "sweep": (
        Example(
            "two models at growing sizes, into a file",
            "sweep -m llama3-8b,llama3-70b --gpus 8:32:8\n--objective throughput --csv sweep.csv",
        ),
        Example(
            "where the best plan changes with the load", "sweep -m llama3-70b --concurrency 1:256:x4\n--max-ttft 500"
        ),
        Example("chips against load", "sweep -m llama3-70b --arrival-rate 5:40:5\n--max-tpot 25"),
        Example(
            "on four cores, the three best of each",
            "sweep -m llama3-70b --isl 512:4096:x2\n--top 3 --jobs 4 --csv -",
        ),
        Example(
            "as a picture, a line for each kind of chip",
            "sweep -m llama3-70b --hardware h100,h200\n--concurrency 1:256:x4 --plot sweep.svg",
        ),
    ),
    "explain": (
        Example("the winner: where its time goes and what would help", "explain -m llama3-70b --gpus 8"),
        Example("a plan of your own at a load", "explain -m llama3-70b --gpus 8 --plan TP4xDP2\n--concurrency 64"),
        Example(
            "its chips as a picture, and all of it as a page",
            "explain -m llama3-70b --gpus 16 --plan TP8xPP2\n--placement-svg chips.svg --html plan.html",
        ),
    ),
    "compare": (
        Example("two replicas of TP4 against one of TP8", "compare TP8 TP4xDP2 -m llama3-70b --gpus 8"),
        Example(
            "from which load on drafting does not pay",
            "compare TP8 -m llama3-70b --spec-tokens 0,4\n--spec-accept 0.7 --draft llama3-8b",
        ),
        Example("the best plan of two kinds of chip", "compare -m llama3-70b --gpus 8 --hardware h100,h200"),
        Example("as bars in a file", "compare TP8 TP4xDP2 -m llama3-70b --plot bars.svg"),
    ),
    "crossover": (
        Example("from which load on another plan leads", "crossover -m llama3-70b --gpus 8 --vary concurrency"),
        Example(
            "over loads and prompts, and one plan for all of it",
            "crossover -m llama3-70b --gpus 8\n--vary concurrency --vary isl --to 256 --to 4096",
        ),
        Example("of an image model, from how many chips on", "crossover -m sd3 -H l40 --vary gpus"),
        Example(
            "from which batch on weights are gathered",
            "crossover -m palm-62b -H tpu-v4 --gpus 32 --tp 32\n--isl 1984 --osl 64 --vary tokens --to 1000000",
        ),
    ),
    "shift": (
        Example("over the load, and where it changes", "shift -m llama3.1-70b -H h200 --weights fp8\n--isl 4096"),
        Example(
            "under bursts, with a base of your own",
            "shift -m llama3-8b --gpus 4 --base SP4\n--arrival-rate 40 --burstiness 3 --requests 200",
        ),
    ),
    "elastic": (
        Example("a long prompt in ten", "elastic -m lwm-7b -H a100-80gb-sxm --requests 40"),
        Example(
            "documents and their summaries",
            "elastic -m lwm-7b -H a100-80gb-sxm --short 1000\n--long 100000 --long-share 0.3 --osl 100\n"
            "--arrival-rate 0.2 --requests 20",
        ),
    ),
    "disaggregate": (
        Example(
            "the rate that two nodes serve within limits",
            "disaggregate -m llama3-70b --gpus 16\n--max-ttft 500 --max-tpot 30",
        ),
        Example(
            "how many chips of each pool for a load",
            "disaggregate -m llama3-8b --arrival-rate 60\n--max-ttft 300 --max-tpot 20",
        ),
        Example(
            "decode on the chips of the generation before",
            "disaggregate -m llama3-70b --gpus 16\n--decode-hardware a100 --max-ttft 500 --max-tpot 50",
        ),
    ),
    "search": (
        Example("how far the best template is from the optimum", "search -m llama3-70b --gpus 16"),
        Example(
            "in prefill, with a picture of the timeline",
            "search -m llama3-8b --gpus 4 --phase prefill\n--concurrency 4 --plot timeline.svg",
        ),
        Example(
            "the small problem of the lecture, all strategies",
            "search --graph two-towers -H h100-pairs --gpus 4\n--memory-limit 64MB",
        ),
    ),
    "diagnose": (
        Example("a prompt and a decode step, over all lengths", "diagnose -m llama3-70b --isl 8192"),
        Example("a denoising step", "diagnose -m flux.1-dev --image 2048"),
        Example("the roofline with the phases on it", "diagnose -m llama3-8b --plot roofline.svg"),
    ),
    "launch": (
        Example("the line that starts a plan", "launch -m llama3-70b --plan TP8"),
        Example("two nodes, by address", "launch -m llama3-70b --plan TP8xPP2\n--hosts 10.0.0.1,10.0.0.2"),
        Example("another engine, with its files", "launch -m llama3-70b --plan TP8 --engine trtllm"),
    ),
    "goodput": (
        Example(
            "the highest rate within two limits",
            "goodput -m llama3-8b --plan TP1\n--max-ttft 300 --max-tpot 12 --requests 300",
        ),
        Example(
            "percentiles at a rate, in bursts", "goodput -m llama3-70b --arrival-rate 2\n--burstiness 2 --requests 200"
        ),
        Example("a log played back", "goodput -m llama3-8b --gpus 2\n--trace requests.csv --max-ttft 300"),
    ),
    "memory": (
        Example("will it start, and with how much context", "memory -m gpt-oss-120b --tp 2"),
        Example(
            "how many requests of 32k tokens each degree holds", "memory -m llama3.1-70b --tp 2,4,8\n--context 32768"
        ),
    ),
    "validate": (
        Example("memory, against the logs of engines", "validate --memory"),
        Example("serving runs, by engine and chip", "validate --serving --by engine,hardware"),
        Example("diffusion transformers", "validate --diffusion"),
        Example("the largest errors, with their sources", "validate --kernels --worst 5"),
    ),
    "calibrate": (
        Example(
            "kernels and collectives of your own nodes",
            "calibrate -H h100 --nccl all_reduce.txt\n--gemm gemm.csv --output mine.yaml",
        ),
        Example("and then with them", "-m llama3-70b -H mine.yaml"),
    ),
    "models": (
        Example("the table", "models"),
        Example("everything that is known of them", "models --json -"),
    ),
    "hardware": (Example("the table", "hardware"), Example("for a script", "hardware --csv - --no-header")),
    "engines": (Example("the table", "engines"), Example("for a script", "engines --csv - --no-header")),
    "show": (
        Example("every figure of a chip, with its source", "show h100"),
        Example("a file to start your own from", "show llama3-70b --yaml"),
    ),
    "completion": (
        Example("in ~/.bashrc: eval what this prints", "completion bash"),
        Example("in ~/.zshrc, after compinit", "completion zsh"),
    ),
}


def with_examples(name: str, epilog: str | None) -> str | None:
    """The last part of a command's help: its examples, then what it has of its own."""
    examples = EXAMPLES.get(name)
    if examples is None:
        return epilog
    lines = ["\b", "Examples:"]  # the first tells click to keep the lines
    for example in examples:
        lines += [f"  # {example.about}", *(f"  {line}" for line in example.lines)]
    return "\n".join(lines) + (f"\n\n{epilog}" if epilog else "")
