"""Which attention successive layers have: what a config.json says in lists, intervals and switches."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from planner.specs.huggingface.config import Config, brief, key


class Pattern(NamedTuple):
    """Which attention successive layers have."""

    other: Literal["window", "linear"] = "window"
    """What a layer has that does not see everything."""
    size: str | None = None
    """The key of the window's tokens; null is none."""
    optional: bool = False
    """Without that key there is no window; else it must be there, the library's default would be some other model's."""
    enabled: str | None = None
    """The key of a switch without which the window is none."""
    unit: tuple[str, ...] = ("full",)
    """Successive layers, repeated, where no key says otherwise."""
    interval: tuple[tuple[str, ...], int] | None = None
    """(names of the key, default) of n where every n-th layer is full."""
    after: str | None = None
    """The key of the number of full layers before those with a window."""
    lists: tuple[str, ...] = ("layer_types",)
    """Keys of lists with an entry a layer."""
    blocks: bool = False
    """Whether windows are blocks that do not slide."""


_ENTRIES: dict[str, dict[Any, str]] = {
    "layer_types": {
        "full_attention": "full",
        "sliding_attention": "window",
        "chunked_attention": "window",
        "linear_attention": "linear",
    },
    "no_rope_layers": {1: "window", 0: "full"},  # Llama 4: layers without rope see the whole context
    "attn_type_list": {1: "full"},  # MiniMax: 0 is lightning attention, of which M2 has none
}


def attention_pattern(config: Config, rule: Pattern, layers: int, max_context: int) -> tuple[list[str], int | None]:
    """(attention of successive layers, shortest form; tokens of the window or None).

    Args:
        config: the file.
        rule: the architecture's.
        layers: how many there are.
        max_context: tokens; a window of at least as many never cuts anything, and is none.

    Raises:
        SpecError: a list of another length or with an entry that is not understood, or two that contradict each other.
    """
    enabled = rule.enabled is None or bool(config.flag(rule.enabled))
    window = config.count(rule.size) if rule.size else None
    if rule.size and enabled and not rule.optional and rule.size not in config.raw:
        raise config.refusal(rule.size, "missing; expected the tokens that a layer with a window sees, or null")
    if not enabled or (window or 0) >= max_context:
        window = None
    for name in rule.interval[0] if rule.interval else ():
        config.count(name)  # where a list says the same at length, it decides
    found = _listed(config, rule, layers)
    if found is None:
        found = _by_rule(config, rule, layers, window is not None)
    elif "window" in found and rule.size is None:
        raise config.refusal(rule.lists[0], "names layers with a window, which this architecture has no size for")
    elif "window" in found and enabled and config.count(rule.size or "") is None:
        raise config.refusal(rule.size or "", "missing, but layers with a window are listed")
    if window is None:
        found = ["full" if kind == "window" else kind for kind in found]
    return shortest(found), window if "window" in found else None


def _listed(config: Config, rule: Pattern, layers: int) -> list[str] | None:
    """The attention of every layer as a list of the file says it; None where there is no such list."""
    found = None
    for name in rule.lists:
        listed, known = config.listing(name), _ENTRIES[name]
        if listed is None:
            continue
        if len(listed) != layers:
            raise config.refusal(name, f"has {len(listed)} entries, expected one for each of {layers} layers")
        for entry in listed:
            if not isinstance(entry, str | int) or known.get(entry) not in ("full", rule.other):
                expected = ", ".join(str(word) for word, kind in known.items() if kind in ("full", rule.other))
                raise config.refusal(name, f"has an entry {brief(entry)}; understood here are {expected}")
        kinds = [known[entry] for entry in listed]
        if found not in (None, kinds):
            raise config.refusal(name, f"contradicts {rule.lists[0]}")
        found = kinds
    return found


def _by_rule(config: Config, rule: Pattern, layers: int, windows: bool) -> list[str]:
    if rule.interval is not None:
        names, default = rule.interval
        interval = min(int(key(*names, default=default).of(config)[0]), layers + 1)
        return ([rule.other] * (interval - 1) + ["full"])[:layers]
    if rule.after is not None:
        if not windows:  # no need to know where they would begin
            return ["full"]
        whole = min(config.needed(rule.after, least=0), layers)
        return ["full"] * whole + ["window"] * (layers - whole)
    return list(rule.unit)


def shortest(kinds: list[str]) -> list[str]:
    """The shortest list that, repeated, begins with this one."""
    return next(kinds[:n] for n in range(1, len(kinds) + 1) if all(k == kinds[i % n] for i, k in enumerate(kinds)))
