"""The devices and links of a machine, from its hardware file: who sends over what, and what tasks take there.

A link is a device of its own, on which transfers wait for one another (FlexFlow, section 5.1). Inside the innermost
domain of a switch or torus every chip has a port to send from; in a mesh every pair has a wire; between domains each
chip has its network card, or several share one where a node has fewer cards than chips. Transfers wait for the
sender's link, not for the receiver's.

The assumptions of the simulator, as FlexFlow states them (section 5):

* A1: a task takes the same time whatever its data are. Ours are priced by the cost engine (`costs.roofline`,
  `costs.collectives`) with the hardware's measured constants, once per (type, degrees).
* A2: s bytes over a link take a latency and s / bandwidth.
* A3: a device runs the tasks that are its own one after the other, in the order in which they become ready.
* A4: the runtime costs nothing: the engine's host time is left out.

Beside them, collectives run as the engine's kernels do, one task for a group; those of different groups, and
transfers, do not wait for each other's wires. On a torus a group is priced as the best box of so many chips, wherever
its members stand.
"""

from __future__ import annotations

from collections import Counter

from planner.costs.collectives import Network
from planner.costs.roofline import price_operation
from planner.costs.teams import Team
from planner.errors import InputError
from planner.opgraph.graph import Degrees, Graph
from planner.plans.placement import Placement
from planner.specs.engine import Engine
from planner.specs.hardware import Hardware


class Machine:
    """So many chips of one kind, and what their network says of each pair.

    Args:
        hardware: chip, network and constants.
        engine: whose collectives run.
        gpus: chips; on a torus those of a slice.

    Raises:
        NoPlanError, InputError: as `Placement.of`.
    """

    def __init__(self, hardware: Hardware, engine: Engine, gpus: int) -> None:
        self.hardware, self.engine = hardware, engine
        self.placement = Placement.of(hardware, gpus)
        self.devices = self.placement.usable
        self.network = Network(self.placement, engine)
        self.lanes: list[str] = [f"chip {device}" for device in range(self.devices)]
        """Names of all that tasks wait for: the chips first, then links and groups as they come up."""
        self._lane: dict[tuple[object, ...], int] = {}
        self._sends: dict[tuple[int, float], float] = {}
        self._collectives: dict[tuple[str, tuple[int, ...], float], float] = {}
        self._pairs: dict[tuple[int, int], tuple[int, int]] = {}

    def level(self, first: int, second: int) -> int:
        """The innermost network level that joins two chips."""
        for index, level in enumerate(self.hardware.network[:-1]):
            if level.chips is not None and first // level.chips == second // level.chips:
                return index
        return len(self.hardware.network) - 1

    def _route(self, source: int, target: int) -> tuple[int, int]:
        """(level, lane) of the link that a chip sends over to another one."""
        level = self.level(source, target)
        network = self.hardware.network
        if level == 0:
            if network[0].kind == "mesh":
                return 0, self._named((0, source, target), f"wire {source}-{target}")
            return 0, self._named((0, source), f"{network[0].name} of {source}")
        below = network[level - 1].chips or 1
        cards = network[level].nics_per_node
        if cards is not None and cards < below:
            node, place = divmod(source, below)
            card = place * cards // below
            return level, self._named((level, node, card), f"{network[level].name} of {node}.{card}")
        return level, self._named((level, source), f"{network[level].name} of {source}")

    def _named(self, key: tuple[object, ...], name: str) -> int:
        if key not in self._lane:
            self._lane[key] = len(self.lanes)
            self.lanes.append(name)
        return self._lane[key]

    def transfer(self, source: int, target: int, size: float) -> tuple[int, float]:
        """(lane, seconds) of sending bytes from one chip to another; a shared card gives all of itself to one."""
        pair = self._pairs.get((source, target))
        if pair is None:
            pair = self._pairs[source, target] = self._route(source, target)
        level, lane = pair
        seconds = self._sends.get((level, size))
        if seconds is None:
            sent = size
            if level:
                cards = self.hardware.network[level].nics_per_node
                sent *= min(1.0, 1.0 if cards is None else cards / (self.hardware.network[level - 1].chips or 1))
            seconds = self._sends[level, size] = float(self.network.send(sent, level)[0])
        return lane, seconds

    def collective(self, op: str, devices: tuple[int, ...], size: float) -> tuple[int, float]:
        """(lane, seconds) of a collective of `size` bytes (see `costs.collectives.sent_bytes`) over some chips.

        A group whose members do not fill the domains that it touches is priced as one over nodes of so many chips as
        it has in the domain with the fewest.

        Raises:
            InputError: the engine has no kernel for it, or on a torus chips that form no box.
        """
        members = tuple(sorted(set(devices)))
        lane = self._named(("group", members), f"group {_spans(members)}")
        if len(members) == 1:
            return lane, 0.0
        key = (op, members, size)
        if key not in self._collectives:
            self._collectives[key] = self._priced(op, members, size)
        return lane, self._collectives[key]

    def _priced(self, op: str, members: tuple[int, ...], size: float) -> float:
        placement, domain = self.placement, self.hardware.domain
        if self.hardware.torus is not None and len(members) not in placement.torus_groups:
            raise InputError(f"collectives: {len(members)} chips form no box of the slice {placement.slice}")
        level = max((self.level(members[0], other) for other in members), default=0)
        network = self.network
        if level and domain:
            held = Counter(device // domain for device in members)
            fewest = min(held.values())
            if fewest < min(domain, len(members)):
                inner = self.hardware.network
                share = fewest / domain
                cards = inner[1].nics_per_node
                levels = (
                    inner[0]._replace(chips=fewest),
                    inner[1]._replace(nics_per_node=None if cards is None else cards * share),  # type: ignore[arg-type]
                    *inner[2:],
                )
                network = Network(Placement(self.hardware._replace(network=levels), self.devices), self.engine)
        import numpy as np  # noqa: PLC0415

        return float(network._on_level(op, level, Team(len(members)), np.array([size]))[0])


def _spans(members: tuple[int, ...]) -> str:
    """`0-3` for neighbours, else `0,2,5`."""
    if members[-1] - members[0] + 1 == len(members) > 2:
        return f"{members[0]}-{members[-1]}"
    return ",".join(map(str, members))


class Prices:
    """What tasks of a graph take on a machine, each kind of task priced once."""

    def __init__(self, graph: Graph, machine: Machine) -> None:
        self.graph, self.machine = graph, machine
        self._tasks: dict[tuple[int, Degrees], float] = {}

    def task(self, operator: int, degrees: Degrees) -> float:
        """Seconds of one task of an operator that is split so."""
        key = (self.graph.types[operator], degrees)
        if key not in self._tasks:
            kernels = self.graph.operators[operator].work.operations(degrees)
            priced = (price_operation(self.machine.hardware, kernel).total for kernel in kernels)
            self._tasks[key] = sum(float(seconds) for seconds in priced)
        return self._tasks[key]
