"""Shell. Produce and Consume: send and read messages as a client does. Consume returns messages it does not ack."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import islice
from typing import Any

import qmq
from qmq.client.batch import Receipt
from qmq.codec import content_of, decode_properties, encode_message, stored_body
from qmq.message_sizes import BODY_BYTES_MAX
from qmq.message_view import body_facts, body_json
from qmq.tools.call import Exit
from qmq.tools.files import STANDARD_STREAM, read_body
from qmq.tools.messages.brokers import APP, Unanswered, find_masters, run_on_loop
from qmq.tools.messages.lines import PREVIEW_BYTES, line_of, message_json, to_json, typed_messages, words_of
from qmq.tools.session import Session
from qmq.tools.table import printable
from qmq.tools.terminal import complain

SENT_AT_ONCE = 1_000
"""Messages read before the first batch is sent."""


def produce(session: Session) -> Exit:
    try:
        return run_on_loop(session, _produce)
    except KeyboardInterrupt:
        if session.values["dry-run"] == "true":
            raise
        complain("interrupted: messages without a line above may be stored")
        return Exit.UNKNOWN


async def _produce(session: Session) -> Exit:
    values = session.values
    body = read_body(values["body"]) if values["body"] else None
    if session.values["dry-run"] == "true":
        with _lines(values["file"]) as lines:
            return _check(session, typed_messages(values, lines, body))
    await find_masters(session, values["subject"])  # an unreachable metaserver is reported at once
    outcomes: set[qmq.Outcome] = set()
    timeout_s = int(values["wait"]) / 1000
    async with qmq.Producer(
        metaserver=session.metaserver.url, app=APP, token=session.token_source or None, timeout_s=timeout_s
    ) as producer:
        with _lines(values["file"]) as lines:
            messages = iter(typed_messages(values, lines, body))
            while chunk := list(islice(messages, SENT_AT_ONCE)):
                receipts = iter(await producer.send_many([line for line in chunk if isinstance(line, qmq.Message)]))
                try:
                    for line in chunk:
                        outcomes.add(_print_outcome(session, line if isinstance(line, str) else next(receipts)))
                except BrokenPipeError:  # the reader of the output is gone
                    raise
                except OSError as error:
                    complain(f"the outcome of {len(chunk):,} messages that were sent could not be written: {error}")
                    return Exit.UNKNOWN
    return _exit(outcomes)


@contextmanager
def _lines(path: str) -> Iterator[Iterable[str]]:
    """Yield the lines of a file. Invalid UTF-8 stays in its line, so that only that message is rejected."""
    if not path:
        yield ()
        return
    where = sys.stdin.fileno() if path == STANDARD_STREAM else path
    with open(where, encoding="utf-8", errors="surrogateescape", closefd=path != STANDARD_STREAM) as file:
        yield file


def _check(session: Session, messages: Iterable[qmq.Message | str]) -> Exit:
    """Report for each message whether it could be sent."""
    outcomes = set()
    for message in messages:
        reason = message if isinstance(message, str) else _problem(message)
        outcomes.add(qmq.Outcome.REFUSED if reason else qmq.Outcome.STORED)
        if isinstance(message, str) or reason:
            _print(session, outcome="refused", reason=reason)
        else:
            size = None if message.body is None else len(message.body)
            facts = {"contentType": message.content_type, "bodyBytes": size}
            _print(session, outcome="would be sent", id=message.id, properties=dict(message.properties), **facts)
    return _exit(outcomes)


def _problem(message: qmq.Message) -> str:
    try:
        encode_message(
            qmq.Message(
                message.subject,
                message.properties,
                body=message.body,
                content_type=message.content_type,
                tags=message.tags,
                id=message.id or "-",
                order_key=message.order_key,
            ),
            0,
        )
    except qmq.QmqError as error:
        return str(error)
    return ""


def _print_outcome(session: Session, receipt: Receipt | str) -> qmq.Outcome:
    """Print the outcome of a message."""
    if isinstance(receipt, str):
        _print(session, outcome=qmq.Outcome.REFUSED.value, reason=receipt)
        return qmq.Outcome.REFUSED
    place = {"brokerGroup": receipt.broker_group, "sequence": receipt.sequence} if receipt.is_stored else {}
    _print(session, outcome=receipt.outcome.value, id=receipt.message_id, **place, reason=receipt.reason)
    return receipt.outcome


def _print(session: Session, **fields: Any) -> None:
    """Print one line about a message; empty fields are left out."""
    fields = {name: value for name, value in fields.items() if value not in (None, "")}
    if session.as_json:
        print(to_json(fields))
        return
    place = f"{fields['brokerGroup']}/{fields['sequence']}" if "sequence" in fields else ""
    content = to_json(fields["properties"]) if "properties" in fields else ""
    cells = (fields["outcome"], fields.get("id"), place, content, body_facts(fields), fields.get("reason"))
    print(printable("  ".join(filter(None, cells))))


def _exit(outcomes: set[qmq.Outcome]) -> Exit:
    if not outcomes:
        complain("there was no message to send")
        return Exit.USAGE
    if qmq.Outcome.UNKNOWN in outcomes:
        complain("some messages may be stored; sending them again may store them twice")
        return Exit.UNKNOWN
    return Exit.REFUSED if qmq.Outcome.REFUSED in outcomes else Exit.DONE


PULLED_AT_ONCE = 500
FOR_EVER_S = 3_600.0
DELIVERIES_MAX = 1_000_000
"""Reading never makes a dead letter of a message."""


def consume(session: Session) -> Exit:
    try:
        return run_on_loop(session, _consume)
    except KeyboardInterrupt:
        return Exit.DONE


async def _consume(session: Session) -> Exit:
    values, is_acked = session.values, session.values["ack"] == "true"
    await find_masters(session, values["subject"])  # an unreachable metaserver is reported at once
    form = "json" if session.as_json else values["format"]
    try:
        consumer = qmq.Consumer(metaserver=session.metaserver.url, app=APP, token=session.token_source or None)
        async with consumer.pull(values["subject"], **_options(values)) as puller:
            left = int(values["limit"] or 0) or PULLED_AT_ONCE
            while left:
                messages = await puller.pull(min(left, PULLED_AT_ONCE), timeout=_wait_s(values))
                for message in messages:
                    print(line_of(_json(message, is_whole=form == "json"), form), flush=True)
                if is_acked:
                    await puller.ack(messages)
                left -= len(messages) if values["limit"] else 0
                if not messages and values["wait"]:
                    break
            await puller.flush()
    except qmq.QmqError as error:
        raise Unanswered(Exit.REFUSED, str(error)) from None
    return Exit.DONE


def _options(values: Mapping[str, str]) -> dict[str, Any]:
    """Return arguments of `Consumer.pull`. Without a group, the consumer gets its own, which brokers forget later."""
    options: dict[str, Any] = {
        "group": values["group"] or None,
        "broadcast": not values["group"],
        "tags": words_of(values["tags"]),
        "start": _start(values["start"]),
        "retries_max": DELIVERIES_MAX,
    }
    if limit := int(values["limit"] or 0):
        options["prefetch_messages"] = limit  # do not hold messages that will not be shown
    return options


def _start(text: str) -> str | datetime:
    return datetime.fromtimestamp(int(text) / 1000, UTC) if text.isdigit() else text


def _wait_s(values: Mapping[str, str]) -> float:
    return int(values["wait"]) / 1000 if values["wait"] else FOR_EVER_S


def _json(message: qmq.ReceivedMessage, *, is_whole: bool) -> dict[str, Any]:
    stored, body = stored_body(message.encoded), None
    if stored is not None:
        content = content_of(decode_properties(message.encoded))
        size = BODY_BYTES_MAX if is_whole else PREVIEW_BYTES
        body = body_json(stored, len(stored), content_type=content.type, encoding=content.encoding, bytes_max=size)
    return message_json(
        id=str(message.id),
        broker_group=message.broker_group,
        sequence=message.sequence,
        properties=message.properties,
        tags=message.tags,
        created_ms=message.created_ms,
        body=body,
        times=message.times,
        order_key=message.order_key,
    )
