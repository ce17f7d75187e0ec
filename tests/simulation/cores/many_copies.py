"""Groups of more than two copies: the row names several slaves, and copies promise before one of them is chosen.

Any copy fails, and any two are cut off from each other; one loses fsynced bytes, is damaged or replaced.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from qmq.errors import OperatorError
from qmq.metaserver.model import Broker, BrokerKey, Directory, Group, Points, ReplicaState
from qmq.metaserver.roles import promotion, rules
from qmq.metaserver.roles.promotion import Facts
from qmq.metaserver.roles.rules import RoleChange
from qmq.metaserver.storage.changes import RememberPoint
from qmq.types import Role
from tests.simulation.cores.metaserver import GROUP, META, Metaserver, full_state, new_broker
from tests.simulation.cores.nemesis import CoreNemesis
from tests.simulation.cores.operator import Recovery
from tests.simulation.nemesis import fault, faults_of

if TYPE_CHECKING:
    from tests.simulation.cores.machine import Process
    from tests.simulation.cores.world import World

LOOKS_BEFORE_ROW_IS_RAISED = 5
"""Looks before the row is raised to a promised term: such a promise keeps a copy from following its master."""


class ManyCopies(Metaserver):
    """Metaserver of a group of more than two copies."""

    def __init__(self, world: World, names: list[str], min_copies: int) -> None:
        super().__init__(world, names[0], names[1])
        slaves = tuple(new_broker(name, Role.SLAVE) for name in names[1:])
        self.group = replace(self.group, slaves=slaves, min_copies=min_copies)
        self._group_before = self.group
        self._promised_looks = 0
        self.choices = 0
        """Failovers and swaps under way."""
        self.is_in_peace = False
        self._lives: dict[str, Process] = {}
        """Registered processes; only these receive assignments."""
        self._recovery = Recovery(world, self)

    def _register(self, process: Process) -> bool:
        name = process.name
        if not super()._register(process):
            return False
        if self._lives.get(name) is process:
            return True
        if rules.needs_new_term(self.group, BrokerKey(name, 1)):
            if not self.change(rules.renew(self.group, above=self._floor())):
                return False
            self._events.count("master began a new life")
        self._lives[name] = process
        return True

    def push(self, process: Process) -> None:
        if self._lives.get(process.name) is process:
            super().push(process)

    def _deliver_points(self, process: Process, known: Points) -> None:
        part = self.assignment(process.name)
        process.node.remembered_elsewhere(
            known.by_incarnation.values(),
            loss_accepted_term=known.loss_accepted_term,
            may_be_behind=part is not None and part.may_be_behind,
        )

    def may_forget(self, name: str) -> bool:
        """Whether this machine's disk may lose fsynced bytes now.

        Not between a promise and the choice that rests on it (decision 43). The master's only if the row has the
        acknowledged point, or a slave with all of it is awaited.
        """
        known = max((point.end for point in self.points.values()), default=0)
        is_master = self.group.master.hostname == name
        is_kept = not is_master or known >= self._world.oracle.committed.end or self._is_one_waited_for()
        return not self.choices and is_kept

    def _is_one_waited_for(self) -> bool:
        return any(self._world.holds_all(self._world.machine(slave.hostname)) for slave in rules.awaited(self.group))

    def _floor(self) -> int:
        """Return the newest term that was given out, or that a reachable copy promised."""
        return max(self.group.term, self._promised())

    def _promised(self) -> int:
        up = [self._reach(machine.name) for machine in self._world.machines]
        return max((process.node.identity.value.promised for process in up if process is not None), default=0)

    def _choose(self, change: RoleChange, group: Group, chosen: Broker, report: ReplicaState) -> bool:
        """Make a slave the master, and remember the report that the choice rests on."""
        if not self.change(change):
            return False
        for stored in promotion.changes_of(change, group, chosen, report):
            if isinstance(stored, RememberPoint):
                known = self.points.get(stored.incarnation)
                self.points[stored.incarnation] = stored.point if known is None else max(known, stored.point)
        return True

    def look(self) -> None:
        """Look whether the master is gone, and whether a promise led to no choice."""
        self._events.between(20, 200, self.look)
        if not self.is_up:
            return
        master = self._reach(self.group.master.hostname)
        is_gone = master is None
        if master is not None and self._lives.get(master.name) is master:
            self._note(master.name, full_state(master))  # a change of the copies in sync is reported at once
        self._raise_row(is_gone)
        is_taken_for_gone = not self.is_in_peace and self._events.chance(0.03)
        if is_gone or is_taken_for_gone:
            self._fail_over(self.group)

    def _raise_row(self, is_gone: bool) -> None:
        promised = self._promised()
        self._promised_looks = self._promised_looks + 1 if promised > self.group.term and not is_gone else 0
        if self._promised_looks > LOOKS_BEFORE_ROW_IS_RAISED:
            self._promised_looks = 0
            if self.change(rules.renew(self.group, above=promised - 1)):
                self._events.count("row raised")

    def _fail_over(self, group: Group) -> None:
        """Let each slave promise at its own time, then choose the best of enough."""
        events, facts = self._events, self._facts(group)
        if facts is None:
            return
        if refused := promotion.refusal(facts):
            return events.count(f"no failover: {refused[0].value}")
        promised: dict[BrokerKey, ReplicaState] = {}
        hold_ms = events.rng.choice((50, 500, 3000))

        def ask(slave: Broker) -> None:
            process = self._reach(slave.hostname)
            if process is None or not self.is_up:
                return
            node, term = process.node, facts.new_term
            try:
                process.guarded(
                    lambda: node.changes.prepare_failover(
                        group.term, hold_ms=hold_ms, silent_ms=1500, packet_age_ms=None, promised_term=term
                    )
                )
            except OperatorError:
                return events.count("no promise")
            answer(process, slave)

        def answer(process: Process, slave: Broker) -> None:
            """Take its report once all of its log is fsynced."""
            if not process.is_alive:
                return
            if not process.log.is_idle:
                return events.between(1, 5, lambda: answer(process, slave))
            state = full_state(process)
            if state.promised_term >= facts.new_term:
                events.count("promised")
                promised[slave.key] = state

        def choose() -> None:
            self.choices -= 1
            self._choose_among(replace(facts, slave_states=promised))

        self.choices += 1
        for slave in facts.eligible:
            events.between(0, 20, lambda slave=slave: ask(slave))
        events.between(20, events.rng.choice((40, 2000)), choose)

    def _choose_among(self, facts: Facts) -> None:
        """Choose among the copies that promised."""
        if not self.is_up or facts.group.term != self.group.term:
            return self._events.count("no failover: it is too late")
        if refused := promotion.refusal(facts):
            return self._events.count(f"no failover: {refused[0].value}")
        best, best_state = facts.best, facts.best_state
        chosen = self._reach(best.hostname)
        if chosen is not None:
            self._world.oracle.chosen(chosen.log)
        if self._choose(promotion.choose(facts), facts.group, best, best_state):
            self._events.count("failed over")

    def replace(self, role: Role, *, accept_loss: bool = False) -> None:
        """Do not change roles by hand."""

    def accept_loss(self, kept: str) -> None:
        """Run ReplaceBroker with `acceptLoss`: this stopped broker continues as the master."""
        (broker,) = (broker for broker in self.group.brokers if broker.hostname == kept)
        row, wanted = Directory({GROUP: self.group}), replace(broker, role=Role.MASTER)
        change, _ = rules.replace_broker(
            row, wanted, lambda broker: self._reach(broker.hostname) is not None, accept_loss=True
        )
        if change is not None and self.change(replace(change, above=self._floor())):
            self.loss_accepted_term = self.group.term
            self.group = replace(self.group, lost_term=self.group.term)
            self._events.count("loss accepted")

    def swap(self) -> None:
        """Swap with any slave, step by step; the swap may end after each step."""
        group, events, life = self.group, self._events, self.life
        hold_ms, slave = events.rng.choice((50, 300, 2000)), events.rng.choice(group.slaves)

        def drained(process: Process) -> None:
            term = self._floor() + 1
            process.guarded(lambda: process.node.changes.promise_swap(term, target=slave.incarnation))
            if process.is_alive:
                at_end = full_state(process)
                events.between(0, 80, lambda: exchange(term, at_end))
            else:
                ended()

        def exchange(term: int, at_end: ReplicaState) -> None:
            process = self._reach(slave.hostname)
            ended()
            if process is None or not self._goes_on(life) or group.term != self.group.term:
                return
            try:
                rules.check_same_log(at_end, full_state(process))
                change = rules.swap_roles(self.group, term=group.term, to=slave.key)
            except OperatorError:
                return events.count("no swap: the logs differ")
            if self._choose(replace(change, above=term - 1), group, slave, at_end):
                events.count("swapped")

        def ended() -> None:
            self.choices -= 1

        self.choices += 1
        self._drain(group, hold_ms, slave.incarnation, drained, ended, refused=ended)

    def look_after(self) -> None:
        """Follow Doctor's remedies."""
        self.is_in_peace = True
        self._recovery.look()


class ManyNemesis(CoreNemesis):
    """Faults of any copy, and between any two."""

    def faults(self) -> dict[str, float]:
        return MANY_FAULTS

    def _two(self) -> tuple[str, str]:
        first, second = self._rng.sample([machine.name for machine in self._world.machines], 2)
        return first, second

    def power_everywhere(self) -> bool:
        """Cut the power everywhere; at times one disk lied for a while before."""
        if self._rng.random() < 0.5:
            return super().power_everywhere()
        system = self.victim.disk.system
        system.is_lying = True

        def power() -> None:
            self.victim.die("power everywhere, and its flushes were lies", power=True)
            system.is_lying = False
            CoreNemesis.power_everywhere(self)

        self._events.between(5, 300, power)
        return True

    def cut(self) -> bool:
        return self._cut_between(*self._two(), both_ways=True)

    def cut_one_way(self) -> bool:
        return self._cut_between(*self._two(), both_ways=False)

    def failover(self) -> bool:
        """Kill the master."""
        group = self._world.metaserver.group
        self._world.machine(group.master.hostname).die("failover", power=self._rng.random() < 0.5)
        return True

    @fault()
    def cut_off_master(self) -> bool:
        """Cut the master off from the metaserver and all slaves but one, and later that slave from the others.

        By then, that slave may have promised to follow no master.
        """
        group = self._world.metaserver.group
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


MANY_FAULTS = {name: weight for name, weight in faults_of(ManyNemesis).items() if name != "replace"}
