"""Core. Parts that a master's modules share: permissions, clocks of frames, and answers."""

from __future__ import annotations

from types import SimpleNamespace
from zlib import crc32

import pytest

from qmq.errors import BrokerReadOnly, CorruptFrame, ErrorCode, NotMaster, NotServed, QmqError
from qmq.log.frame import FLAG_LABELLED, FLAG_NO_SLAVE_IN_SYNC, FrameKind
from qmq.log.progress_frame import encode_progress
from qmq.remoting.packet import Packet
from qmq.replication.ack_gate import AckGate
from qmq.replication.mastership import Mastership, answering
from qmq.replication.readonly import Reason
from qmq.types import Epoch
from tests.unit.broker.world import SETTINGS, FakeHost, FakeLink


class FakeLog:
    """Records its calls."""

    def __init__(self) -> None:
        self.state, self.end = SimpleNamespace(retry_ms=0), 0
        self.appended, self.damages = [], []
        self.stored = self
        self.is_damaged = lambda problem: True
        self.damaged_at = self.damages.append

    def append(self, kind, subject, body, **fields):
        self.appended.append((kind, subject, body))
        return SimpleNamespace(**fields)


def new_mastership(**fields) -> Mastership:
    epoch = Epoch(1, 2)
    return Mastership("g1", epoch, FakeLog(), FakeHost(), SETTINGS, AckGate(epoch, high_watermark=80), **fields)


def refusal(check) -> type[QmqError] | None:
    try:
        check()
    except QmqError as error:
        return type(error)
    return None


@pytest.mark.parametrize(
    ("has_begun", "reason", "begun", "store", "progress"),
    [
        (True, None, None, None, None),
        (True, Reason.DISK, None, None, None),
        (True, Reason.DRAINING, None, None, NotServed),
        (True, Reason.FENCED, NotMaster, NotMaster, NotMaster),
        (False, None, NotServed, BrokerReadOnly, NotServed),
        (False, Reason.FENCED, NotMaster, NotMaster, NotMaster),
    ],
)
def test_checks_before_during_and_after_a_mastership(has_begun, reason, begun, store, progress):
    mastership = new_mastership(has_begun=has_begun)
    if reason:
        mastership.readonly.change(reason, True)
    checks = mastership.check_has_begun, mastership.check_may_store, mastership.check_may_progress
    assert [refusal(check) for check in checks] == [begun, store, progress]
    assert mastership.may_progress is (progress is None)


@pytest.mark.parametrize("ahead_ms", [5_000, -5_000])
def test_retry_clock_never_goes_back(ahead_ms):
    mastership = new_mastership()
    began_ms = mastership.host.now_ms()
    mastership.log.state.retry_ms = began_ms + ahead_ms
    first = mastership.retry_ms()
    assert first == began_ms + max(0, ahead_ms)
    mastership.log.state.retry_ms += 60_000
    mastership.host.wall_skew_ms -= 3_600_000
    mastership.host.clock_ms += 700
    assert mastership.retry_ms() == first + 700


@pytest.mark.parametrize("kind", FrameKind)
def test_due_frames_carry_the_retry_clock(kind):
    mastership = new_mastership()
    retry_ms = mastership.retry_ms()
    mastership.host.wall_skew_ms -= 3_600_000
    frame = mastership.append(kind, "s", b"body")
    is_masters = kind in (FrameKind.NACK, FrameKind.DISPATCH)
    assert frame.timestamp_ms == (retry_ms if is_masters else mastership.host.now_ms())
    assert (frame.epoch, frame.high_watermark, frame.body_crc) == (mastership.epoch, 80, crc32(b"body"))
    assert mastership.host.pass_is_due


@pytest.mark.parametrize("too_few_in_sync", [True, False])
def test_frame_without_slave_in_sync_is_flagged(too_few_in_sync):
    mastership = new_mastership()
    mastership.gate.too_few_in_sync = too_few_in_sync
    frame = mastership.append(FrameKind.MESSAGES, "s", b"", flags=FLAG_LABELLED)
    assert frame.flags == FLAG_LABELLED | (FLAG_NO_SLAVE_IN_SYNC if too_few_in_sync else 0)


def test_progress_hook_runs_before_the_write():
    mastership, seen = new_mastership(), []
    key, entries = ("s", "g", "c1"), [(1, 2, 3)]
    written = (FrameKind.ACK, "s", encode_progress("g", "c1", entries))
    mastership.append_progress(FrameKind.ACK, key, entries)
    mastership.before_progress = lambda *call: seen.append((call, list(mastership.log.appended)))
    mastership.append_progress(FrameKind.ACK, key, entries)
    assert seen == [((FrameKind.ACK, key, entries), [written])] and mastership.log.appended == [written, written]


def test_request_is_answered_when_safe_or_refused():
    mastership, link, packet = new_mastership(), FakeLink("client"), Packet(1, 7, 0, 1, memoryview(b""))
    mastership.gate.high_watermark = 0  # nothing is acknowledged yet
    mastership.answer_when_safe(link, packet, b"done")
    assert link.answers == {7: (0, b"done")}
    other = FakeLink("another client")
    answering(other, packet, b"done")(NotMaster("ask again"))
    assert other.answers == {7: (ErrorCode.NOT_MASTER, b"ask again")}


@pytest.mark.parametrize("is_damaged", [True, False])
def test_damage_met_by_a_reader_makes_readonly(is_damaged):
    mastership, problem = new_mastership(), CorruptFrame(8, "met")
    mastership.log.stored.is_damaged = lambda asked: asked is problem and is_damaged
    mastership.found_damage(problem)
    assert (Reason.CORRUPT in mastership.readonly) is is_damaged and mastership.log.damages == [problem] * is_damaged
