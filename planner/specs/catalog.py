"""Finding and reading specifications: by name, alias, Hugging Face id or path; with `extends`; with suggestions.

Shipped files live in `planner/configs` (installed) or `configs` (checkout). A user's own are given by path, or by
name from the directories in PLAN_CONFIG_PATH, which are searched first.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import yaml

from planner.errors import InputError, SpecError
from planner.specs.diffusion import Diffusion
from planner.specs.engine import Engine
from planner.specs.hardware import Hardware
from planner.specs.merging import merge
from planner.specs.model import Model
from planner.specs.opgraph import OperatorGraph
from planner.specs.sampler import Sampler
from planner.specs.structure import trusted, validated

Spec = TypeVar("Spec", Model, Hardware, Engine, Diffusion, Sampler, OperatorGraph)
Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_PACKAGE = Path(__file__).resolve().parent.parent
_LOADED: dict[tuple[str, str], Any] = {}
_SOURCES: list[tuple[Path, Any]] = []  # which file each specification came from
_TRUSTED: list[Any] = []  # specifications built from shipped files only
_NAMES = re.compile(r"^(?:aliases|hf_ids):.*(?:\n[ -].*)*", re.MULTILINE)
_VERSIONED = re.compile(r"(?P<base>.+?)-v?(?P<version>\d+(?:\.\d+)+)(?:[.-]?(?:post|rc|dev|a|b)\d*)*", re.IGNORECASE)
_KIND = re.compile(r"^kind: *diffusion\b", re.MULTILINE)
_SINCE = re.compile(r"^since: *['\"]?(\d[0-9.]*)", re.MULTILINE)
_LARGEST = 4 * 2**20  # a specification is a few KiB; anything near this is another kind of file


class Family(NamedTuple, Generic[Spec]):
    """One family of files."""

    noun: str
    folder: str
    kind: type[Spec]
    diffusion: bool = False
    """Whether its files say `kind: diffusion`; those of the other family in the same folder do not."""


MODELS: Family[Model] = Family("model", "models", Model)
HARDWARE: Family[Hardware] = Family("hardware", "hardware", Hardware)
ENGINES: Family[Engine] = Family("engine", "engines", Engine)
GRAPHS: Family[OperatorGraph] = Family("graph", "graphs", OperatorGraph)
DIFFUSION: Family[Diffusion] = Family("diffusion model", "models", Diffusion, diffusion=True)
SAMPLERS: Family[Sampler] = Family("diffusion engine", "engines", Sampler, diffusion=True)
FAMILIES: tuple[Family[Any], ...] = (MODELS, DIFFUSION, HARDWARE, ENGINES, SAMPLERS)


def load_model(name: str | Path) -> Model:
    """A model by name, alias, Hugging Face id or path of a YAML file or config.json.

    Raises:
        InputError: no such name (with the nearest ones), or a file that cannot be read or validated.
    """
    return _load(MODELS, str(name))


def load_diffusion(name: str | Path) -> Diffusion:
    """A diffusion transformer by name, alias, Hugging Face id or path.

    Raises:
        InputError: as `load_model`.
    """
    return _load(DIFFUSION, str(name))


def is_diffusion(name: str) -> bool:
    """Whether a model's name or path is that of a diffusion transformer; of what there is not it is none."""
    path = Path(name)
    try:
        if path.suffix in (".yaml", ".yml") or path.is_file():
            return path.suffix != ".json" and _family_of_file(path) is DIFFUSION
    except (InputError, OSError):
        return False
    return _path_of(MODELS, name) is None and _path_of(DIFFUSION, name) is not None


def load_hardware(name: str | Path, engine: Engine | Sampler | None = None) -> Hardware:
    """Hardware by name, alias or path; with an engine, its overrides for this hardware are applied.

    Raises:
        InputError: as `load_model`.
    """
    if engine is None or not engine.chips:
        return _load(HARDWARE, str(name))
    known = any(engine is each for each in _TRUSTED)
    if known and ("hardware", f"{name} {id(engine)}") in _LOADED:  # _TRUSTED keeps the engine: its id stays its own
        laid: Hardware = _LOADED["hardware", f"{name} {id(engine)}"]
        return laid
    path, shipped = _locate(HARDWARE, str(name))
    source = next((str(file) for file, loaded in _SOURCES if loaded is engine), engine.name)
    raw, trust = _extended(HARDWARE, path, shipped, engine.chips, Path(source).name)
    if known:
        built = _build(HARDWARE, raw, path, trust)
        if shipped:
            _LOADED["hardware", f"{name} {id(engine)}"] = built
        return built
    try:
        return validated(Hardware, raw, path)
    except SpecError as error:  # the hardware file alone was sound, or this one is not the engine's fault
        _load(HARDWARE, str(name))
        raise SpecError(source, f"chips.{raw.get('name')}.{error.key}", error.problem) from None


def load_engine(name: str | Path) -> Engine:
    """An engine by name, alias or path.

    Raises:
        InputError: as `load_model`.
    """
    return _load(ENGINES, str(name))


def load_graph(name: str | Path) -> OperatorGraph:
    """An operator graph by name or path.

    Raises:
        InputError: as `load_model`.
    """
    return _load(GRAPHS, str(name))


def load_sampler(name: str | Path) -> Sampler:
    """An engine of diffusion transformers by name, alias or path.

    Raises:
        InputError: as `load_model`.
    """
    return _load(SAMPLERS, str(name))


def load_machine(hardware: str | Path, engine: str | Path | None = None) -> tuple[Hardware, Engine]:
    """Hardware and engine together: the engine named, else the hardware file's own, with its overrides applied."""
    if engine is not None:
        software = load_engine(engine)
    else:
        try:
            software = load_engine(load_hardware(hardware).engine)
        except SpecError:
            raise
        except InputError as error:
            raise SpecError(_locate(HARDWARE, str(hardware))[0], "engine", str(error)) from None
    return load_hardware(hardware, software), software


def load(family: Family[Spec], name: str | Path) -> Spec:
    """A specification of a family by name, alias, id or path.

    Raises:
        InputError: as `load_model`.
    """
    return _load(family, str(name))


def files_of(family: Family[Any], name: str | Path) -> list[tuple[Path, bool]]:
    """(file, whether it is a shipped one) behind a name or path, and those that it extends one after another.

    Raises:
        InputError: as `load_model`.
    """
    path, shipped = _locate(family, str(name))
    found: list[tuple[Path, bool]] = []
    while path not in [known for known, _ in found]:
        found.append((path, shipped))
        base = _read(path).get("extends")
        beside = path.parent / str(base)
        parent = None if base is None else beside if beside.is_file() else _path_of(family, str(base))
        if parent is None:
            break
        path, shipped = parent, parent.is_relative_to(_shipped(family))
    return found


def names(family: Family[Any]) -> list[str]:
    """Names of all files of a family that are found, sorted."""
    return sorted({path.stem for path, _ in _files(family)})


def other_names(family: Family[Any]) -> list[str]:
    """Every name, alias and Hugging Face id of a family, lower case, sorted. Reads all its files."""
    return sorted({other for other, _ in _every_name(family)})


def find(name: str, families: tuple[Family[Any], ...] = FAMILIES) -> Family[Any]:
    """The family in which a name is found first.

    Raises:
        InputError: in none of them.
    """
    for family in families:
        if Path(name).is_file() or _path_of(family, name) is not None:
            return _family_of_file(Path(name)) if Path(name).is_file() else family
    raise _unknown(name, families)


def _family_of_file(path: Path, seen: tuple[Path, ...] = ()) -> Family[Any]:
    """The family that a file's keys belong to, or those of the file that it extends."""
    raw = _read(path)
    base = str(raw.get("extends", ""))
    if base and path not in seen:
        for beside in (path.parent / base, path.parent / f"{base}.yaml"):
            if beside.is_file():
                return _family_of_file(beside, (*seen, path))
        for family in FAMILIES:
            for shipped in _shipped(family).glob("*.yaml"):
                if base.lower() in _other_names(shipped, shipped.read_text("utf-8")) and _is_of(family, shipped):
                    return family
    if "chip" in raw or "network" in raw:
        return HARDWARE
    if "operators" in raw:
        return GRAPHS
    if raw.get("kind") == "diffusion":
        return SAMPLERS if "host" in raw or "methods" in raw else DIFFUSION
    return ENGINES if "scheduler" in raw or "host" in raw else MODELS


def _load(family: Family[Spec], name: str) -> Spec:
    if (family.noun, name) not in _LOADED:
        path, shipped = _locate(family, name)
        raw, trust = _extended(family, path, shipped)
        built = _LOADED[family.noun, name] = _build(family, raw, path, trust)
        _SOURCES.append((path, built))
        if trust:
            _TRUSTED.append(built)
    spec: Spec = _LOADED[family.noun, name]
    return spec


def _build(family: Family[Spec], raw: dict[str, Any], path: Path, trust: bool) -> Spec:
    return trusted(family.kind, raw) if trust else validated(family.kind, raw, path)


def _locate(family: Family[Any], name: str) -> tuple[Path, bool]:
    """(path, whether it is a shipped file) of a name or path."""
    path = Path(name)
    if path.suffix in (".yaml", ".yml", ".json") or path.is_file():
        return path, False
    found = _path_of(family, name)
    if found is None:
        raise _other_kind(family, name) or _unknown(name, (family,))
    return found, found.is_relative_to(_shipped(family))


def _extended(
    family: Family[Any],
    path: Path,
    shipped: bool,
    overrides: Mapping[str, dict[str, Any]] | None = None,
    source: str = "",
) -> tuple[dict[str, Any], bool]:
    """A file's keys laid over those of the file it extends; trusted only where both are shipped.

    `overrides` (an engine's, by name; `source` is its file) are laid on the file of that name, before a file that
    extends it.
    """
    waiting = dict(overrides or {})
    chain: list[Path] = []
    layers: list[dict[str, Any]] = []
    while True:
        if path in chain:
            raise SpecError(chain[0], "extends", f"goes in a circle over {path}")
        chain.append(path)
        raw = _imported(_read(path), path) if family is MODELS else _read(path)
        if (raw.get("kind") == "diffusion") is not family.diffusion and not {"extends", "chip"} & raw.keys():
            raise InputError(_KINDS.get((family.folder, family.diffusion), "").format(name=path))
        base = raw.pop("extends", None)
        layers.append(raw)
        if base is None:
            break
        raw.setdefault("name", path.stem)  # never the parent's: results would carry a name that they are not of
        beside = path.parent / str(base)
        parent = beside if beside.is_file() else _path_of(family, str(base))
        if parent is None:
            raise SpecError(path, "extends", str(_unknown(str(base), (family,))))
        path, shipped = parent, shipped and parent.is_relative_to(_shipped(family))
    merged: dict[str, Any] = {}
    while layers:
        layer = layers.pop()
        for own in ("aliases", "hf_ids", "published", "like"):  # another's names and count, and whose constants it has
            merged.pop(own, None)
        merged = merge(merged, layer, chain.pop().name)
        for name in (layer.get("name"), *(layer.get("aliases") or ())):
            merged = merge(merged, waiting.pop(str(name), {}), source)
    return merged, shipped


def _imported(raw: dict[str, Any], path: Path) -> dict[str, Any]:
    """A Hugging Face config.json in our schema; a file of our own as it is."""
    if path.suffix != ".json" and not raw.keys() & {"model_type", "architectures"}:
        return raw
    from planner.specs import huggingface  # noqa: PLC0415 (its tables cost time that most runs need not spend)

    return plain(huggingface.model_from_config(raw, path)) if huggingface.is_config(raw, path) else raw


def plain(value: Any) -> Any:
    """A specification as the mappings and lists of its file, values that are defaults left out."""
    if hasattr(value, "_fields"):
        defaults = value._field_defaults
        items = zip(value._fields, value, strict=True)
        return {key: plain(item) for key, item in items if key not in defaults or item != defaults[key]}
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, tuple | list) else value


def as_yaml(spec: Model | Hardware | Engine | Diffusion | Sampler) -> str:
    """A specification as the text of a file that loads to the same."""
    return str(yaml.safe_dump(plain(spec), sort_keys=False, allow_unicode=True, width=120, default_flow_style=None))


def file_text(content: dict[str, Any]) -> str:
    """A mapping as the text of a YAML file, keys in their order."""
    return str(yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=120))


def _read(path: Path) -> dict[str, Any]:
    """The mapping in a YAML or JSON file; the caller may change its first level."""
    return dict(_parsed(path))


@cache
def _parsed(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _LARGEST:
            raise SpecError(path, "", f"larger than {_LARGEST // 2**20} MiB: this is not a specification")
        text = path.read_text(encoding="utf-8")
        raw = _json(text, path) if path.suffix == ".json" else yaml.load(text, Loader)
    except OSError as error:
        raise SpecError(path, "", f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise SpecError(path, "", "is not text: expected YAML in UTF-8") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise SpecError(
            path, "", f"is not valid YAML: {place}{getattr(error, 'problem', None) or 'unreadable character'}"
        ) from None
    if raw is None:
        raise SpecError(path, "", "is empty: expected a mapping of keys to values")
    if not isinstance(raw, dict):
        raise SpecError(path, "", f"holds a {type(raw).__name__}, expected a mapping of keys to values")
    return {str(key): value for key, value in raw.items()}


def _json(text: str, path: Path) -> Any:
    """JSON is not quite YAML: there a tab may not indent, and 1e-05 is a text."""
    import json  # noqa: PLC0415

    try:
        return json.loads(text) if text.strip() else None
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise SpecError(path, "", f"is not valid JSON: {place}: {error.msg}") from None
    except (RecursionError, ValueError):  # brackets in brackets, or a number of thousands of digits
        raise SpecError(path, "", "is nested too deeply, or holds too long a number: no specification") from None


def _shipped(family: Family[Any]) -> Path:
    installed = _PACKAGE / "configs" / family.folder
    return installed if installed.is_dir() else _PACKAGE.parent / "configs" / family.folder


def _files(family: Family[Any]) -> Iterator[tuple[Path, str]]:
    """(path, text) of every file of a family; what cannot be read is passed over, it may not be ours."""
    for folder, mixed in _folders(family):
        for path in sorted(folder.glob("*.yaml")):
            try:
                stat = path.stat()
                text = _text(path, stat.st_mtime_ns, stat.st_size)
                if mixed and _family_of_file(path) is not family:
                    continue
                if bool(_KIND.search(text)) is not family.diffusion:
                    continue
            except (OSError, UnicodeDecodeError, InputError):
                continue
            yield path, text


@cache
def _text(path: Path, modified: int, size: int) -> str:
    """The text of a file as it was then: names are looked up often."""
    return path.read_text(encoding="utf-8")


def _is_of(family: Family[Any], path: Path) -> bool:
    """Whether a file of a folder that two families share is one of this."""
    return bool(_KIND.search(path.read_text(encoding="utf-8", errors="replace"))) is family.diffusion


def _folders(family: Family[Any]) -> Iterator[tuple[Path, bool]]:
    """(folder, whether files of several families lie in it) in the order of search."""
    for entry in os.environ.get("PLAN_CONFIG_PATH", "").split(os.pathsep):
        if entry:
            yield Path(entry) / family.folder, False
            yield Path(entry), True
    yield _shipped(family), False


@cache
def _path_of(family: Family[Any], name: str) -> Path | None:
    """The file whose stem, alias or Hugging Face id this is; ids are compared without regard to case."""
    for folder, mixed in _folders(family):
        exact = folder / f"{name}.yaml"
        if os.sep not in name and not mixed and exact.is_file() and _is_of(family, exact):
            return exact
    wanted = name.lower()
    for path, text in _files(family):
        if path.stem == name or (wanted in text.lower() and wanted in _other_names(path, text)):
            return path
    return _covering(name) if family is ENGINES else None


def _covering(name: str) -> Path | None:
    """The file of an engine that covers a version: of `vllm-0.12.0` the one with the latest `since` up to 0.12.0."""
    asked = _VERSIONED.fullmatch(name)
    if asked is None:
        return None
    base, version = asked["base"].lower(), _numbers_of(asked["version"])
    covering = [
        (_numbers_of(since[1]), path)
        for path, text in _files(ENGINES)
        if (since := _SINCE.search(text)) and re.fullmatch(rf"{re.escape(base)}(-[0-9.]+)?", path.stem)
    ]
    return max([pair for pair in covering if pair[0] <= version], default=(None, None))[1]


def _numbers_of(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def _other_names(path: Path, text: str) -> list[str]:
    """Every name of a file, lower case. Only the lines of its names are parsed: a look-up reads many files."""
    lines = _NAMES.findall(text)
    try:
        raw = yaml.load("\n".join(lines), Loader) if lines else {}
    except yaml.YAMLError:
        raw = {}
    lists = [names for names in raw.values() if isinstance(names, list)]
    return [str(name).lower() for name in (path.stem, *(name for names in lists for name in names))]


def _other_kind(family: Family[Any], name: str) -> InputError | None:
    """The error where a name is of the other family in the same folder; none where it is of none."""
    others = [each for each in FAMILIES if each.folder == family.folder and each is not family]
    wrong = any(_path_of(other, name) is not None for other in others)
    return InputError(_KINDS[family.folder, family.diffusion].format(name=name)) if wrong else None


_KINDS = {
    ("models", False): "{name} is a diffusion transformer; plan, explain, crossover, launch, diagnose, show take one",
    ("models", True): "{name} is a language model: expected a diffusion transformer (`plan models` lists both)",
    ("engines", False): "{name} runs diffusion transformers, not language models; expected an engine such as vllm",
    ("engines", True): "{name} serves language models; diffusion transformers run under xdit (`plan engines`)",
}


def _unknown(name: str, families: tuple[Family[Any], ...]) -> InputError:
    import difflib  # noqa: PLC0415 (only errors need it)

    known = {other: stem for family in families for other, stem in _every_name(family)}
    close = difflib.get_close_matches(name.lower(), known, n=6, cutoff=0.45)
    nearest = list(dict.fromkeys(known[match] for match in close))[:3]
    hint = f"did you mean {', '.join(nearest)}?" if nearest else f"known are {', '.join(dict.fromkeys(known.values()))}"
    noun = " or ".join(family.noun for family in families)
    plural = "hardware" if noun == "hardware" else f"{noun}s"
    listing = (
        f"`plan {plural}` lists them; a path to a YAML file works too"
        if len(families) == 1 and families[0] is not GRAPHS  # few enough to be named
        else "a path to a YAML file works too"
    )
    return InputError(f"unknown {noun} {name!r}: {hint} ({listing})")


def _every_name(family: Family[Any]) -> Iterator[tuple[str, str]]:
    for path, text in _files(family):
        for other in _other_names(path, text):
            yield other, path.stem
