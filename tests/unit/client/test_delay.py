"""Core. Due time of a message, target of a call, and combined answers of several groups."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest

from qmq.client.batch import MessageIds, Outcome, Receipt, unstored
from qmq.client.bulk import encode_run
from qmq.client.delay import DelayOutcome, Target, delay_of, outcome_of, target_of
from qmq.codec import (
    FLAG_DELAYED,
    batch_encoder,
    decode_envelope,
    decode_message,
    delayed_encoder,
    due_of,
    join_batch,
)
from qmq.errors import InvalidMessage, InvalidRequest, NotServed, QmqError
from qmq.message import Message
from qmq.remoting.commands import DelayState
from qmq.types import Durability

NOW_MS = 1_700_000_000_000
CET = timezone(timedelta(hours=1))


@pytest.mark.parametrize(
    "delay, at, due_ms",
    [
        pytest.param(30, None, NOW_MS + 30_000, id="seconds"),
        pytest.param(0, None, NOW_MS, id="no delay at all is a delay of 0"),
        pytest.param(0.0001, None, NOW_MS + 1, id="parts of a millisecond are never cut off"),
        pytest.param(timedelta(days=400), None, NOW_MS + 400 * 86_400_000, id="timedelta"),
        pytest.param(None, datetime(2030, 1, 1, 1, tzinfo=CET), 1_893_456_000_000, id="another time zone"),
        pytest.param(None, datetime(2030, 1, 1, 0, 0, 0, 1, UTC), 1_893_456_000_001, id="a microsecond later"),
        pytest.param(None, datetime(2001, 9, 9, 1, 46, 40, tzinfo=UTC), 1_000_000_000_000, id="a time that has passed"),
    ],
)
def test_delay_arguments_set_the_due_time(delay, at, due_ms):
    assert delay_of(delay, at, None, now_ms=NOW_MS) == (due_ms, None)


@pytest.mark.parametrize(
    "delay, at, key, says",
    [
        pytest.param(None, datetime(2030, 1, 1), None, r"at\.astimezone\(\).*at\.replace\(tzinfo", id="naive datetime"),
        pytest.param(None, "2030-01-01", None, "not str", id="a text"),
        pytest.param(1, datetime(2030, 1, 1, tzinfo=UTC), None, "one of delay=", id="both"),
        pytest.param(None, None, "k", "one of delay=", id="a key without a delay"),
        pytest.param(-1, None, None, "0 seconds or more", id="negative"),
        pytest.param(timedelta(seconds=-1), None, None, "0 seconds or more", id="negative timedelta"),
        pytest.param(True, None, None, "not True", id="a bool"),
        pytest.param("5", None, None, "not '5'", id="a number as text"),
        pytest.param(float("nan"), None, None, "not nan", id="not a number"),
        pytest.param(1e15, None, None, "9999", id="beyond the calendar"),
        pytest.param(1, None, "", "1 to 100 bytes", id="empty key"),
        pytest.param(1, None, "k" * 101, "1 to 100 bytes", id="long key"),
    ],
)
def test_invalid_delay_shows_the_remedy(delay, at, key, says):
    with pytest.raises(InvalidRequest, match=says):
        delay_of(delay, at, key, now_ms=NOW_MS)


@pytest.mark.parametrize("tags", [(), ("a", "b")], ids=["plain", "tagged"])
def test_delayed_encoding_differs_in_two_fields(tags):
    message = Message("s", {"n": "1"}, tags=tags, id="id")
    plain, delayed = batch_encoder("s", NOW_MS)(message), delayed_encoder("s", NOW_MS, NOW_MS + 5)(message)
    assert due_of(plain) is None and due_of(delayed) == NOW_MS + 5
    assert decode_envelope(delayed).flag == decode_envelope(plain).flag | FLAG_DELAYED
    assert delayed[1:9] == plain[1:9] and delayed[17:] == plain[17:]
    assert decode_message(delayed).properties == {"n": "1"}


def test_bytes_that_are_no_message_are_never_due():
    with pytest.raises(InvalidMessage):
        due_of(b"\x02short")


def test_delayed_run_matches_the_encoder():
    messages = [Message("s", {"n": n, "text": "ü" * n}, tags={"t"} if n % 3 else (), id=f"i{n}") for n in range(20)]
    run = encode_run("s", messages, ids=MessageIds("p"), now_ms=NOW_MS, due_ms=NOW_MS + 9)
    one = delayed_encoder("s", NOW_MS, NOW_MS + 9)
    assert b"".join(run.blocks).startswith(join_batch([one(message) for message in messages]))


def test_the_key_travels_with_the_message():
    delay = delay_of(1, None, "order-42", now_ms=NOW_MS)
    data = delay.encode(Message("s", {"n": "1"}, id="i"), NOW_MS)
    assert decode_message(data).properties == {"n": "1", "qmq_delayKey": "order-42"} and due_of(data) == NOW_MS + 1000


STORED = Receipt(Outcome.STORED, "i", "s", "d1", 0, Durability.FSYNC, due_ms=NOW_MS)
UNSURE = unstored(Outcome.UNKNOWN, "i", "s", "d1", QmqError("no answer"), NOW_MS)


@pytest.mark.parametrize(
    "arguments, one",
    [
        pytest.param((STORED, None, None, None), Target("s", "i", "", "d1", NOW_MS), id="stored: its group alone"),
        pytest.param((UNSURE, None, None, None), Target("s", "i", "", "", NOW_MS), id="maybe stored: any group"),
        pytest.param((None, "s", "i", None), Target("s", "i", ""), id="id"),
        pytest.param((None, "s", None, "k"), Target("s", "", "k"), id="key"),
    ],
)
def test_a_call_names_a_message(arguments, one):
    assert target_of(*arguments) == one


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param((None, None, "i", None), id="no subject"),
        pytest.param((None, "s", None, None), id="neither id nor key"),
        pytest.param((None, "s", "i", "k"), id="both"),
        pytest.param((STORED, "s", None, None), id="a receipt and more"),
        pytest.param((STORED._replace(due_ms=None), None, None, None), id="a message that was not delayed"),
    ],
)
def test_call_without_target_is_refused(arguments):
    with pytest.raises(InvalidRequest):
        target_of(*arguments)


ID, KEY = Target("s", "i", ""), Target("s", "", "k")
AWAY = NotServed("d2 does not answer")


@pytest.mark.parametrize(
    "one, states, outcome",
    [
        pytest.param(ID, "unknown unknown", "unknown", id="nobody has it"),
        pytest.param(ID, "unknown cancelled", "cancelled", id="the second has it"),
        pytest.param(ID, "sent unknown", "sent", id="it was sent"),
        pytest.param(KEY, "sent cancelled", "cancelled", id="of a key, one was sent and one taken back"),
        pytest.param(KEY, "cancelled rescheduled", "rescheduled", id="of a key, one still waited"),
        pytest.param(ID, "cancelled away", "cancelled", id="of an id there is one message: who is away has it not"),
        pytest.param(ID, "sent away", "sent", id="sent, whoever is away"),
        pytest.param(ID, "unknown away", None, id="who is away may have it"),
        pytest.param(KEY, "cancelled away", None, id="who is away may have more of the key"),
        pytest.param(ID, "away away", None, id="all are away"),
    ],
)
def test_unknown_needs_all_answers(one, states, outcome):
    answers = [DelayState(state) for state in states.split() if state != "away"]
    silent = [AWAY] * states.split().count("away")
    if outcome is None:
        with pytest.raises(NotServed):
            outcome_of(one, answers, silent)
    else:
        assert outcome_of(one, answers, silent) is DelayOutcome(outcome)


def test_a_refusal_counts_more_than_silence():
    with pytest.raises(InvalidRequest):
        outcome_of(ID, [], [AWAY, InvalidRequest("due in 800 days; this delay server takes at most 730")])
