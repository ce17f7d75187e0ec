"""Metaserver of the cores' world: one row, changed by compare-and-set with the rules of `metaserver.roles.rules`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from qmq.errors import OperatorError
from qmq.metaserver.model import Broker, BrokerKey, Directory, Group, Points, ReplicaState
from qmq.metaserver.roles import promotion, rules
from qmq.metaserver.roles.promotion import Facts
from qmq.replication.assignment import Address, Assignment
from qmq.replication.identity import Point
from qmq.types import Role
from tests.simulation.events import Violation

if TYPE_CHECKING:
    from tests.simulation.cores.machine import Process
    from tests.simulation.cores.world import World

GROUP = "g"
META = "meta"


class Metaserver:
    """Row of the group, and its answers. An outage leaves calls unanswered and ends swaps halfway."""

    def __init__(self, world: World, master: str, slave: str) -> None:
        self._world = world
        self._events = world.events
        self.is_up = True
        self.life = 0
        self.points: dict[str, Point] = {}
        """Incarnation -> newest acknowledged point that its copy reported."""
        self.loss_accepted_term = 0
        """Term in which an operator accepted the loss of older points; 0: never."""
        self._unseen_disks: set[str] = set()
        self.master_is_refused = False
        """Whether the disk of a new master was replaced: an operator has to make the other broker the master."""
        self.marks: frozenset[str] = frozenset()
        self.fails_over = False
        """Whether it makes the slave the master by itself."""
        self._reports: dict[str, ReplicaState] = {}
        """Hostname -> its newest report."""
        self._masters: dict[int, str] = {1: master}
        self.group = Group(GROUP, 1, new_broker(master, Role.MASTER), (new_broker(slave, Role.SLAVE),), 0)
        self._group_before = self.group

    def poll(self, process: Process) -> None:
        """Take a broker's report and answer with the row, some time later or never."""
        network, events = self._world.network, self._events
        if not self.is_up or not network.is_through(process.name, META):
            return
        state = full_state(process) if self.fails_over else _state(process)
        incarnation = process.node.identity.value.incarnation

        def received() -> None:
            if not self.is_up or not network.is_through(process.name, META) or not process.is_alive:
                return
            if not self._register(process):
                return
            self._note(process.broker, state)
            if state.point is not None:
                known = self.points.get(incarnation)
                self.points[incarnation] = state.point if known is None else max(known, state.point)
            self._send_points(process)
            self.push(process)

        events.after(network.delay_ms(process.name, META), received)

    def _send_points(self, process: Process) -> None:
        """Answer a registration, which a broker repeats with each new stream."""
        known = self.known_points()

        def arrive() -> None:
            if process.is_alive:
                process.received_points = list(known.by_incarnation.values())
                process.guarded(lambda: self._deliver_points(process, known))

        self._events.after(self._world.network.delay_ms(META, process.name), arrive)

    def _deliver_points(self, process: Process, known: Points) -> None:
        points = known.by_incarnation.values()
        process.node.remembered_elsewhere(points, loss_accepted_term=known.loss_accepted_term)

    def known_points(self) -> Points:
        """Return the points without an accepted loss."""
        accepted = self.loss_accepted_term
        points = {name: point for name, point in self.points.items() if point.epoch.term >= accepted}
        return Points(points, accepted)

    def push(self, process: Process) -> None:
        """Send a broker its assignment: late, at times twice or of an old row."""
        network, events = self._world.network, self._events
        assignment, row = self.assignment(process.broker), self.broker(process.broker)
        if assignment is None or row is None or row.instance not in ("", process.node.identity.instance):
            return

        def arrive() -> None:
            if process.is_alive and network.is_through(META, process.name):
                process.assign(assignment)

        events.after(network.delay_ms(META, process.name), arrive)
        if events.chance(0.05):
            events.count("stale assignment")
            events.between(50, 4000, arrive)

    def push_all(self) -> None:
        for machine in self._world.machines:
            process = machine.process
            if process is not None and self._events.chance(0.8):
                self.push(process)

    def broker(self, name: str) -> Broker | None:
        return Directory({GROUP: self.group}).find(_key(name))

    def assignment(self, name: str) -> Assignment | None:
        if (broker := self.broker(name)) is None:
            return None
        group = self.group
        slaves = tuple(_address(slave) for slave in group.slaves)
        master = _address(group.master) if group.master else None
        marks = tuple(sorted(self.marks))
        awaited = tuple(str(slave.key) for slave in rules.awaited(group))
        return Assignment(GROUP, group.term, broker.role, master, slaves, marks, (), group.min_copies, awaited=awaited)

    def _register(self, process: Process) -> bool:
        name, identity = process.broker, process.node.identity
        known, incarnation = self.broker(name), identity.value.incarnation
        if known is None:
            return False
        registered = replace(known, ip=process.name, incarnation=incarnation, instance=identity.instance)
        is_elsewhere = rules.is_elsewhere(known, registered)
        if is_elsewhere and self._reach(name) is not None:
            self._refuse_copy(process)
            return False
        if known.role == Role.MASTER and rules.is_older(
            known, registered, identity.value.term, self._reports.get(name)
        ):
            self._events.count("older copy refused")
            return False
        if is_elsewhere:
            self._events.count("began elsewhere")
            return self.begin_elsewhere(registered)
        try:
            rules.check_registration(known, incarnation)
        except OperatorError:
            self._events.count("registration refused")
            self.master_is_refused = True
            return False
        self._unseen_disks.discard(name)
        if known != registered:
            self._put_member(replace(registered, complete=known.complete and known.incarnation == incarnation))
        return True

    def begin_elsewhere(self, registered: Broker) -> bool:
        return self.change(rules.begin_elsewhere(self.group, registered, above=self.group.term))

    def _refuse_copy(self, process: Process) -> None:
        """Reject a clone: another process serves in its place."""
        self._events.count("copy refused")

        def arrive() -> None:
            process.guarded(lambda: process.node.lose_part("another process has it"))

        self._events.after(self._world.network.delay_ms(META, process.name), arrive)

    def _put_member(self, broker: Broker) -> None:
        if broker.role == Role.MASTER:
            self.group = replace(self.group, master=broker)
        else:
            slaves = tuple(broker if slave.key == broker.key else slave for slave in self.group.slaves)
            self.group = replace(self.group, slaves=slaves)

    def _note(self, name: str, state: ReplicaState) -> None:
        self._reports[name] = state
        for slave in self.group.slaves:
            complete = rules.slave_complete(self.group, slave, _key(name), state)
            if complete is not None and slave.incarnation and slave.hostname not in self._unseen_disks:
                self._put_member(replace(slave, complete=complete))

    def may_forget(self, name: str) -> bool:
        """Whether this machine's disk may lose fsynced bytes at this moment.

        A lie is older than the crash that reveals it, and everything acknowledged since is lost with it.
        """
        return True

    def disk_replaced(self, name: str) -> None:
        """Replace a slave's disk: the operator starts its broker before any change of roles."""
        self._unseen_disks.add(name)
        for slave in self.group.slaves:
            if slave.hostname == name:
                self._put_member(replace(slave, complete=False))

    def route(self) -> str | None:
        """Return the master, by an old or a new route."""
        group = self.group if self._events.chance(0.9) else self._group_before
        return group.master.ip if group.master else None

    def change(self, change: rules.RoleChange) -> bool:
        """Change the row by compare-and-set."""
        if not self.is_up or change.term != self.group.term:
            return False
        self._group_before = self.group
        self.master_is_refused = False
        self.group = Group(
            GROUP, change.new_term, change.master, change.slaves, 0, change.half_swapped, min_copies=change.min_copies
        )
        master = change.master.hostname if change.master else ""
        if self._masters.setdefault(self.group.term, master) != master:
            raise Violation(f"I13: two masters in term {self.group.term}")
        slaves = " ".join(slave.hostname for slave in change.slaves)
        self._events.note(f"row term={self.group.term} master={master} slaves={slaves}")
        self.push_all()
        return True

    def go_down(self, ms: float) -> None:
        self.is_up = False
        self.life += 1

        def up() -> None:
            self.is_up = True

        self._events.after(ms, up)

    def replace(self, role: Role, *, accept_loss: bool = False) -> None:
        """Run ReplaceBroker: the other broker takes this role, as the operator is sure that its holder is stopped."""
        group = self.group
        if role == Role.MASTER:
            broker = group.slave
        else:
            broker = group.master if not group.half_swapped else self._vacant()
        if broker is None:
            return
        try:
            wanted = replace(
                new_broker(broker.hostname, role), incarnation=broker.incarnation, instance=broker.instance
            )
            row = Directory({GROUP: group})
            change, _ = rules.replace_broker(row, wanted, lambda _: False, accept_loss=accept_loss)
        except OperatorError as error:
            self._events.count("role change refused")
            self._events.note(f"refused: {error}")
            return
        if change is not None and self.change(change):
            self._events.count("role change")

    def _vacant(self) -> Broker | None:
        holder = self.group.master.hostname if self.group.master else ""
        return next((new_broker(m.name, Role.SLAVE) for m in self._world.machines if m.name != holder), None)

    def swap(self) -> None:
        """Swap roles step by step; the swap may end after each step."""
        group, life = self.group, self.life
        if not self.is_up or group.master is None or group.slave is None or group.half_swapped:
            return
        events, hold_ms = self._events, self._events.rng.choice((50, 300, 2000))
        master, slave = group.master.hostname, group.slave.hostname
        hold_ends_ms = events.now_ms + hold_ms

        def drained(process: Process) -> None:
            at_end = _state(process)
            events.between(0, 50, lambda: compare(at_end))

        def compare(at_end: ReplicaState) -> None:
            process = self._reach(slave)
            if process is None or not self._goes_on(life):
                return cancel()
            try:
                rules.check_same_log(at_end, _state(process))
            except OperatorError:
                return cancel()
            events.between(0, 50, exchange)

        def exchange() -> None:
            if not self._goes_on(life) or events.now_ms > hold_ends_ms:
                return cancel()
            try:
                change = rules.swap_roles(self.group, term=group.term)
            except OperatorError:
                return cancel()
            if self.change(change):
                events.count("swapped")

        def cancel() -> None:
            process = self._reach(master)
            if process is not None and events.chance(0.7):
                process.guarded(process.node.changes.cancel_swap)

        self._drain(group, hold_ms, "", drained, cancel, refused=lambda: None)

    def _goes_on(self, life: int) -> bool:
        """Whether a swap that this metaserver began in this life goes on."""
        return self.is_up and self.life == life and not self._events.chance(0.05)

    def _drain(
        self,
        group: Group,
        hold_ms: int,
        target: str,
        drained: Callable[[Process], None],
        ended: Callable[[], None],
        *,
        refused: Callable[[], None],
    ) -> None:
        """Let the master prepare a swap to the slave `target`, and wait until it is drained.

        Args:
            drained: called with the master's process.
            ended: called if the swap ends while it waits; `refused`: if it ends before.
        """
        events, life = self._events, self.life
        master, deadline_ms = group.master.hostname, events.now_ms + 2 * hold_ms

        def prepare() -> None:
            process = self._reach(master)
            if process is None or not self._goes_on(life):
                return refused()
            try:
                process.guarded(lambda: process.node.changes.prepare_swap(group.term, hold_ms, target=target))
            except OperatorError:
                return refused()
            events.count("swap prepared")
            events.between(0, 20, wait)

        def wait() -> None:
            process = self._reach(master)
            if process is None or not self._goes_on(life) or events.now_ms > deadline_ms:
                return ended()
            if process.node.master is None or not process.node.master.is_drained_to(target):
                return events.between(5, 20, wait)
            drained(process)

        events.between(0, 20, prepare)

    def look(self) -> None:
        """Look whether the master is gone. At times a running master counts as gone."""
        self._events.between(20, 200, self.look)
        group = self.group
        if not self.is_up or group.master is None or group.slave is None:
            return
        if self._reach(group.master.hostname) is None or self._events.chance(0.03):
            self._fail_over(group)

    def look_after(self) -> None:
        """Do further work of an operator, after all faults."""

    def _reach(self, name: str) -> Process | None:
        """Return the process of a broker at the row's address, if it is reachable."""
        broker = self.broker(name)
        place = broker.ip if broker else name
        process = self._world.machine(place).process
        return process if process is not None and self._world.network.is_through(META, place) else None

    def _facts(self, group: Group) -> Facts | None:
        """Return the facts of a failover; None: the row has changed."""
        if group != self.group or group.master is None or not group.slaves or not self.is_up:
            return None
        slaves = {slave.key: self._reach(slave.hostname) for slave in group.slaves}
        reported = max((state.term for state in self._reports.values()), default=0)
        return Facts(
            group,
            reported,
            max(reported, group.term),
            self._reports.get(group.master.hostname),
            {key: full_state(process) for key, process in slaves.items() if process is not None},
            self.known_points(),
        )

    def _fail_over(self, group: Group) -> None:
        """Fail over step by step, as `roles.failover` does, but without asking for the slave's link to its master."""
        events, rng = self._events, self._events.rng
        facts = self._facts(group)
        if facts is None:
            return
        if refused := promotion.refusal(facts):
            return events.count(f"no failover: {refused[0].value}")
        slave = self._reach(facts.best.hostname)
        assert slave is not None, "it answered"
        hold_ms = rng.choice((50, 500, 3000))
        try:
            slave.guarded(
                lambda: slave.node.changes.prepare_failover(
                    group.term, hold_ms=hold_ms, silent_ms=1500, packet_age_ms=None
                )
            )
        except OperatorError:
            return events.count("no failover: the slave refuses")

        def exchange() -> None:
            facts = self._facts(group)
            if facts is None or promotion.refusal(facts) is not None:
                return events.count("no failover: it is too late")
            chosen = self._reach(facts.best.hostname)
            if chosen is not None:
                self._world.oracle.chosen(chosen.log)
            if self.change(promotion.choose(facts)):
                events.count("failed over")

        events.between(0, rng.choice((20, 2000)), exchange)


def _key(name: str) -> BrokerKey:
    return BrokerKey(name, 1)


def new_broker(name: str, role: Role) -> Broker:
    return Broker(GROUP, role, name, name, 1, 2)


def _address(broker: Broker) -> Address:
    return Address(broker.ip, broker.serve_port, broker.sync_port, 0)


def _state(process: Process) -> ReplicaState:
    node = process.node
    term = node.assignment.term if node.assignment else 0
    role = node.assignment.role if node.assignment else Role.SLAVE
    return ReplicaState(
        role=role,
        term=term,
        log_end=process.log.end,
        flushed_end=process.log.flushed_end,
        chain=process.log.chain,
        writable=node.writable,
        durability="fsync",
        readonly_reasons=tuple(node.readonly_reasons),
        point=node.identity.points.own,
    )


def full_state(process: Process) -> ReplicaState:
    """Return the report with the fields of a failover."""
    node, known = process.node, process.node.identity.value
    return replace(
        _state(process),
        term=known.term if node.role else 0,
        boot=known.boot,
        incarnation=known.incarnation,
        instance=node.identity.instance,
        in_step=node.master.in_sync if node.master else (),
        in_sync=node.slave is not None and node.slave.has_matched,
        promised_term=known.promised,
        last_term=process.log.state.epoch.term,
        last_boot=process.log.state.epoch.boot,
    )
