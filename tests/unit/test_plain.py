"""Core. Texts and numbers of an application's own classes count by their value, in every argument."""

from __future__ import annotations

import asyncio
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from types import SimpleNamespace
from typing import Any

import pytest

import qmq
import qmq.blocking
import qmq.testing
from qmq.access import find_token
from qmq.client.delay import delay_of, schedule_request
from qmq.client.terms import RetryPolicy, make_terms, refused_by_error
from qmq.codec import encode_message
from qmq.control_plane import metaserver_urls
from qmq.idempotence.tables import HandledTable
from qmq.message import text_of
from qmq.outbox.row import decode_row, encode_row
from qmq.outbox.table import table_name
from qmq.plain import first_of, plain
from qmq.subjects import dead_letter_subject, retry_subject
from qmq.testing.conditions import consumed


class Word(str, Enum):  # noqa: UP042
    A, B, C1, LATEST, ANY, URL = "a", "b", "c1", "latest", "any", "http://10.0.0.1:8080"


class Number(int, Enum):
    NINE = 9


class Ratio(float, Enum):
    HALF = 0.5


class Loud(str):
    __slots__ = ()

    def __str__(self) -> str:
        return "LOUD"

    def __format__(self, how: str) -> str:
        return "LOUD"


class Id(int):
    def __str__(self) -> str:
        return "id"

    __repr__ = __format__ = __str__  # type: ignore[assignment]


class Quiet(StrEnum):
    A = "a"


class Level(IntEnum):
    NINE = 9


class Secret:
    def get_secret_value(self) -> str:
        return "secret"


class Scalar:
    """Like a number of numpy, which is no int."""

    def __int__(self) -> int:
        return 9


def is_plain(value: object, expected: object) -> bool:
    return type(value) is type(expected) and value == expected


@pytest.mark.parametrize(
    ("value", "text"),
    [(Word.A, "a"), (Loud("a"), "a"), (Quiet.A, "a"), (Number.NINE, "9"), (Level.NINE, "9"), (Id(9), "9")]
    + [(Ratio.HALF, "0.5"), (True, "true")],
)
def test_a_property_travels_as_its_value(value, text):
    assert is_plain(text_of(value), text)
    message = qmq.Message("a", {Word.B: value}, id="1")
    row = decode_row(encode_row(message, 0))
    assert text_of(row["b"]) == text
    assert encode_message(message, 0) == encode_message(qmq.Message("a", {"b": plain(value)}, id="1"), 0)


def test_message_fields_are_plain_values():
    later = qmq.Message("x")
    later.subject, later.id, later.order_key, later.tags = Word.A, Word.B, Word.C1, frozenset({Word.A})
    later.retries_max, later.properties = Number.NINE, {Word.A: Word.B}
    given: dict[str, Any] = {"tags": {Word.A}, "order_key": Word.C1, "retries_max": Number.NINE}
    made = qmq.Message(Word.A, {Word.A: Word.B}, id=Word.B, **given)
    plain = qmq.Message("a", {"a": "b"}, id="b", tags={"a"}, order_key="c1", retries_max=9)
    assert encode_message(later, 0) == encode_message(made, 0) == encode_message(plain, 0)
    assert encode_row(later, 0) == encode_row(made, 0) == encode_row(plain, 0)
    assert all(is_plain(tag, "a") for tag in (made.subject, *made.tags)) and is_plain(made.id, "b")
    made.set_large(Loud("c"), Loud("c" * 9_000))
    assert list(made.properties)[1:] == ["c#part0", "c#part1"] and made.get_large(Loud("c")) == "c" * 9_000


def test_names_are_made_of_values():
    """Regression: two consumer groups of one enumeration shared a retry subject."""
    assert (retry_subject(Loud("a"), Loud("b")), retry_subject(Word.A, Word.B)) == ("%RETRY%a%b",) * 2
    assert dead_letter_subject(Word.A, Word.B) == "%DEAD_RETRY%a%b"
    numbers = dict.fromkeys(("retries_max", "prefetch_messages", "prefetch_bytes", "unacked_max"), Number.NINE)
    words: dict[str, Any] = {"start": Word.LATEST, "tag_mode": Word.ANY, "tags": [Word.A], "retry_delay": Ratio.HALF}
    asked = make_terms(
        subject=Word.A, group=Word.B, consumer="c1", broadcast=False, most_once=False, **words, **numbers
    )
    found = (asked.subject, asked.group, asked.start, asked.tag_mode, asked.tags[0], asked.policy.delay_s)
    assert all(map(is_plain, found, ("a", "b", "latest", "any", "a", 0.5))) and asked.mailbox == "%RETRY%a%b"
    assert is_plain(asked.prefetch_bytes, 9) and is_plain(asked.policy.deliveries_max, 9)


def test_addresses_tokens_tables_and_reasons_are_values():
    assert is_plain(metaserver_urls(Word.URL), "http://10.0.0.1:8080")
    assert metaserver_urls(Loud("h:1")) == "http://h:1"
    assert is_plain(find_token(Word.A), "a") and is_plain(table_name(Word.A), "a")
    assert str(HandledTable(Loud("keys")).table.name) == "keys"
    message: Any = SimpleNamespace(times=1, properties={})
    for error in (qmq.DeadLetter(Word.A), qmq.DeadLetter(Loud("a"))):
        assert is_plain(refused_by_error(message, RetryPolicy(3, 1.0), error, None).reason, "a")  # type: ignore[arg-type]
    assert str(qmq.RetryLater(Id(9))) == "retry in 9 s"
    assert is_plain(delay_of(1, None, Loud("a"), now_ms=0).key, "a")
    put = schedule_request(qmq.Message("a"), name=Loud("a"), cron=Loud("a"), timezone=Loud("a"), owner=Loud("a"))
    wish = consumed(Loud("a"), Loud("a"), True)
    assert all(is_plain(one, "a") for one in (put.name, put.owner, put.cron, put.timezone, wish.subject, wish.group))


async def test_plain_values_round_trip(qmq_broker):
    """Through every call that takes a name, a retry, a dead letter, a recall and a requester."""
    broker = qmq_broker
    got: list[qmq.ReceivedMessage] = []

    asked = {"metaserver": Loud(broker.metaserver), "app": Word.A, "token": Word.A}
    consumer = qmq.Consumer(**asked, consumer_id=Word.C1)
    options: dict[str, Any] = {"start": "earliest", "retries_max": Number.NINE, "retry_delay": Ratio.HALF}

    @consumer.listen(Word.A, group=Word.B, tags=[Word.A], **options)
    async def handler(message: qmq.ReceivedMessage) -> None:
        got.append(message)
        if message.times == 1:
            raise ValueError
        raise qmq.DeadLetter(Word.C1)

    async with qmq.Producer(**asked) as producer:
        assigned = qmq.Message("x", {"n": Number.NINE}, tags={Word.A})
        assigned.subject, assigned.id = Word.A, Word.B
        (first,) = await producer.send_many([assigned])
        ordered = qmq.Message(Word.A, order_key=Word.A)
        ordered.id = Word.C1
        (mixed,) = await producer.send_many([ordered])
        for receipt, id in ((first, "b"), (mixed, "c1")):
            assert is_plain(receipt.message_id, id) and is_plain(receipt.subject, "a")
        later = qmq.Message(Word.B, id=Word.A)
        await producer.send(later, delay=Number.NINE, key=Word.C1)
        assert [one.id for one in broker.delayed(Word.B)] == ["a"]
        assert await producer.cancel(subject=Word.B, key=Word.C1) is qmq.DelayOutcome.CANCELLED
        schedule = await producer.put_recurring(
            qmq.Message(Word.B), name=Word.A, cron="0 8 * * *", timezone="UTC", owner=Word.C1
        )
        assert (schedule.name, schedule.owner) == ("a", "c1")
        assert await producer.delete_recurring(subject=Word.B, name=Word.A)
    running = asyncio.create_task(consumer.run())
    await broker.wait_until_consumed(Word.A, Word.B)
    consumer.stop()
    await running
    assert [(one.id, one["n"], one.tags) for one in got] == [("b", 9, {"a"})] * 2
    (dead,) = broker.dead_letters(Word.A, Word.B)
    assert (dead.id, dead["qmq_deadReason"]) == ("b", "c1")
    assert [message.id for message in broker.messages(Loud("a"))] == ["b", "c1"]


@pytest.mark.parametrize("value", [Scalar(), Decimal(1), Secret(), b"a", None])
def test_value_without_plain_form_is_rejected(value):
    for message in (qmq.Message("a", {"n": value}, id="1"), qmq.Message("a", {value: 1}, id="1")):
        with pytest.raises(qmq.InvalidMessage, match=r"str\(\)"):
            encode_message(message, 0)
    with pytest.raises(qmq.InvalidName, match="give its text"):
        retry_subject_of(value)
    with pytest.raises(qmq.InvalidRequest, match=r"str\(\)|get_secret_value\(\)|set QMQ_APP"):
        qmq.Producer(metaserver="http://h:1", app=value)
    if value is not None:
        with pytest.raises(qmq.InvalidRequest, match=r"str\(\)|get_secret_value\(\)"):
            qmq.blocking.Consumer(metaserver="http://h:1", app="a", token=value)


def retry_subject_of(group: Any) -> None:
    qmq.Consumer(metaserver="http://h:1", app="a", token="t", consumer_id="c").listen(group, group="g")


def test_first_names_are_listed_and_the_others_counted():
    assert first_of(["a", "b", "c"]) == "a, b, c" and first_of([]) == ""
    assert first_of(list("abcdefg"), 5) == "a, b, c, d, e and 2 more"
