"""How an engine is started: its command, the flags that say what a plan says, and what it cannot be told.

All of it is data of the engine's file. A word such as `{tp}` stands for a value of the plan (PLACEHOLDERS); a word that
begins with a dash must be in `flags`, the list as it was read from the engine's documentation.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple

from planner.specs.dtypes import KV_CACHE, WEIGHTS
from planner.specs.fields import Count
from planner.specs.speculation import KINDS

PLACEHOLDERS = {
    "model": "Hugging Face id or path of what is loaded",
    "tp": "tensor-parallel degree",
    "pp": "pipeline stages",
    "ep": "expert-parallel degree",
    "cp": "context-parallel degree",
    "weights": "the engine's word for the dtype of the weights",
    "kv_cache": "the engine's word for the dtype of the KV cache",
    "context": "tokens that a request may hold, prompt and answer",
    "input": "... of which the prompt",
    "output": "... of which the answer",
    "memory_fraction": "share of the memory, of what `memory` says",
    "sequences": "most requests that run at once in a replica",
    "batch": "requests in flight in a replica",
    "tokens": "token budget of one iteration",
    "block": "tokens of a block of the KV cache",
    "port": "port of the server",
    "nodes": "nodes of a replica",
    "node": "place of this node among those of its replica, from 0",
    "ranks": "chips of a replica",
    "ranks_per_node": "chips of a replica on each of its nodes",
    "head": "address of a replica's first node",
    "head_port": "port there at which its nodes find each other",
    "hosts": "addresses of a replica's nodes, joined by commas",
    "file": "name of the written file",
    "spec_tokens": "tokens drafted a step",
    "spec_rows": "... and one more, the tokens that are verified",
    "draft": "Hugging Face id or path of the draft model",
    "servers": "addresses of all servers, as http://host:port",
}
"""What a word in braces stands for."""
_PLACEHOLDER = re.compile(r"{(\w*)}")
DIMENSIONS = ("tp", "pp", "ep", "cp")
"""Degrees that a server must be told; copies (dp) are servers of their own."""


class Documentation(NamedTuple):
    """Where the flags were read."""

    version: str
    source: str


class Loading(NamedTuple):
    """What loads weights of one dtype."""

    name: str = "auto"
    """The engine's word for it."""
    words: tuple[str, ...] = ()
    checkpoint: str | None = None
    """The kind of checkpoint that is needed; none = the engine makes it from a 16-bit one while it loads."""


class Nodes(NamedTuple):
    """How a replica that spans several nodes is started."""

    about: str
    """The mechanism, as a sentence."""
    arguments: tuple[str, ...] = ()
    """Further arguments of the server."""
    others: tuple[str, ...] = ()
    """... and of those on the nodes after the first."""
    everywhere: bool = True
    """The server's command runs on each node; false = on the first only."""
    prefix: tuple[str, ...] = ()
    """Words before the server's command."""
    first: tuple[str, ...] = ()
    """A command that runs before it on the first node."""
    rest: tuple[str, ...] = ()
    """... and on the others."""
    even: bool = True
    """Every node must hold as many chips of the replica."""
    hands_out_chips: bool = False
    """The launcher gives each rank its chips: no variable says which."""


class Speculator(NamedTuple):
    """What makes an engine speculate with one kind of draft."""

    words: tuple[str, ...] = ()
    """Further arguments of the server."""
    content: dict[str, Any] = {}
    """What the file that the server reads has besides, at its top."""
    pipeline: bool = True
    """Whether it goes together with pipeline stages."""
    platforms: tuple[str, ...] = ()
    """Where it runs; () = wherever the engine does."""
    unsupported: str | None = None
    """Why this version has none."""
    note: str | None = None
    """What must be known, as a sentence."""


class Launch(NamedTuple):
    """The key `launch` of an engine's file."""

    documentation: Documentation
    command: tuple[str, ...]
    flags: dict[str, str | None]
    """Meaning of each flag; none = not in this version."""
    arguments: dict[str, tuple[str, ...]]
    """By what they say, in the order in which they are printed. Those of a degree are left out where it is 1, any where
    a placeholder has no value; an empty list = this version has no such flag."""
    weights: dict[str, Loading]
    """By dtype; others cannot be loaded."""
    kv_cache: dict[str, str]
    """The engine's word by dtype; others it does not have."""
    kv_cache_with: dict[str, tuple[str, ...]] = {}
    """By dtype of the KV cache: dtypes of weights that it needs, where it does not go with all."""
    platforms: dict[str, dict[str, tuple[str, ...]]] = {}
    """What it runs on (a hardware file's `devices.platform`), each with the arguments that differ there; {} = all."""
    implied: tuple[str, ...] = ()
    """Degrees without a flag: the server takes all chips that it sees."""
    replicas: str | None = None
    """How several replicas run, as a sentence; none = there is one only."""
    router: tuple[str, ...] = ()
    """The command that hands requests to several servers, where the engine brings one."""
    memory: Literal["chip", "free"] = "chip"
    """What the memory fraction is a share of: the whole chip, or what is free for KV once all else is loaded."""
    files: dict[str, dict[str, Any]] = {}
    """A file that the server reads: content by suffix of its name, as `.yaml`; `{file}` is its name."""
    speculation: dict[str, Speculator] = {}
    """By kind of draft: mtp, ngram, model; others it does not have."""
    nodes: Nodes | None = None
    """none = a replica cannot span nodes."""
    port: Count = 8000
    notes: tuple[str, ...] = ()

    def on(self, platform: str) -> Launch | None:
        """The same with the arguments of a platform; none where it does not run there."""
        if self.platforms and platform not in self.platforms:
            return None
        return self._replace(arguments={**self.arguments, **self.platforms.get(platform, {})})

    def contradictions(self) -> Iterator[tuple[str, str]]:
        """(key path, sentence) of words that stand for nothing, flags that no list has, dtypes that there are not."""
        for key, word in self._words():
            yield from ((key, f"found {problem}") for problem in self._problems(word))
        for key, dtypes in {"weights": WEIGHTS, "kv_cache": KV_CACHE, "kv_cache_with": KV_CACHE}.items():
            for dtype in getattr(self, key):
                if dtype not in dtypes:
                    yield f"{key}.{dtype}", f"unknown dtype; expected one of {', '.join(dtypes)}"
        for index, name in enumerate(self.implied):
            if name not in DIMENSIONS:
                yield f"implied.{index}", f"found {name!r}, expected one of {', '.join(DIMENSIONS)}"
        for kind in self.speculation:
            if kind not in KINDS:
                yield f"speculation.{kind}", f"unknown kind of draft; expected one of {', '.join(KINDS)}"
        if not self.command:
            yield "command", "is empty, expected the words of a command"

    def _words(self) -> Iterator[tuple[str, str]]:
        """(key path, word) of everything that becomes part of a command or a file."""
        lists: dict[str, Iterable[str]] = {"command": self.command, "router": self.router}
        lists |= {f"arguments.{name}": words for name, words in self.arguments.items()}
        lists |= {f"weights.{name}.words": loading.words for name, loading in self.weights.items()}
        for platform, own in self.platforms.items():
            lists |= {f"platforms.{platform}.{name}": words for name, words in own.items()}
        lists |= {f"speculation.{kind}.words": one.words for kind, one in self.speculation.items()}
        if self.nodes is not None:
            parts = ("arguments", "others", "prefix", "first", "rest")
            lists |= {f"nodes.{name}": getattr(self.nodes, name) for name in parts}
        for key, words in lists.items():
            yield from ((f"{key}.{index}", word) for index, word in enumerate(words))
        for name, content in self.files.items():
            yield from ((f"files.{name}.{key}", text) for key, text in _texts(content))
        for kind, one in self.speculation.items():
            yield from ((f"speculation.{kind}.content.{key}", text) for key, text in _texts(one.content))

    def _problems(self, word: str) -> Iterator[str]:
        for name in _PLACEHOLDER.findall(word):
            if name not in PLACEHOLDERS:
                yield f"{{{name}}}, expected one of {', '.join(PLACEHOLDERS)}"
        flag = flag_of(word)
        if flag is not None and self.flags.get(flag) is None:
            yield f"the flag {flag}, which `flags` does not list"


def flag_of(word: str) -> str | None:
    """The flag of a word of a command, `--mpi` of `--mpi=pmix`; none where it is no flag."""
    return word.partition("=")[0] if word.startswith("-") and len(word) > 1 else None


def filled(word: str, values: dict[str, Any]) -> Any:
    """A word with its placeholders replaced; one that is a placeholder and nothing else keeps the value's type.

    Returns:
        None where a value is missing.
    """
    names = _PLACEHOLDER.findall(word)
    if any(values.get(name) is None for name in names):
        return None
    if len(names) == 1 and word == f"{{{names[0]}}}":
        return values[names[0]]
    return _PLACEHOLDER.sub(lambda match: str(values[match[1]]), word)


def _texts(content: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """(key path, text) of the texts in the content of a file."""
    if isinstance(content, dict):
        for key, value in content.items():
            yield from _texts(value, f"{path}.{key}" if path else str(key))
    elif isinstance(content, str):
        yield path, content
