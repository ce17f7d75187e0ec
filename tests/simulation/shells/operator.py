"""Operator that follows Doctor's remedies after all faults (I20)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from qmq.rights import Caller, TokenRole
from qmq.tools.recover_group import Decision, decide, read_copies
from tests.simulation.cores.operator import set_aside

if TYPE_CHECKING:
    from tests.simulation.shells.machines import MetaserverMachine
    from tests.simulation.shells.world import World

OPERATOR = Caller("operator", TokenRole.CLUSTER)
PATIENCE_S = 15.0
"""Time in which most troubles end by themselves."""
LOOK_S = 5.0
_COMMAND = re.compile(r"(?:tools\.sh |qmq |: )?(\b[A-Z]\w+)((?: --\w+(?:=[^ ;,)]+)?)+)")


class Operator:
    """Made per world, when its peace begins."""

    def __init__(self, world: World) -> None:
        self._world = world
        world.loop.at(world.loop.now_s + PATIENCE_S, self._look)

    def _look(self) -> None:
        self._world.loop.at(self._world.loop.now_s + LOOK_S, self._look)
        for machine in self._world.metaservers:
            if machine.is_running and machine.is_serving.is_set() and machine.process is not None:
                machine.process.start(self._care(machine))
                return

    async def _care(self, machine: MetaserverMachine) -> None:
        """Run the first command of each finding."""
        for check in (await self._run(machine, "Doctor", {})).data["checks"]:
            if not check["ok"]:
                self._world.note(f"Doctor: {check['name']}: {check['found']} | {check['remedy']}")
                if "RecoverGroup" in check["remedy"] and "reasons" in check["facts"]:  # all its copies return
                    await self._recover(machine, check["facts"]["group"])
                if found := _COMMAND.search(check["remedy"].partition("if it is gone for good")[0]):
                    action, words = found.group(1), dict(map(_word, found.group(2).split()))
                    answer = await self._run(machine, action, words)
                    self._world.note(f"{action} {words}: {answer.status.name}: {str(answer)[:300]}")
                    self._world.counts[f"Doctor's {action} {answer.status.name}"] += 1

    async def _recover(self, machine: MetaserverMachine, group: str) -> None:
        """Replace the disk of a slave that RecoverGroup sets aside: it confirmed frames that the master's log lacks.

        The only slave of a group always returns to its master; there, no disk is replaced.
        """
        if len(self._world.groups[group]) > 2:
            decision = await self._decide(machine, group)
            for name in set_aside(decision) if decision else ():
                self._world.note(f"RecoverGroup sets aside {name}")
                self._world.counts["copy set aside"] += 1
                self._world.copy(name).replace_disk()

    async def _decide(self, machine: MetaserverMachine, group: str) -> Decision | None:
        brokers = (await self._run(machine, "ListBrokers", {"brokerGroup": group, "details": "true"})).data
        (row,) = (await self._run(machine, "ReplicaStatus", {"brokerGroup": group})).data
        if row["acknowledged"] is None:
            return None  # the database is away
        copies = read_copies(brokers, row["replicas"], (), ())
        return decide(copies, term=row["term"], min_copies=row["minCopies"], remembered=row["acknowledged"])

    async def _run(self, machine: MetaserverMachine, action: str, words: dict[str, str]) -> Any:
        return await machine.metaserver._actions.run(action, words, OPERATOR)


def _word(text: str) -> tuple[str, str]:
    name, _, value = text.removeprefix("--").partition("=")
    return name, value or "true"
