"""Core. Unsettled messages, acks and nacks of a consumer, against plain sets."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmq.client.received import ReceivedMessage, UnackedPiece
from qmq.client.terms import RetryPolicy
from qmq.client.unacked import Refusal, SentAck, SentNack, Unacked
from qmq.codec import batch_encoder
from qmq.errors import InvalidMessage
from qmq.message import Message
from qmq.remoting.commands import Verdict


class Acker:
    def __init__(self) -> None:
        self.done_calls = 0
        self.nacks: list[tuple[int, float, Verdict, str]] = []
        self.policy = RetryPolicy(deliveries_max=3, delay_s=5.0)
        self.group = "group"
        self.is_mailbox = False
        self.source = "a"

    def done(self, piece: UnackedPiece) -> None:
        self.done_calls += 1

    def nack(self, piece: UnackedPiece, at: int, *, delay_s: float, verdict: Verdict, reason: str, message) -> None:
        if piece.refuse(at):
            self.nacks.append((at, delay_s, verdict, reason))

    def on_loop(self, call: partial[None]) -> None:
        call()


class Broker:
    """Model of a broker's rules for acks and nacks."""

    def __init__(self) -> None:
        self.handed: set[int] = set()
        self.unacked: set[int] = set()
        self.nacked: list[int] = []
        self.next = 0

    @property
    def acked_end(self) -> int:
        return min(self.unacked, default=self.next)

    def deliver(self, count: int, jump: int) -> int:
        begin = self.next + jump
        self.handed.update(range(begin, begin + count))
        self.unacked.update(range(begin, begin + count))
        self.next = begin + count
        return begin

    def ack(self, ack: SentAck) -> None:
        before = 0
        for begin, end in ack.ranges:
            assert before <= begin < end
            assert self.handed >= set(range(begin, end)), "acks what was not delivered"
            assert not set(range(begin, end)) & set(self.nacked), "acks what was nacked before"
            self.unacked -= set(range(begin, end))
            before = end

    def nack(self, nack: SentNack) -> None:
        for entry in nack.entries:
            numbers = set(range(entry.begin, entry.end))
            assert self.handed >= numbers
            assert numbers <= self.unacked | set(self.nacked), "nacks what was acked before"
            self.nacked += sorted(numbers & self.unacked)
            self.unacked -= numbers


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("pull"), st.integers(1, 6), st.sampled_from([0, 0, 0, 1, 1 << 32])),
        st.tuples(st.just("done"), st.integers(0, 1000)),
        st.tuples(st.just("done"), st.integers(0, 3)),
        st.tuples(st.just("nack"), st.integers(0, 1000), st.sampled_from(["one reason", "another"])),
        st.tuples(st.just("ack"), st.booleans()),
        st.just(("send nack",)),
        st.just(("answer ack",)),
        st.just(("answer nack",)),
        st.tuples(st.just("reconnect"), st.booleans()),
    ),
    max_size=120,
)


@given(STEPS)
def test_each_decision_is_stored_once(steps):
    broker, unacked, acker = Broker(), Unacked(), Acker()
    held: dict[int, tuple[UnackedPiece, int]] = {}
    done: set[int] = set()
    nacked: set[int] = set()
    acks: list[SentAck] = []
    nacks: list[SentNack] = []
    for step in steps:
        match step:
            case ("pull", count, jump):
                begin = broker.deliver(count, jump)
                received = unacked.received(begin, count, 1, acker, "g1")
                assert received is not None and received[1] == 0
                held.update({begin + at: (received[0], at) for at in range(count)})
            case ("done", choice) if held:
                number = sorted(held)[choice % len(held)]
                held[number][0].mark(held[number][1])
                done |= {number} - nacked
            case ("nack", choice, reason) if held:
                number = sorted(held)[choice % len(held)]
                piece, at = held[number]
                unacked.nack(Refusal(piece, at, due_ms=0, verdict=Verdict.RETRY, reason=reason))
                nacked |= {number} - done
            case ("ack", everything):
                if ack := unacked.next_ack(everything=everything):
                    acks.append(ack)
            case ("send nack",):
                if nack := unacked.next_nack(0):
                    nacks.append(nack)
            case ("answer ack",) if acks:
                broker.ack(acks[0])
                unacked.acked(acks.pop(0))
            case ("answer nack",) if nacks:
                broker.nack(nacks[0])
                unacked.nacked(nacks.pop(0))
            case ("reconnect", arrived):
                for ack in acks if arrived else []:
                    broker.ack(ack)
                for nack in nacks if arrived else []:
                    broker.nack(nack)
                acks.clear()
                nacks.clear()
                assert unacked.held_end == (max(held) + 1 if held else 0)
                unacked.subscribed(broker.acked_end)
        open_ = held.keys() - done - nacked
        assert open_ <= broker.unacked, "nothing is settled without being decided"
        assert unacked.open == len(open_)
        assert unacked.messages >= len(broker.unacked)
    settle(broker, unacked, acks, nacks)
    assert broker.unacked == held.keys() - done - nacked
    assert broker.nacked == sorted(set(broker.nacked), key=broker.nacked.index), "once each"
    assert set(broker.nacked) == nacked
    assert unacked.is_settled and unacked.messages == len(broker.unacked)


def settle(broker: Broker, unacked: Unacked, acks: list[SentAck], nacks: list[SentNack]) -> None:
    while ack := acks.pop(0) if acks else unacked.next_ack(everything=True):
        broker.ack(ack)
        unacked.acked(ack)
    while nack := nacks.pop(0) if nacks else unacked.next_nack(0):
        broker.nack(nack)
        unacked.nacked(nack)


def pieces(unacked: Unacked, *counts: int) -> list[UnackedPiece]:
    """Hold consecutive pieces of these sizes."""
    made = []
    for count in counts:
        received = unacked.received(unacked.held_end, count, 1, Acker(), "g1")
        assert received is not None
        made.append(received[0])
    return made


def test_oldest_piece_is_acked_partially():
    unacked = Unacked()
    first, second, third = pieces(unacked, 4, 4, 4)
    for piece, at in [(first, 0), (first, 2), (second, 0), (third, 0), (third, 1), (third, 2), (third, 3)]:
        piece.mark(at)
    ack = unacked.next_ack()
    assert ack is not None and ack.ranges == [(0, 1), (8, 12)]
    assert unacked.next_ack() is None
    everything = unacked.next_ack(everything=True)
    assert everything is not None and everything.ranges == [(2, 3), (4, 5)]


def test_repeated_nack_keeps_its_due_time():
    unacked = Unacked()
    (piece,) = pieces(unacked, 2)
    for at in range(2):
        unacked.nack(Refusal(piece, at, due_ms=1000, verdict=Verdict.DEAD_LETTER, reason=""))
    first = unacked.next_nack(0)
    assert first is not None and first.entries == [(0, 2, 1000, Verdict.DEAD_LETTER)]
    unacked.subscribed(0)
    again = unacked.next_nack(700)
    assert again is not None and again.entries == [(0, 2, 300, Verdict.DEAD_LETTER)]
    unacked.subscribed(0)
    late = unacked.next_nack(2000)
    assert late is not None and late.entries == [(0, 2, 0, Verdict.DEAD_LETTER)]


def test_redelivered_messages_are_held_once():
    unacked = Unacked()
    unacked.received(10, 5, 1, Acker(), "g1")
    assert unacked.received(10, 5, 1, Acker(), "g1") is None
    again = unacked.received(12, 6, 1, Acker(), "g1")
    assert again is not None
    assert (again[0].begin, again[0].end, again[1]) == (15, 18, 3)
    assert (unacked.messages, unacked.held_end) == (8, 18)


def test_settled_messages_are_released():
    unacked = Unacked()
    _, second = pieces(unacked, 4, 4)
    unacked.nack(Refusal(second, 1, due_ms=0, verdict=Verdict.RETRY, reason=""))
    unacked.subscribed(6)
    assert (unacked.messages, unacked.open) == (2, 2)
    assert unacked.next_ack() is None and unacked.next_nack(0) is None
    for at in range(4):
        second.mark(at)
    ack = unacked.next_ack()
    assert ack is not None and ack.ranges == [(6, 8)]


def test_dropped_messages_are_not_decided():
    unacked = Unacked()
    (piece,) = pieces(unacked, 2)
    unacked.drop()
    piece.mark(0)
    unacked.nack(Refusal(piece, 1, due_ms=0, verdict=Verdict.RETRY, reason=""))
    assert Unacked().next_ack() is None
    assert unacked.next_nack(0) is None
    assert piece.is_dropped


def test_begun_and_untaken_messages_differ():
    unacked = Unacked()
    first, second, third = pieces(unacked, 2, 3, 2)
    first.mark(0)
    assert unacked.begun({second: 1, third: 0}) == [(first, 1), (second, 0)]


def received(message: Message, times: int = 1) -> tuple[ReceivedMessage, Acker]:
    acker = Acker()
    data = batch_encoder(message.subject, 1234)(message)
    return ReceivedMessage(message.subject, 7, data, UnackedPiece(5, 3, times, acker, "g1", []), 2), acker


def test_received_message_equals_the_sent_one():
    sent = Message("order.changed", {"orderNo": "42", "sum": 7}, tags={"pay", "é"}, id="id-1")
    message, _ = received(sent, times=2)
    assert (message.subject, message.id, message.tags, message.created_ms) == (
        "order.changed",
        "id-1",
        {"pay", "é"},
        1234,
    )
    assert message.properties == {"orderNo": "42", "sum": 7}
    assert (message["sum"], message.get("none", 1), message.get_int("sum")) == (7, 1, 7)
    assert (message.sequence, message.pull_sequence, message.broker_group, message.times) == (7, 7, "g1", 2)
    assert (message.order_key, message.retries_max) == (None, None)
    limited, _ = received(Message("a", {"n": "1"}, id="1", order_key="k", retries_max=4))
    assert (limited.order_key, limited.retries_max) == ("k", 4)
    assert "order.changed" in repr(message)
    with pytest.raises(AttributeError):
        message.nothing  # noqa: B018


def test_the_first_decision_on_a_message_counts():
    message, acker = received(Message("a", {}, id="1"))
    assert not message.is_decided
    message.nack_nowait("first", delay=2)
    message.ack_nowait()
    message.dead_letter_nowait("third")
    assert acker.nacks == [(2, 2.0, Verdict.RETRY, "first")]
    assert message.is_decided and not message.is_settled


def test_invalid_bytes_raise_on_access():
    message = ReceivedMessage("a", 0, b"garbage" * 10, UnackedPiece(0, 1, 1, Acker(), "g1", []), 0)
    with pytest.raises(InvalidMessage):
        message.properties  # noqa: B018
    with pytest.raises(InvalidMessage):
        message.id  # noqa: B018


def settled(unacked: Unacked, acker: Acker) -> None:
    """Confirm every ack and nack."""
    while ack := unacked.next_ack(everything=True):
        unacked.acked(ack)
    while nack := unacked.next_nack(0):
        unacked.nacked(nack)


def test_lost_decisions_are_sent_again():
    """The old master confirmed them alone, and its successor goes on without them."""
    unacked, acker = Unacked(), Acker()
    piece, _ = unacked.received(100, 6, 1, acker, "g")
    for at in (0, 1, 3):
        piece.mark(at)
    unacked.nack(Refusal(piece, 2, 0, Verdict.RETRY, "later"))
    settled(unacked, acker)
    unacked.subscribed(100, [(100, 106)])
    assert unacked.next_ack().ranges == [(100, 102), (103, 104)], "two of its messages are not decided"
    nack = unacked.next_nack(0)
    assert [tuple(entry)[:2] for entry in nack.entries] == [(102, 103)]
    unacked.nacked(nack)
    for at in (4, 5):
        piece.mark(at)
    settled(unacked, acker)
    assert not unacked.messages and unacked.is_settled
    unacked.subscribed(100, [(100, 106)])
    assert not unacked.is_settled
    assert unacked.next_ack().ranges == [(100, 102), (103, 106)]
    assert [tuple(entry) for entry in unacked.next_nack(0).entries] == [(102, 103, 0, Verdict.RETRY)], "it comes again"


def test_undecided_unacked_messages_are_requeued():
    unacked = Unacked()
    unacked.held_end = 50
    unacked.subscribed(10, [(10, 20), (30, 31)])
    assert [tuple(entry)[:2] for entry in unacked.next_nack(0).entries] == [(10, 20), (30, 31)]
    assert unacked.next_ack() is None


def test_nothing_is_owed_once_nothing_is_held():
    unacked = Unacked()
    unacked.held_end = 50
    unacked.acked(SentAck([(10, 15)], []))
    unacked.subscribed(10, [(10, 20)])
    unacked.drop()
    assert unacked.is_settled, "or whoever waits for that would wait for ever"


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), max_size=8), st.sets(st.integers(0, 70)))
def test_ranges_without_others_agree_with_sets(pieces, theirs):
    acked = {number for begin, count in pieces for number in range(begin, begin + count)}
    unacked = Unacked()
    for begin, count in pieces:
        unacked.acked(SentAck([(begin, begin + count)], []))
    unacked.subscribed(0, [(number, number + 1) for number in sorted(theirs)])
    ack, nack = unacked.next_ack(), unacked.next_nack(0)
    resent = {number for acked_range in (ack.ranges if ack else ()) for number in range(*acked_range)}
    again = {number for entry in (nack.entries if nack else ()) for number in range(entry.begin, entry.end)}
    assert resent == theirs & acked and again == theirs - acked


def test_delayed_nacks_are_sent_separately():
    unacked, acker = Unacked(), Acker()
    piece, _ = unacked.received(0, 4, 1, acker, "g1")
    for at, due_ms, verdict in [
        (0, 9_000, Verdict.RETRY),
        (1, 0, Verdict.RETRY),
        (2, 9_000, Verdict.DEAD_LETTER),
        (3, 9_000, Verdict.RETRY),
    ]:
        unacked.nack(Refusal(piece, at, due_ms, verdict, "why"))
    later = unacked.next_nack(8_999)
    assert [tuple(entry)[:3] for entry in later.entries] == [(0, 1, 1), (3, 4, 1)]
    others = unacked.next_nack(8_999)
    assert [tuple(entry)[:2] for entry in others.entries] == [(1, 2), (2, 3)] and unacked.next_nack(8_999) is None
    unacked.nacked(others)
    unacked.requeue_nack(later)
    assert [tuple(entry)[:3] for entry in unacked.next_nack(9_000).entries] == [(0, 1, 0), (3, 4, 0)], "it is time"
