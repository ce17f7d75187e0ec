"""Core. Which old segments may go (design, section 2)."""

from __future__ import annotations

from broker import retention
from tests.unit.broker.world import Client, Group

EVERYTHING = retention.Limits(age_ms=0, unconsumed_age_ms=0, bytes=0)


def test_oldest_segment_stays_until_the_next_one_is_on_disk():
    group = Group.made().start()
    client, log = Client(group.a), group.a.log

    def droppable() -> bool:
        return not group.a.node.is_pinned(()) and retention.may_go(
            log, oldest_ms=0, now_ms=1 << 40, needed=log.end, limits=EVERYTHING
        )

    while len(log.bases) == 1:
        client.produce("m", size=500)
        if len(log.bases) == 1:
            group.settle()
    assert log.bases[1] == log.flushed_end and not droppable()
    group.settle()
    client.produce("its high watermark covers the segment")
    group.settle()
    assert droppable()
    log.drop_oldest_segment()
    client.produce("m")
    group.settle()
    group.a.crash()
    assert group.a.log.damage is None and group.a.log.end == group.b.log.end
