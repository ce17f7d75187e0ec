"""Shell. Messages of transactions, through each blocking interface and on each database."""

from __future__ import annotations

import time

import pytest

import qmq.blocking
from qmq import InvalidMessage, InvalidName, Message, Outcome
from qmq.errors import NotServed

PAY = "INSERT INTO orders VALUES (42)"
WAIT_S = 20.0


class Failed(Exception):
    """The application's own."""


def paid(number):
    return Message("order.paid", {"number": number}, id=f"paid-{number}")


def sent(broker):
    return [message.id for message in broker.messages("order.paid")]


def test_message_is_sent_after_the_commit(world, broker, producer):
    with world.begin() as begun:
        begun.execute(PAY)
        later = producer.send(paid(42), session=begun.session)
        producer.flush()
        assert sent(broker) == [] and not later.done()
    assert later.result(WAIT_S).check().message_id == "paid-42"
    producer.flush()
    (message,) = broker.messages("order.paid")
    assert (message.id, message.get_int("number")) == ("paid-42", 42)
    assert (world.orders(), world.rows()) == ([42], [])


def test_rolled_back_message_is_not_sent(world, broker, producer):
    with pytest.raises(Failed), world.begin() as begun:
        begun.execute(PAY)
        later = producer.send(paid(42), session=begun.session)
        raise Failed
    receipt = later.result(WAIT_S)
    assert not receipt.is_stored
    producer.flush()
    assert (sent(broker), world.orders(), world.rows()) == ([], [], [])


def test_messages_end_with_their_savepoint(world, broker, producer):
    with world.begin() as begun:

        def send(number):
            return producer.send(paid(number), session=begun.session)

        send(1)
        with begun.savepoint():
            send(2)
            with pytest.raises(Failed), begun.savepoint():
                send(3)
                with begun.savepoint():
                    send(4)
                raise Failed
            send(5)
        with pytest.raises(Failed), begun.savepoint():
            send(6)
            raise Failed
        with begun.savepoint():
            send(7)
        send(8)
    producer.flush()
    assert sent(broker) == ["paid-1", "paid-2", "paid-5", "paid-7", "paid-8"]
    assert world.rows() == []


def test_many_messages_take_three_statements(world, broker, producer):
    with world.begin() as begun:
        producer.send_many([paid(number) for number in range(900)], session=begun.session)
    producer.flush()
    assert (len(sent(broker)), world.rows()) == (900, [])
    # Other statements of Django, and all of the plain driver, run on an unwatched connection.
    assert world.statements in (["INSERT", "SELECT", "DELETE"], ["INSERT"], [])


def test_row_exists_until_its_message_is_stored(world, broker, producer):
    broker.readonly()
    with world.begin() as begun:
        later = producer.send(paid(42), session=begun.session)
    assert world.rows() == ["paid-42"]
    assert not later.done()
    broker.writable()
    assert later.result(WAIT_S).is_stored
    producer.flush()
    assert (sent(broker), world.rows()) == (["paid-42"], [])


def test_waiting_messages_share_the_timeout(session_world, broker):
    """Otherwise the application would send, once the brokers are back, messages already sent by the watchdog."""
    broker.readonly()
    with qmq.blocking.Producer(metaserver=broker.metaserver, token="any", app="shop", timeout_s=1.0) as producer:
        receipts, began = [], time.monotonic()
        for number in range(30):
            with session_world.begin() as begun:
                receipts.append(producer.send(paid(number), session=begun.session))
        assert not any(receipt.result(WAIT_S).is_stored for receipt in receipts)
        assert time.monotonic() - began < 7, "it were 15 s if they were given up two by two"
        broker.writable()
        producer.flush()
    assert (sent(broker), len(session_world.rows())) == ([], 30)


@pytest.mark.parametrize("key", [None, "k"])
def test_message_without_room_in_time_is_not_sent(broker, producer, key):
    """Like the end of a transaction with messages that take longer than `timeout_s`."""
    assert producer.send(Message("order.paid", id="first")).is_stored
    late = [Message("order.paid", id=f"late-{number}", order_key=key) for number in range(3_000)]
    own = producer._session()
    receipts = own.background.run(own.producer._send_all(late, timeout_ms=0))
    assert len(receipts) == 3_000 and not any(receipt.is_stored for receipt in receipts)
    assert producer.send(paid(1)).is_stored and sent(broker) == ["first", "paid-1"]


def test_only_rows_of_stored_messages_are_deleted(world, broker, producer):
    broker.readonly("order.paid")
    with world.begin() as begun:
        stuck = producer.send(paid(1), session=begun.session)
        producer.send_many([Message("other", id="other-1"), Message("other", id="other-2")], session=begun.session)
    broker.refuse_next(InvalidMessage("it is not wanted"))
    broker.writable()
    stuck.result(WAIT_S)
    producer.flush()
    stored = [message.id for subject in ("order.paid", "other") for message in broker.messages(subject)]
    assert sorted(world.rows() + stored) == ["other-1", "other-2", "paid-1"]
    assert world.rows() != []


def test_message_outside_a_transaction_is_written_first(world, broker, producer):
    broker.readonly()
    later = producer.send(paid(42), session=world.outside)
    assert world.rows() == ["paid-42"]
    broker.writable()
    assert later.result(WAIT_S).is_stored
    producer.flush()
    assert (sent(broker), world.rows()) == (["paid-42"], [])


def test_unwritable_row_does_not_stop_the_send(world, broker, producer):
    world.drop_outbox()
    assert producer.send(paid(42), session=world.outside).result(WAIT_S).is_stored
    assert sent(broker) == ["paid-42"]


def test_unstored_unwritten_message_returns_to_the_application(session_world, broker):
    session_world.drop_outbox()
    broker.readonly()
    with qmq.blocking.Producer(metaserver=broker.metaserver, token="any", app="shop", timeout_s=0.5) as producer:
        receipt = producer.send(paid(42), session=session_world.engine).result(WAIT_S)
    assert (receipt.outcome, type(receipt.error)) == (Outcome.REFUSED, NotServed)
    assert receipt.reason.endswith("not in the outbox")


def test_late_message_is_written_after_all(session_world, broker):
    """The table was missing at `send` and exists when the message is given up."""
    session_world.drop_outbox()
    broker.readonly()
    with qmq.blocking.Producer(metaserver=broker.metaserver, token="any", app="shop", timeout_s=1.0) as producer:
        later = producer.send(paid(42), session=session_world.engine)
        session_world.make_tables()
        assert not later.result(WAIT_S).reason.endswith("not in the outbox")
    assert (sent(broker), session_world.rows()) == ([], ["paid-42"])


def test_invalid_message_is_refused_at_once(session_world, producer):
    with session_world.begin() as begun:
        begun.execute(PAY)
        for message in (Message("a/b"), Message("a", {"qmq_x": "1"}), Message("a", id="")):
            with pytest.raises(InvalidName if message.subject == "a/b" else InvalidMessage):
                producer.send_many([paid(1), message], session=begun.session)
    assert (session_world.orders(), session_world.rows()) == ([42], [])


def test_later_changes_of_a_message_are_ignored(session_world, broker, producer):
    message = paid(42)
    with session_world.begin() as begun:
        producer.send(message, session=begun.session)
        message.properties["number"] = 43
    producer.flush()
    assert broker.messages("order.paid")[0].get_int("number") == 42
