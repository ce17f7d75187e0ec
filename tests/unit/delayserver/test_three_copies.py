"""Core. A delay group of three copies with two acknowledging: one is lost, and messages are stored and sent on time."""

from __future__ import annotations

from tests.unit.broker.world import Group
from tests.unit.delayserver.world import SETTINGS, DelayServer, Producer, Senders
from tests.unit.replication.copies import Copies


class DelayCopies(Copies):
    """Three delay servers; `run` lets time pass."""

    def __init__(self) -> None:
        self.senders = Senders()
        self.a, self.b, self.c = (DelayServer(name, SETTINGS, self.senders) for name in "abc")
        self.min_copies, self.wires = 2, {"b": Group(self.a, self.b), "c": Group(self.a, self.c)}

    def run(self, ms: int) -> None:
        for _ in range(ms // 100):
            for server in (self.a, self.b, self.c):
                server.host.clock_ms += 100
                server.node.record_metaserver_clock(server.host.now_ms())
                server.node.tick()
                server.beat()
            self.settle()


def test_delay_group_continues_with_two_of_three():
    copies = DelayCopies()
    copies.start()
    copies.run(200)
    producer = Producer(copies.a)
    first = producer.delayed(copies.a.host.now_ms() + 2_000, "m1")
    copies.settle()
    copies.cut("c")
    second = producer.delayed(copies.a.host.now_ms() + 2_000, "m2")
    copies.settle()
    assert producer.receipt(first).stored == producer.receipt(second).stored == 1
    copies.run(1_800)
    assert not copies.senders.delivered()
    copies.run(600)
    assert sorted(copies.senders.delivered()) == ["m1", "m2"]
    copies.connect("c")
    copies.run(200)
    assert copies.a.log.chain == copies.b.log.chain == copies.c.log.chain
    assert copies.c.filing.known_end == copies.b.filing.known_end


def test_one_copy_of_three_refuses_messages():
    copies = DelayCopies()
    copies.start()
    copies.run(200)
    copies.cut()
    producer = Producer(copies.a)
    refused = producer.delayed(copies.a.host.now_ms() + 2_000, "m1")
    copies.run(100)
    assert producer.code(refused) != 0 and copies.a.node.readonly_reasons == ["slave_down"]
