"""Scenarios of `python -m tests.simulation`: how a seed runs, its faults, and the events that must occur."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tests.simulation.cores import nemesis, world
from tests.simulation.cores.clones import CLONE_FAULTS
from tests.simulation.cores.many_copies import MANY_FAULTS
from tests.simulation.delay import nemesis as delay_nemesis
from tests.simulation.delay import world as delay_world
from tests.simulation.metaserver import walk as metaserver
from tests.simulation.outcome import Outcome
from tests.simulation.shells import nemesis as shell_nemesis
from tests.simulation.shells import world as shell_world
from tests.simulation.states import STATES
from tests.simulation.steering import UNSTEERED, Steering

SEEDS = Path(__file__).parents[1] / "seeds"


class Scenario(NamedTuple):
    """One scenario, for the runner and the tests."""

    simulate: Callable[..., Outcome]
    faults: Iterable[str]
    must_occur: Sequence[str]
    states: Sequence[str] = STATES
    """States that each fault should meet; empty if the scenario does not observe states."""
    of_bugs: Mapping[str, Any] = {}
    """Arguments for searches of planted bugs, unless the bug has its own."""
    bug_seeds: int = 500
    """A planted bug is found within this number of seeds."""


def of_mix(seed: int, *, steering: Steering = UNSTEERED, **kinds: Any) -> Outcome:
    """Run two or three copies, as the steered fault needs or as the seed has it."""
    if steering.fault and steering.fault not in MANY_FAULTS:
        kinds |= {"copies": 2, "min_copies": 2}
    elif steering.fault and steering.fault not in nemesis.FAULTS:
        kinds |= {"copies": 3}
    elif "copies" not in kinds:
        kinds |= world.copies_of(seed)
    return world.simulate(seed, steering=steering, **kinds)


SCENARIOS = {
    "cores": Scenario(
        of_mix,
        (nemesis.FAULTS | MANY_FAULTS).keys(),
        (
            *nemesis.FAULTS,
            "batch acknowledged",
            "batch repeated",
            "crash in recovery",
            "crash within a commit",
            "damage found in recovery",
            "disk refused",
            "flow control",
            "given up",
            "half-open connection",
            "nacked",
            "pulled from a master alone",
            "recovery compared",
            "repaired",
            "role change",
            "segment dropped",
            "stale assignment",
            "start without metaserver",
            "swap prepared",
            "swapped",
            "torn tail",
            "unsubscribe",
        ),
        of_bugs={"copies": 2},
    ),
    "clones": Scenario(
        partial(world.simulate, clones=True, fails_over=True),
        CLONE_FAULTS,
        (
            *CLONE_FAULTS,
            "batch acknowledged",
            "began elsewhere",
            "copy refused",
            "failed over",
            "start without metaserver",
            "swapped",
        ),
        states=(),
    ),
    "delay": Scenario(
        delay_world.simulate,
        delay_nemesis.FAULTS,
        (
            *delay_nemesis.FAULTS,
            "batch acknowledged",
            "batch known",
            "crash in recovery",
            "crash within a commit",
            "disk refused",
            "message refused later",
            "outcome unknown",
            "role change",
            "schedule begins with its checkpoint",
            "schedule compared",
            "schedule made anew",
            "segment dropped",
            "sent by a master alone",
            "swapped",
            "answered: cancelled",
            "answered: rescheduled",
            "answered: sent",
        ),
        bug_seeds=40,
    ),
    "metaserver": Scenario(
        metaserver.simulate,
        metaserver.FAULTS,
        (
            "AddBroker DONE",
            "AddBroker REFUSED",
            "ReplaceBroker DONE",
            "ReplaceBroker REFUSED",
            "SwapRoles DONE",
            "SwapRoles REFUSED",
            "SwapRoles UNKNOWN",
            "RemoveBroker DONE",
            "MarkReadonlyBrokerGroup DONE",
            "RemoveSubjectBrokerGroup DONE",
            "ExtendSubjectRoute DONE",
            "DrainGroup DONE",
            "OnOffline DONE",
            "Failover DONE",
            "Failover REFUSED",
            "SetCopies DONE",
            "SwapRoles WAIT",
            "ReplaceBroker WAIT",
            "AdoptDatabase DONE",
            "SyncReplica DONE",
            "AcknowledgeLoss DONE",
        ),
        states=(),
        of_bugs={"faults": ""},
        bug_seeds=300,
    ),
    "shells": Scenario(
        shell_world.simulate,
        shell_nemesis.FAULTS,
        shell_nemesis.MUST_OCCUR,
        shell_world.STATES,
        of_bugs={"is_plain": True},
        bug_seeds=40,
    ),
}


class Kept(NamedTuple):
    """Seed that failed once."""

    seed: int
    steering: Steering
    found: str


def kept_seeds(scenario: str) -> list[Kept]:
    """Read `tests/seeds`: lines `SEED [FAULT[@STATE]]  finding`."""
    kept = []
    for line in (SEEDS / f"{scenario}.txt").read_text().splitlines():
        if not line.startswith("#"):
            name, found = line.split("  ", 1)
            seed, _, steering = name.partition(" ")
            kept.append(Kept(int(seed), Steering.parse(steering), found))
    return kept
