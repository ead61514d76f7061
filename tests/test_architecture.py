"""The house: data flows one way, files are read in one room, and only two rooms print."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from helpers import CONFIGS, ROOT, Late, every

PACKAGE = ROOT / "planner"
ORDER = [
    "_version", "errors", "units", "specs", "plans", "costs",
    "extrapolation", "results", "request", "points", "arriving", "pricing", "sizing", "advice", "ranking", "simulating",
    "diffusion", "sensitivity", "estimating", "sweeping", "startup", "launching", "explaining", "crossing",
    "phases", "diagnosing", "opgraph", "evidence", "api", "report", "command",
]  # fmt: skip
"""Rooms in the order in which data flows: one may import from those before it, and from itself."""
READING = {"open", "read_text", "read_bytes", "fromfile", "loadtxt", "genfromtxt"}
WRITING = {"write_text", "write_bytes", "unlink", "mkdir", "chmod", "fdopen", "mkstemp", "savetxt", "rename"}


def modules() -> dict[str, Path]:
    """Files by module name below the package: `specs.catalog`; a package's own module is `command`."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
        if parts[-1] == "__init__":
            parts.pop()
        found[".".join(parts)] = path
    return found


FILES = modules()
MODULES = Late(lambda: {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in FILES.items()})
ROOMS = {name: name.split(".")[0] for name in FILES}
WITHOUT_FACADE = sorted(name for name in FILES if name)  # `planner/__init__` hands on what others hold


@cache
def imports(tree: ast.Module) -> tuple[str, ...]:
    """Everything that a module imports, wherever it stands: inside functions and for type checkers too."""
    return tuple(_imports(tree))


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative imports hide where they lead"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and called(node) == "import_module":
            (argument, *_) = node.args
            if isinstance(argument, ast.JoinedStr):  # f"planner.command.{name}"
                yield "".join(str(part.value) for part in argument.values if isinstance(part, ast.Constant)).rstrip(".")


@cache
def packages(tree: ast.Module) -> set[str]:
    """The packages that a module imports from."""
    return {target.split(".")[0] for target in imports(tree)}


def called(node: ast.Call) -> str:
    """The last name of what is called: `read_text` of `path.read_text()`."""
    function = node.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


@cache
def calls(tree: ast.Module) -> set[str]:
    """The last names of everything that a module calls; `write_text` for `open` with a mode that writes.

    `os.open` is left out: it opens the null device.
    """
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) != "os.open":
            modes = {argument.value for argument in node.args if isinstance(argument, ast.Constant)}
            found.add("write_text" if called(node) == "open" and modes & {"w", "a", "x"} else called(node))
    return found


@cache
def names(tree: ast.Module) -> set[str]:
    """Names and attributes that a module mentions."""
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return used | {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def test_every_room_has_its_place_in_the_order() -> None:
    assert {room for room in ROOMS.values() if room} == set(ORDER)


@every("name", WITHOUT_FACADE)
def test_nobody_imports_to_the_right(name: str) -> None:
    for target in imports(MODULES[name]):
        if target.split(".")[0] != "planner":
            continue
        room = target.split(".")[1]
        assert room in ORDER, f"planner.{name} imports {target}: rooms are named, not the front door"
        assert ORDER.index(room) <= ORDER.index(ROOMS[name]), f"planner.{name} imports {target}"


def test_imports_inside_functions_are_seen() -> None:
    tree = ast.parse("def f():\n    from planner.report import table\nimport_module(f'planner.command.{x}')")
    assert set(imports(tree)) == {"planner.report.table", "planner.command"}


def test_the_facade_hands_on_and_imports_nothing_at_once() -> None:
    tree = MODULES[""]
    at_once = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    ours = [target for node in at_once for target in imports(ast.Module([node], [])) if target.startswith("planner")]
    assert ours == ["planner._version.__version__"]
    rooms = {target.split(".")[1] for target in imports(tree) if target.startswith("planner.")}
    assert rooms <= set(ORDER) - {"report", "command"}


def test_only_specs_reads_files_beside_the_points_of_the_command_and_the_table_that_is_continued() -> None:
    readers = {name for name, tree in MODULES.items() if calls(tree) & READING}
    assert "specs.catalog" in readers
    assert {name for name in readers if ROOMS[name] != "specs"} == {"command.estimate", "report.tabular"}


def test_only_the_catalogue_knows_yaml() -> None:
    assert {name for name, tree in MODULES.items() if "yaml" in packages(tree)} == {"specs.catalog"}


def test_only_the_tabular_report_writes_files() -> None:
    assert {name for name, tree in MODULES.items() if calls(tree) & WRITING} == {"report.tabular"}


def test_only_report_and_command_print() -> None:
    def prints(tree: ast.Module) -> bool:
        return "print" in calls(tree) or bool({"stdout", "stderr"} & names(tree)) or "rich" in packages(tree)

    assert {ROOMS[name] for name, tree in MODULES.items() if prints(tree)} == {"report", "command"}


def test_only_report_knows_the_painter_and_only_command_the_parser() -> None:
    assert {ROOMS[name] for name, tree in MODULES.items() if "rich" in packages(tree)} == {"report"}
    assert {ROOMS[name] for name, tree in MODULES.items() if {"typer", "click"} & packages(tree)} == {"command"}


def test_the_validator_is_needed_in_one_place_and_only_when_it_is() -> None:
    """Importing pydantic costs more time than planning: never at the top of a module."""
    assert {name for name, tree in MODULES.items() if "pydantic" in packages(tree)} == {"specs.structure"}
    top = [node for node in MODULES["specs.structure"].body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert "pydantic" not in packages(ast.Module(list(top), []))


def test_counting_and_pricing_know_nothing_of_the_process_and_the_day() -> None:
    edges = {"_version", "specs", "report", "command", "api", ""}
    for name, tree in MODULES.items():
        if ROOMS[name] not in edges:
            assert not packages(tree) & {"os", "sys", "time", "random", "datetime"}, f"planner.{name}"


def test_no_code_branches_on_the_name_of_a_model_chip_or_engine() -> None:
    shipped = {path.stem for path in CONFIGS.rglob("*.yaml")} | {"h100", "h200", "a100", "b200"}
    for name, tree in MODULES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Compare | ast.match_case):
                texts = {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}
                assert not texts & shipped, f"planner.{name} compares with {texts & shipped}"


def test_every_module_says_what_it_is() -> None:
    for name, tree in MODULES.items():
        assert ast.get_docstring(tree), f"planner.{name} has no docstring"


def test_a_module_is_one_noun_of_readable_length() -> None:
    for path in PACKAGE.rglob("*.py"):
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 500, path.relative_to(ROOT)
