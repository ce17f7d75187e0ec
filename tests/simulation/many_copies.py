"""Groups of more than two copies: the row names several slaves, and copies promise before one is chosen.

Any of them dies, any two are cut from each other. Disks keep what they fsynced here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from qmq.errors import OperatorError
from qmq.metaserver.model import Group
from qmq.replication.assignment import Address, Assignment
from qmq.replication.points import Point
from qmq.types import Role
from tests.simulation.events import Violation
from tests.simulation.nemesis import FAULTS, Nemesis
from tests.simulation.registry import GROUP, META, Metaserver

if TYPE_CHECKING:
    from qmq.metaserver.model import ReplicaState
    from tests.simulation.machine import Process
    from tests.simulation.world import World

LOOKS_BEFORE_ROW_IS_RAISED = 5
"""A promise that came to nothing keeps a copy from following the master; the row gets its term then."""


class ManyCopies(Metaserver):
    """The metaserver of a group of more than two copies."""

    def __init__(self, world: World, names: list[str], min_copies: int) -> None:
        super().__init__(world, names[0], names[1])
        self._names, self._min_copies = names, min_copies
        self._promised_looks = 0
        self.is_in_peace = False
        self._lives: dict[str, Process] = {}
        """Who has registered: only such a process is told of the row."""

    # Brokers.

    def assignment(self, name: str) -> Assignment | None:
        assert self.group.master is not None
        master = self.group.master.hostname
        slaves = tuple(_place(slave) for slave in self._names if slave != master)
        role = Role.MASTER if name == master else Role.SLAVE
        return Assignment(
            GROUP, self.group.term, role, _place(master), slaves, tuple(sorted(self.marks)), (), self._min_copies
        )

    def _register(self, name: str, incarnation: str) -> bool:
        process = self._world.machine(name).process
        assert process is not None and self.group.master is not None, "it is alive"
        if self._lives.get(name) is process:
            return True
        if name == self.group.master.hostname:  # as metaserver.renewals
            if not self._elect(name, before=self.group.term, after=self._next_term()):
                return False
            self._events.count("master began a new life")
        self._lives[name] = process
        return True

    def push(self, process: Process) -> None:
        if self._lives.get(process.name) is process:
            super().push(process)

    def _note(self, name: str, state: ReplicaState) -> None:
        self._said[name] = state

    def _tell(self, process: Process, points: list[Point]) -> None:
        part = self.assignment(process.name)
        process.node.remembered_elsewhere(points, may_be_behind=part is not None and part.may_be_behind)

    # Changes.

    def _elect(self, name: str, *, before: int, after: int) -> bool:
        """Compare and set."""
        if not self.is_up or before != self.group.term:
            return False
        assert self.group.master is not None
        self._group_before = self.group
        self.group = Group(GROUP, after, replace(self.group.master, hostname=name, ip=name), None, 0)
        if self._masters.setdefault(after, name) != name:
            raise Violation(f"I13: two masters in term {after}")
        self._events.note(f"row term={after} master={name}")
        self.push_all()
        return True

    def _next_term(self) -> int:
        promised = [machine.process.node.identity.value.promised for machine in self._up()]
        return max(self.group.term, *promised, 0) + 1

    def _up(self) -> list[Any]:
        return [machine for machine in self._world.machines if self._reach(machine.name) is not None]

    def look(self) -> None:
        """Now and then: is the master gone, and was something promised that came to nothing?"""
        self._events.between(20, 200, self.look)
        assert self.group.master is not None
        if not self.is_up:
            return
        self._raise_row()
        is_taken_for_gone = not self.is_in_peace and self._events.chance(0.03)
        if self._reach(self.group.master.hostname) is None or is_taken_for_gone:
            self._ask_for_promises()

    def _raise_row(self) -> None:
        promised = self._next_term() - 1
        self._promised_looks = self._promised_looks + 1 if promised > self.group.term else 0
        if self._promised_looks > LOOKS_BEFORE_ROW_IS_RAISED:
            assert self.group.master is not None
            self._elect(self.group.master.hostname, before=self.group.term, after=promised)
            self._events.count("row raised")

    def _ask_for_promises(self) -> None:
        """Each slave promises at its own time; the best of enough is chosen, some time later."""
        group, events, term = self.group, self._events, self._next_term()
        assert group.master is not None
        slaves = [name for name in self._names if name != group.master.hostname]
        said: list[tuple[tuple[Any, int], str]] = []
        hold_ms = events.rng.choice((50, 500, 3000))

        def ask(name: str) -> None:
            process = self._reach(name)
            if process is None or not self.is_up:
                return
            node = process.node
            try:
                process.guarded(
                    lambda: node.prepare_failover(
                        group.term, hold_ms=hold_ms, silent_ms=1500, heard_ms_ago=None, promised_term=term
                    )
                )
            except OperatorError:
                return events.count("no promise")
            answer(process, name)

        def answer(process: Process, name: str) -> None:
            """Once all that it has is fsynced."""
            if not process.is_alive:
                return
            if not process.log.is_idle:
                return events.between(1, 5, lambda: answer(process, name))
            events.count("promised")
            said.append(((process.log.state.epoch, process.log.end), name))

        def choose() -> None:
            if len(said) < len(self._names) - self._min_copies + 1 or group != self.group or not self.is_up:
                return events.count("no failover: too few promise")
            best = max(said)[1]
            chosen = self._reach(best)
            if chosen is not None:
                self._world.oracle.chosen(chosen.log)
            if self._elect(best, before=group.term, after=term):
                events.count("failed over")

        for name in slaves:
            events.between(0, 20, lambda name=name: ask(name))  # type: ignore[misc]
        events.between(20, events.rng.choice((40, 2000)), choose)

    def replace(self, role: Role, *, accept_loss: bool = False) -> None:
        """Nobody exchanges roles by hand."""

    def swap(self) -> None:
        """SwapRoles with any slave, step by step; it may end after each of them."""
        group, events, life = self.group, self._events, self.life
        assert group.master is not None
        hold_ms, master = events.rng.choice((50, 300, 2000)), group.master.hostname
        slave = events.rng.choice([name for name in self._names if name != master])
        target = ""
        deadline_ms = events.now_ms + 2 * hold_ms

        def goes_on() -> bool:
            return self.is_up and self.life == life and not events.chance(0.05)

        def prepare() -> None:
            process, other = self._reach(master), self._reach(slave)
            if process is None or other is None or not goes_on():
                return
            nonlocal target
            target = other.node.identity.value.incarnation
            try:
                process.guarded(lambda: process.node.prepare_swap(group.term, hold_ms, target=target))
            except OperatorError:
                return
            events.count("swap prepared")
            events.between(0, 20, drained)

        def drained() -> None:
            process = self._reach(master)
            if process is None or not goes_on() or events.now_ms > deadline_ms:
                return
            if process.node.master is None or not process.node.master.is_drained_to(target):
                return events.between(5, 20, drained)
            term = self._next_term()
            process.guarded(lambda: process.node.promise_swap(term, target=target))
            events.between(0, 80, lambda: exchange(term))

        def exchange(term: int) -> None:
            if goes_on() and self._elect(slave, before=group.term, after=term):
                events.count("swapped")

        events.between(0, 20, prepare)

    # Peace.

    def look_after(self) -> None:
        """A slave that keeps what the master's log has no place for gets an empty disk: the row's master has all that
        was acknowledged."""
        self.is_in_peace = True
        assert self.group.master is not None
        master = self._world.machine(self.group.master.hostname).process
        if master is None or master.node.master is None or not master.node.master.has_begun:
            return
        for machine in self._world.machines:
            process = machine.process
            if process is not None and process.node.slave is not None and process.node._is_diverged:
                self._events.count("copy apart")
                machine.die("its disk is replaced", power=True)
                machine.disk.wipe()
                return


class ManyNemesis(Nemesis):
    """Strikes any copy, and between any two."""

    def faults(self) -> dict[str, Callable[[Any], bool]]:
        names = [name for name in FAULTS if name not in _NOT_HERE]
        return {name: getattr(type(self), name) for name in (*names, "cut_off_master")}

    def _two(self) -> tuple[str, str]:
        one, other = self._rng.sample([machine.name for machine in self._world.machines], 2)
        return one, other

    def cut(self) -> bool:
        return self._cut_between(*self._two(), both_ways=True)

    def cut_one_way(self) -> bool:
        return self._cut_between(*self._two(), both_ways=False)

    def failover(self) -> bool:
        """The master dies."""
        group = self._world.metaserver.group
        assert group.master is not None
        self._world.machine(group.master.hostname).die("failover", power=self._rng.random() < 0.5)
        return True

    def cut_off_master(self) -> bool:
        """The master loses its way to the metaserver and to all slaves but one, and that one loses its own a bit later,
        when it may have promised to follow nobody."""
        group = self._world.metaserver.group
        assert group.master is not None
        name = group.master.hostname
        others = [machine.name for machine in self._world.machines if machine.name != name]
        self._rng.shuffle(others)
        for other in (META, *others[1:]):
            self._cut_between(name, other, both_ways=True)
        self._events.between(20, 400, lambda: self._cut_off(others[0], (META, *others[1:])))
        return True

    def _cut_off(self, name: str, others: tuple[str, ...]) -> None:
        for other in others:
            self._cut_between(name, other, both_ways=True)


_NOT_HERE = {
    "replace",
    "flip",
    "flip_while_down",
    "rotten_tail",
    "wipe",
    "back_up",
    "put_back",
    "forgets_last_write",
}


def _place(name: str) -> Address:
    return Address(name, 1, 2, 0)
