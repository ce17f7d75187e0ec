"""Core. Shipping frames between copies: times of frames, and the proof in a confirmation."""

from __future__ import annotations

import pytest

from qmq.errors import CorruptFrame, Diverged, LogError
from qmq.remoting.commands import Command, split_offset
from qmq.replication import shipper as shipping
from qmq.replication.shipper import Shipper
from tests.unit.broker.world import FakeHost, FakeLink
from tests.unit.log.logs import Copy


def shipped_from(copy: Copy, *, begin: int = 0, chain: int = 0, bytes_per_s: int = 1 << 30):
    link, host = FakeLink("slave"), FakeHost()
    shipper = Shipper(
        copy.log, link, host.read, begin=begin, chain=chain, bytes_per_s=bytes_per_s, found_damage=lambda problem: None
    )
    return shipper, link, host


def received(link: FakeLink) -> bytes:
    data = b""
    for command, body in link.pushed:
        offset, frames = split_offset(memoryview(body))
        assert command == Command.FRAMES and offset == len(data)
        data += frames
    return data


def a_copy(frames: int = 40, *, tail_bytes: int = 1 << 20) -> Copy:
    copy = Copy.filled(frames, tail_bytes=tail_bytes)
    return copy


def test_frames_are_shipped_before_the_own_fsync():
    copy = Copy()
    shipper, link, host = shipped_from(copy)
    copy.begin_epoch()
    copy.messages("m")
    shipper.ship()
    assert shipper.position == copy.log.end > copy.log.flushed_end == 0 and not host.reads
    copy.flush()
    assert received(link) == copy.whole()


def test_late_receiver_is_served_from_disk_then_tail():
    copy = a_copy(tail_bytes=500)
    shipper, link, host = shipped_from(copy)
    shipper.ship()
    while host.do_read():
        pass
    assert shipper.position == copy.log.end and received(link) == copy.whole()
    copy.messages("new")
    shipper.ship()
    assert not host.reads and shipper.position == copy.log.end


@pytest.mark.parametrize(("more", "reads"), [(1, 2), (0, 1)])
def test_catching_up_begins_with_a_tenth_second(more, reads):
    copy = a_copy(tail_bytes=0)
    size = len(copy.log.stored.read(0, copy.log.end, shipping.PACKET_BYTES).data)
    shipper, link, host = shipped_from(copy, bytes_per_s=10 * (size + more))
    shipper.ship()
    while host.do_read():
        pass
    assert len(link.pushed) == reads


def test_full_link_is_not_sent_to():
    copy = a_copy()
    shipper, link, _ = shipped_from(copy)
    link.writable = False
    shipper.ship()
    assert not link.pushed
    link.writable = True
    shipper.ship()
    assert received(link) == copy.whole()


def test_confirmation_of_unsent_frames_is_divergence():
    copy = a_copy(10)
    shipper, _, _ = shipped_from(copy)
    shipper.ship()
    end, chain = copy.log.end, copy.log.chain
    for wrong in ((end, chain ^ 1), (end + 8, chain), (end - 8, chain), (1 << 63, chain), (end, 0)):
        broken, _, _ = shipped_from(copy)
        broken.ship()
        with pytest.raises(Diverged):
            broken.confirm(*wrong)
        assert broken.confirmed_end == 0
    shipper.confirm(0, 0)
    shipper.confirm(end, chain)
    shipper.confirm(end, chain)
    assert shipper.confirmed_end == end
    with pytest.raises(Diverged):
        shipper.confirm(0, 0)


@pytest.mark.parametrize("tail_bytes", [0, 1 << 20])
def test_closed_link_is_not_served(tail_bytes):
    shipper, link, host = shipped_from(a_copy(tail_bytes=tail_bytes))
    link.close("lost")
    shipper.ship()
    assert not host.reads and shipper.position == 0


def test_reading_resumes_at_the_allowed_byte():
    copy = a_copy(tail_bytes=0)
    shipper, _, host = shipped_from(copy, bytes_per_s=1_000)  # a byte per millisecond, 100 at the begin
    for _ in range(2):
        begin = shipper.position
        shipper.ship()
        assert host.do_read() and not host.reads
        shipper.allow(shipper.position - begin - 100)
        shipper.ship()
        assert not host.reads
        shipper.allow(1)
        shipper.ship()
        assert host.do_read() and not host.reads
        shipper.allow(3_600_000)  # an idle hour saves 100 bytes


def test_window_is_exceeded_by_one_packet(monkeypatch):
    monkeypatch.setattr(shipping, "PACKET_BYTES", 1)
    copy = a_copy()
    every, _, _ = shipped_from(copy)
    every.ship()
    _, first, second, third, *_ = [end for end, _ in every._sent]
    for confirmed, window, sent in ((0, second - 1, second), (0, second, third), (first, second - first, third)):
        monkeypatch.setattr(shipping, "WINDOW_BYTES", window)
        shipper, _, _ = shipped_from(copy)
        shipper.confirmed_end = confirmed
        shipper.ship()
        assert shipper.position == sent


@pytest.mark.parametrize("error", [CorruptFrame(8, "met"), LogError("the file is gone")])
def test_read_error_closes_the_link(error):
    copy, found, link, host = a_copy(tail_bytes=0), [], FakeLink("slave"), FakeHost()
    shipper = Shipper(copy.log, link, host.read, begin=0, chain=0, bytes_per_s=1 << 30, found_damage=found.append)
    shipper.ship()
    _, done = host.reads.popleft()
    done(error)
    assert not link.is_open and link.reason == str(error) and not link.pushed
    assert found == ([error] if isinstance(error, CorruptFrame) else [])
    link.is_open = True
    shipper.ship()
    assert host.reads, "nothing is being read any more"
