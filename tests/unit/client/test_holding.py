"""Core. What a consumer holds and acks, against a plain set."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmq.client.holding import HeldPiece, Holding, ReceivedMessage
from qmq.codec import batch_encoder
from qmq.errors import InvalidMessage
from qmq.message import Message


class Acker:
    def __init__(self) -> None:
        self.told = 0

    def done(self, piece: HeldPiece) -> None:
        self.told += 1


class Broker:
    """The rules of a broker about acks, as plainly as they can be written."""

    def __init__(self) -> None:
        self.unacked: set[int] = set()
        self.next = 0
        self.acked_end = 0

    def hand_out(self, count: int, jump: int) -> int:
        begin = self.next + jump
        self.unacked.update(range(begin, begin + count))
        self.next = begin + count
        return begin

    def ack(self, begin: int, end: int) -> None:
        assert begin < end <= self.next, "acks what was not handed out"
        assert not any(at < begin for at in self.unacked), "jumps over something un-acked"
        self.unacked = {at for at in self.unacked if at >= end}
        self.acked_end = max(self.acked_end, end)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("pull"), st.integers(1, 6), st.sampled_from([0, 0, 0, 1, 1 << 32])),
        st.tuples(st.just("done"), st.integers(0, 1000)),
        st.tuples(st.just("done"), st.integers(0, 3)),
        st.just(("ack",)),
        st.just(("answer",)),
        st.tuples(st.just("reconnect"), st.booleans()),
    ),
    max_size=120,
)


@given(STEPS)
def test_acks_cover_exactly_the_done_prefix_through_jumps_and_reconnects(steps):
    broker, holding, acker = Broker(), Holding(), Acker()
    held: dict[int, tuple[HeldPiece, int]] = {}
    done: set[int] = set()
    flying: list[tuple[int, int]] = []
    for step in steps:
        match step:
            case ("pull", count, jump):
                begin = broker.hand_out(count, jump)
                received = holding.received(begin, count, acker, "g1")
                assert received is not None and received[1] == 0
                held.update({begin + at: (received[0], at) for at in range(count)})
            case ("done", choice) if open_ := sorted(held.keys() - done):
                at = open_[choice % len(open_)]
                held[at][0].mark(held[at][1])
                held[at][0].mark(held[at][1])
                done.add(at)
            case ("ack",):
                if ack := holding.next_ack():
                    flying.append(ack)
            case ("answer",) if flying:
                begin, end = flying.pop(0)
                broker.ack(begin, end)
                holding.acked(end)
            case ("reconnect", arrived):
                for begin, end in flying if arrived else []:
                    broker.ack(begin, end)
                flying.clear()
                assert holding.held_end == (max(held) + 1 if held else 0)
                holding.subscribed(broker.acked_end)
        undone = held.keys() - done
        prefix = {at for at in done if not undone or at < min(undone)}
        assert broker.unacked >= undone, "never acked without being done"
        assert holding.held >= len(undone)
        holding.advance()
        assert holding.done_end == max(prefix, default=-1) + 1 or holding.done_end <= broker.acked_end
    for ack in flying:
        broker.ack(*ack)
    if ack := holding.next_ack():
        broker.ack(*ack)
    undone = held.keys() - done
    assert broker.unacked == {at for at in held if undone and at >= min(undone)}


def test_what_is_handed_out_again_is_not_held_twice():
    holding = Holding()
    holding.received(10, 5, Acker(), "g1")
    assert holding.received(10, 5, Acker(), "g1") is None
    again = holding.received(12, 6, Acker(), "g1")
    assert again is not None
    assert (again[0].begin, again[0].end, again[1]) == (15, 18, 3)
    assert (holding.held, holding.held_end) == (8, 18)


def test_what_the_broker_counts_as_acked_is_not_ours_any_more():
    holding = Holding()
    holding.received(0, 4, Acker(), "g1")
    second = holding.received(4, 4, Acker(), "g1")
    assert second is not None
    holding.subscribed(6)
    assert holding.held == 4
    assert holding.next_ack() is None
    for at in (2, 3):
        second[0].mark(at)
    assert holding.next_ack() == (6, 8)
    assert holding.held == 0


def received(message: Message) -> tuple[ReceivedMessage, Acker]:
    acker = Acker()
    data = batch_encoder(message.subject, 1234)(message)
    return ReceivedMessage(message.subject, 7, data, HeldPiece(5, 3, acker, "g1"), 2), acker


def test_a_received_message_reads_like_the_one_that_was_sent():
    message, _ = received(Message("order.changed", {"orderNo": "42", "sum": 7}, tags={"pay", "é"}, id="id-1"))
    assert (message.subject, message.id, message.tags, message.created_ms) == (
        "order.changed", "id-1", {"pay", "é"}, 1234,
    )  # fmt: skip
    assert message.properties == {"orderNo": "42", "sum": "7"}
    assert (message["sum"], message.get("none", 1)) == ("7", 1)
    assert (message.sequence, message.pull_sequence, message.broker_group, message.attempts) == (7, 7, "g1", 0)
    assert "order.changed" in repr(message)
    with pytest.raises(AttributeError):
        message.nothing  # noqa: B018


def test_bytes_that_are_no_message_are_found_when_they_are_looked_at():
    message = ReceivedMessage("a", 0, b"garbage" * 10, HeldPiece(0, 1, Acker(), "g1"), 0)
    with pytest.raises(InvalidMessage):
        message.properties  # noqa: B018
    with pytest.raises(InvalidMessage):
        message.id  # noqa: B018
