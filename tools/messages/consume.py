"""Shell. Consume: reads messages as a consumer does. What is not acked goes back to its group when this ends."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import qmq
from qmq.tools.answer import Exit
from qmq.tools.messages.brokers import APP, Unanswered, ended, find_masters
from qmq.tools.messages.lines import words_of
from qmq.tools.messages.shown import line_of, message_json
from qmq.tools.session import Session

AT_ONCE = 500
FOR_EVER_S = 3_600.0
HAND_OVERS_MAX = 1_000_000
"""Looking does not make a dead letter of a message."""


def run(session: Session) -> Exit:
    try:
        return ended(session, _consume)
    except KeyboardInterrupt:
        return Exit.DONE


async def _consume(session: Session) -> Exit:
    values, is_acked = session.values, session.values["ack"] == "true"
    await find_masters(session, values["subject"])  # who cannot be reached at all is told so at once
    form = "json" if session.as_json else values["format"]
    try:
        consumer = qmq.Consumer(metaserver=session.metaserver.url, app=APP, token=session.token)
        async with consumer.pull(values["subject"], **_options(values)) as puller:
            left = int(values["limit"] or 0) or AT_ONCE
            while left:
                messages = await puller.pull(min(left, AT_ONCE), timeout=_wait_s(values))
                for message in messages:
                    print(line_of(_json(message), form), flush=True)
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
    """Arguments of `Consumer.pull`: without a group, the consumer is one of its own, which the brokers forget later."""
    options: dict[str, Any] = {
        "group": values["group"],
        "broadcast": not values["group"],
        "tags": words_of(values["tags"]),
        "start": _start(values["start"]),
        "retries_max": HAND_OVERS_MAX,
    }
    if limit := int(values["limit"] or 0):
        options["prefetch_messages"] = limit  # others are not kept from what is not going to be shown
    return options


def _start(text: str) -> str | datetime:
    return datetime.fromtimestamp(int(text) / 1000, UTC) if text.isdigit() else text


def _wait_s(values: Mapping[str, str]) -> float:
    return int(values["wait"]) / 1000 if values["wait"] else FOR_EVER_S


def _json(message: qmq.ReceivedMessage) -> dict[str, Any]:
    return message_json(
        id=str(message.id),
        broker_group=message.broker_group,
        sequence=message.sequence,
        properties=message.properties,
        tags=message.tags,
        created_ms=message.created_ms,
        times=message.times,
        order_key=message.order_key,
    )
