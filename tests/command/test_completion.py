"""`plan completion`: what may stand where, and real shells that ask."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import ROOT, run

from planner.command import COMMANDS, command_of
from planner.command.completion import SCRIPTS, VALUES, candidates
from planner.points import CHOICES
from planner.specs.catalog import ENGINES, FAMILIES, HARDWARE, MODELS, Family, names


def offered(line: str) -> list[str]:
    """Words for the end of a line, as a shell splits it; `plan ` ends with an empty word."""
    _, *words = line.split(" ")
    return [candidate.word for candidate in candidates(words[:-1], words[-1])]


def test_the_first_word_is_a_command_or_an_option_of_plan() -> None:
    assert offered("plan ") == list(COMMANDS)
    assert offered("plan es") == ["estimate"]
    assert offered("plan --max-t") == ["--max-ttft", "--max-tpot"]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_of_every_command_is_offered_with_its_help(name: str) -> None:
    found = {candidate.word: candidate.about for candidate in candidates([name], "-")}
    for parameter in command_of(name).params:
        if parameter.param_type_name == "option":
            assert found.pop(parameter.opts[0]) == parameter.help
    assert all(word.startswith("-") for word in found)


@pytest.mark.parametrize(
    ("line", "family"),
    [
        ("plan --model ", MODELS),
        ("plan -m ", MODELS),
        ("plan estimate --gpus 8 -m ", MODELS),
        ("plan sweep --hardware ", HARDWARE),
        ("plan memory -H ", HARDWARE),
        ("plan --engine ", ENGINES),
    ],
)
def test_names_come_from_the_catalogue(line: str, family: Family[Any]) -> None:
    kinds = [each for each in FAMILIES if each.folder == family.folder]  # both kinds of model, of engine
    assert offered(line) == sorted(name for each in kinds for name in names(each))


def test_names_of_ones_own_are_offered_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_catalog: None
) -> None:
    (tmp_path / "hardware").mkdir()
    (tmp_path / "hardware" / "zz-mine.yaml").write_text("extends: h100-sxm\nname: zz-mine\n")
    monkeypatch.setenv("PLAN_CONFIG_PATH", str(tmp_path))
    assert offered("plan -H zz") == ["zz-mine"]


def test_hugging_face_ids_are_offered_where_no_name_begins_so() -> None:
    found = offered("plan -m meta-llama/")
    assert found
    for name in found[:2]:
        assert run("show", name, "--csv", "-").status == 0


def test_lists_are_completed_behind_the_last_comma() -> None:
    assert offered("plan sweep --objective latency,t") == ["latency,ttft", "latency,tpot", "latency,throughput"]
    assert "llama3-8b,llama3-8b" not in offered("plan sweep -m llama3-8b,")
    assert "llama3-8b,llama3-70b" in offered("plan sweep -m llama3-8b,llama3")


@pytest.mark.parametrize("name", sorted(CHOICES))
def test_choices_that_are_offered_are_accepted(name: str) -> None:
    option = f"--{name.replace('_', '-')}"
    words = offered(f"plan {option} ")
    assert words == [word for word in CHOICES[name] if " " not in word]  # a sentence stands for words without end
    for word in words:
        done = run("-m", "llama3-8b", "--gpus", "1", option, word, "--csv", "-")
        assert "expected" not in done.err  # a chip may still lack the arithmetic


def test_an_equals_sign_may_be_a_word_or_inside_one() -> None:
    whole = offered("plan --objective=t")
    assert whole == ["--objective=ttft", "--objective=tpot", "--objective=throughput"]
    assert offered("plan --objective = t") == ["ttft", "tpot", "throughput"]  # as bash splits
    assert offered("plan --objective =") == list(CHOICES["objective"])


@pytest.mark.parametrize(
    "line", ["plan --gpus ", "plan --csv ", "plan --points fi", "plan calibrate x", "plan nope --x"]
)
def test_numbers_and_files_are_left_to_the_shell(line: str) -> None:
    assert offered(line) == []


def test_arguments_are_names_or_shells() -> None:
    assert offered("plan show h100-s") == ["h100-sxm"]
    assert offered("plan completion ") == list(SCRIPTS)
    assert "--csv" in offered("plan models ")


def test_every_word_list_belongs_to_an_option_that_exists() -> None:
    known = {opts for name in COMMANDS for parameter in command_of(name).params for opts in parameter.opts}
    assert set(VALUES) <= known


def test_an_unknown_shell_is_refused_by_name() -> None:
    done = run("completion", "csh")
    assert done.status == 2
    assert "bash, zsh, fish" in done.err


@pytest.fixture
def plan_on_path(tmp_path: Path) -> dict[str, str]:
    """An environment in which `plan` is this checkout."""
    program = tmp_path / "bin" / "plan"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(str(ROOT / "cli.py"))} "$@"\n')
    program.chmod(0o755)
    return {"PATH": f"{program.parent}:/usr/local/bin:/usr/bin:/bin", "HOME": str(tmp_path)}


def ask(shell: str, script: str, env: dict[str, str]) -> list[str]:
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"no {shell} here")
    flags = {"bash": ["--norc"], "zsh": ["-f"], "fish": ["--no-config"]}[shell]
    done = subprocess.run(
        [program, *flags, "-c", script], env=env, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_bash_asks_and_gets_words(plan_on_path: dict[str, str]) -> None:
    lines = ["plan est", "plan --objective = t", "plan -H h100-s", "plan --csv ''"]
    asked = "; ".join(
        f"COMP_WORDS=({line}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _plan_completion plan; "
        'echo "<${COMPREPLY[*]}>"'
        for line in lines
    )
    *found, registered = ask("bash", f'eval "$(plan completion bash)"; {asked}; complete -p plan', plan_on_path)
    assert found == ["<estimate>", "<ttft tpot throughput>", "<h100-sxm>", "<>"]
    assert registered == "complete -o default -F _plan_completion plan"


def test_fish_asks_and_gets_words_with_their_meaning(plan_on_path: dict[str, str]) -> None:
    script = "plan completion fish | source; complete -C 'plan --objective t'; complete -C 'plan est'"
    *values, command = ask("fish", script, plan_on_path)
    assert sorted(values) == ["throughput", "tpot", "ttft"]
    assert command == f"estimate\t{COMMANDS['estimate']}"


def test_zsh_takes_the_script(plan_on_path: dict[str, str]) -> None:
    script = (
        "compdef() { print -r -- registered $1; }; _describe() { print -rl -- $found; }; _files() { print files; }; "
        'eval "$(plan completion zsh)"; words=(plan --objective t); CURRENT=3; _plan_completion; '
        "words=(plan est); CURRENT=2; _plan_completion; words=(plan --csv ''); CURRENT=3; _plan_completion"
    )
    registered, *found = ask("zsh", script, plan_on_path)
    assert registered == "registered _plan_completion"
    assert found == ["ttft", "tpot", "throughput", f"estimate:{COMMANDS['estimate']}", "files"]
