"""Core. A world of three copies of a group."""

from __future__ import annotations

from dataclasses import replace

from qmq.replication.follower import FollowerState
from qmq.types import Role
from tests.unit.broker.world import SETTINGS, Broker, Client, Group


class Copies:
    """A master `a` and the slaves `b` and `c`, each with a wire to it."""

    def __init__(self, *, min_copies: int = 2, **changes) -> None:
        settings = replace(SETTINGS, **changes)
        self.a, self.b, self.c = (Broker(name, settings) for name in "abc")
        self.min_copies = min_copies
        self.wires = {"b": Group(self.a, self.b), "c": Group(self.a, self.c)}

    def start(
        self, *, connected: str | None = None, term: int = 1, master: Broker | None = None, awaited: str = ""
    ) -> Copies:
        master = master or self.a
        for broker in (self.a, self.b, self.c):
            role = Role.MASTER if broker is master else Role.SLAVE
            waits = tuple(f"{name}:{SETTINGS.serve_port}" for name in awaited)
            broker.assign(role, term, slaves=2, min_copies=self.min_copies, awaited=waits)
        slaves = [broker for broker in (self.a, self.b, self.c) if broker is not master]
        self.wires = {slave.name: Group(master, slave) for slave in slaves}
        self.connect("".join(self.wires) if connected is None else connected)
        return self

    def outgrow(self, master: Broker, copy: Broker, *, segments: int) -> None:
        """Let the master write this many segments and drop its oldest until its log begins behind the copy's end."""
        client = Client(master)
        while len(master.log.bases) < segments:
            client.produce(*(f"m{number}" for number in range(10)))
            self.settle()
        while master.log.start <= copy.log.end:
            master.drop_oldest_segment()

    def begin_alone_twice(self) -> None:
        """Restart the master twice without slaves, so that its last frames are of an earlier mastership."""
        for _ in range(2):
            self.a.crash()
            self.start(connected="")
            self.a.wait(SETTINGS.slave_wait_ms)
            self.a.host.settle()
        self.a.crash()

    def connect(self, names: str) -> None:
        for name in names:
            self.wires[name].connect()
        self.settle()

    def cut(self, names: str = "bc") -> None:
        for name in names:
            if self.wires[name].at_master is not None:
                self.wires[name].cut()
                self.wires[name].at_master = self.wires[name].at_slave = None

    def store(self, *ids: str, **terms) -> None:
        """Let a client of `a` send one batch, and settle."""
        Client(self.a).produce(*ids, **terms)
        self.settle()

    def wait(self, ms: int) -> None:
        """Let time pass at `a`, and settle."""
        self.a.wait(ms)
        self.settle()

    def settle(self) -> None:
        before = None
        while before != (before := [broker.log.end for broker in (self.a, self.b, self.c)] + [self.high]):
            for wire in self.wires.values():
                wire.settle()

    @property
    def high(self) -> int:
        masters = [broker.node.master for broker in (self.a, self.b, self.c) if broker.node.master]
        return masters[0].gate.high_watermark if masters else 0

    def state(self, name: str) -> FollowerState:
        (watch,) = [watch for watch in self.a.master.slaves.all if watch.owner.startswith(f"{name}:")]
        return watch.follower.state


def with_messages(count: int = 12, **changes) -> Group:
    """Return a group with messages m0, m1, …; a segment has room for a few."""
    group = Group.made(**changes).start()
    for number in range(count):
        group.client().store(f"m{number}", size=900)
    return group


def group_at_rest(**changes) -> Group:
    """Return a group at rest: everything is acknowledged, and both copies have saved the acknowledged point."""
    group = Group.made(**changes).start()
    group.client().store("m")
    for _ in range(20):
        for broker in (group.a, group.b):
            broker.wait(100)
        group.settle()
    return group
