"""`plan completion`: prints the script that makes a shell complete our words, and answers it when it asks.

The script asks `plan completion SHELL --at N -- WORDS`: what may stand at word N? Names come from the catalogue,
options from the commands themselves, so nothing has to be kept in step. An empty answer means the names of files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, NamedTuple

import typer

from planner.command import COMMANDS, command_of
from planner.command import options as opt
from planner.points import CHOICES
from planner.specs.catalog import (
    DIFFUSION,
    ENGINES,
    FAMILIES,
    GRAPHS,
    HARDWARE,
    MODELS,
    SAMPLERS,
    Family,
    names,
    other_names,
)

_BASH = """\
# bash completion of plan; in ~/.bashrc: eval "$(plan completion bash)"
_plan_completion() {
    local IFS=$'\\n'
    COMPREPLY=($("$1" completion bash --at "$COMP_CWORD" -- "${COMP_WORDS[@]}" 2>/dev/null))
}
complete -o default -F _plan_completion plan
"""
_ZSH = """\
# zsh completion of plan; in ~/.zshrc, after compinit: eval "$(plan completion zsh)"
_plan_completion() {
    local -a found
    found=("${(@f)$("${words[1]}" completion zsh --at $((CURRENT - 1)) -- "${words[@]}" 2>/dev/null)}")
    if [[ -n "${found[1]}" ]]; then
        _describe plan found
    else
        _files
    fi
}
compdef _plan_completion plan
"""
_FISH = """\
# fish completion of plan; in ~/.config/fish/config.fish: plan completion fish | source
function __plan_completion
    set -l current (commandline -ct)
    set -l words (commandline -opc) "$current"
    set -l found ($words[1] completion fish --at (math (count $words) - 1) -- $words 2>/dev/null)
    if test (count $found) -gt 0
        printf '%s\\n' $found
    else
        __fish_complete_path "$current"
    end
end
complete -c plan -f -a '(__plan_completion)'
"""
SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}

Shell = Annotated[str, typer.Argument(metavar="|".join(SCRIPTS), help="The shell.")]
At = Annotated[int | None, typer.Option("--at", metavar="N", help="For the script: the word that is being typed.")]
Words = Annotated[list[str] | None, typer.Argument(metavar="[WORD...]", help="For the script: the line so far.")]


class Candidate(NamedTuple):
    """A word that may stand there, and what it means."""

    word: str
    about: str = ""


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(run)


def run(shell: Shell, words: Words = None, at: At = None, debug: opt.Debug = False) -> None:
    """Print the script that completes commands, options, and names of models, hardware and engines in your shell.

    Once: eval "$(plan completion bash)" in ~/.bashrc, the same with zsh in ~/.zshrc after compinit, or
    `plan completion fish | source` in ~/.config/fish/config.fish.
    """
    opt.choice(shell, "completion", tuple(SCRIPTS))
    if at is None:
        print(SCRIPTS[shell], end="")
        return
    line = words or []
    for candidate in candidates(line[1:at], line[at] if at < len(line) else ""):
        print(_printed(candidate, shell))


def _printed(candidate: Candidate, shell: str) -> str:
    if shell == "bash" or not candidate.about:
        return candidate.word.replace(":", r"\:") if shell == "zsh" else candidate.word
    if shell == "fish":
        return f"{candidate.word}\t{candidate.about}"
    return candidate.word.replace(":", r"\:") + ":" + candidate.about


def _family(*families: Family[Any]) -> Callable[[str], list[str]]:
    """Names of files; where none of them begins so, also their other names, which takes reading the files."""

    def found(begun: str) -> list[str]:
        stems = sorted(name for family in families for name in names(family))
        if any(stem.startswith(begun) for stem in stems):
            return stems
        return sorted(name for family in families for name in other_names(family))

    return found


def _any_name(begun: str) -> list[str]:
    return [name for family in FAMILIES for name in _family(family)(begun)]


def _words(allowed: Sequence[str]) -> tuple[str, ...]:
    """Those of the choices that can be typed: a sentence stands for more than can be listed."""
    return tuple(word for word in allowed if " " not in word)


def _always(allowed: Sequence[str]) -> Callable[[str], Sequence[str]]:
    return lambda _: allowed


def _groups(_: str) -> Sequence[str]:
    from planner.evidence.validation import GROUPS  # noqa: PLC0415 (reads the evidence; only this needs it)

    return GROUPS


VALUES: dict[str, Callable[[str], Iterable[str]]] = {
    "--model": _family(MODELS, DIFFUSION),
    "-m": _family(MODELS, DIFFUSION),
    "--hardware": _family(HARDWARE),
    "-H": _family(HARDWARE),
    "--engine": _family(ENGINES, SAMPLERS),
    "--graph": _family(GRAPHS),
    "--by": _groups,
    "--phase": _always(("decode", "prefill")),
    "--form": _always(("inference", "training")),
    "--method": _always(("auto", "exhaustive", "mcmc", "stages", "sharding")),
    **{f"--{name.replace('_', '-')}": _always(_words(allowed)) for name, allowed in CHOICES.items()},
}
"""What an option takes, by its name; the argument is what has been typed of it."""
_ARGUMENTS: dict[str, Callable[[str], Iterable[str]]] = {"show": _any_name, "completion": _always(tuple(SCRIPTS))}


def candidates(before: Sequence[str], begun: str) -> list[Candidate]:
    """What may stand at the end of a line; nothing where that is the name of a file or a number.

    Args:
        before: the words behind `plan` and before that word. Shells differ in whether `--model=x` is one or three.
        begun: what has been typed of that word.
    """
    before = list(before)
    if begun == "=":
        before, begun = [*before, "="], ""
    if before[-1:] == ["="]:
        before.pop()
    option, equals, value = begun.partition("=")
    if begun.startswith("--") and equals:
        return [Candidate(f"{option}={each.word}") for each in _values(option, value)]
    last = before[-1] if before else ""
    if last in VALUES:
        return _values(last, begun)
    if not before and not begun.startswith("-"):
        return [Candidate(word, about) for word, about in COMMANDS.items() if word.startswith(begun)]
    name = before[0] if before and before[0] in COMMANDS else "rank"
    return [each for each in _of_command(name, last, begun) if each.word.startswith(begun)]


def _of_command(name: str, last: str, begun: str) -> list[Candidate]:
    """Options of a command, or what its argument may be; nothing where an option's value is due."""
    parameters = command_of(name).params
    options = [each for each in parameters if each.param_type_name == "option"]
    if any(last in each.opts and not each.is_flag for each in options):
        return []
    if begun.startswith("-") or (not begun and len(options) == len(parameters)):
        help_ = Candidate("--help", "Show this message and exit.")
        return [*(Candidate(word, each.help or "") for each in options for word in each.opts), help_]
    return [Candidate(word) for word in _ARGUMENTS[name](begun)] if name in _ARGUMENTS else []


def _values(option: str, begun: str) -> list[Candidate]:
    """The values of an option; of a comma list, for what stands behind the last comma, and without those before it."""
    head, comma, tail = begun.rpartition(",")
    known = VALUES[option](tail) if option in VALUES else ()
    used = head.split(",")
    return [Candidate(head + comma + word) for word in known if word.startswith(tail.lower()) and word not in used]
