"""Core. Which old segments may go (design, section 2)."""

from __future__ import annotations

from broker import retention
from qmq.log.frame import FrameKind
from tests.unit.broker.world import SETTINGS, Client, Group
from tests.unit.log.logs import Copy

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


def test_what_groups_need_is_looked_for_only_if_they_lack_something_and_the_oldest_segment_is_due(monkeypatch):
    """100,000 groups times all segments, every ten seconds: nobody else was served for minutes."""
    copy = Copy(tail_bytes=0)
    copy.office()
    copy.fill(40)
    keeper, looked = retention.Retention(SETTINGS), []
    frames = copy.log.frames
    monkeypatch.setattr(copy.log, "frames", lambda *args: looked.append(args[0]) or frames(*args), raising=False)
    for subject, position in (("s0", copy.log.state.next_sequence["s0"]), ("s1", 0)):
        copy.progress(FrameKind.POSITION, "", (position, 0, 0), subject=subject)
    copy.flush()
    written_ms = copy.log.timestamp_at(copy.log.bases[1])
    assert not keeper.may_drop(copy.log, written_ms + 1) and not looked
    assert not keeper.may_drop(copy.log, written_ms + 73 * retention.HOUR_MS) and set(looked) == {"s1"}
    looked.clear()
    copy.log.drop_oldest_segment()
    keeper.dropped(copy.log)
    assert looked == ["s1"]
