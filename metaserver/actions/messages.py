"""Shell. Browse, Produce and Redrive: list stored messages, send one, return dead letters to their consumer group."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from qmq.codec import content_of, encode_message
from qmq.dead_letters import GROUP, SUBJECT
from qmq.errors import NotServed, OperatorError, OutcomeUnknown, QmqError
from qmq.message import ORDER_KEY, Message
from qmq.message_view import body_bytes, body_json, json_type_of, properties_json
from qmq.metaserver.actions.arguments import Arguments
from qmq.metaserver.actions.consumers import groups_of_subject
from qmq.metaserver.actions.context import ActionContext, Handler, PartlyDone, together
from qmq.metaserver.actions.plan import Plan, refused
from qmq.metaserver.model import AuditRow, Group
from qmq.operator_limits import dead_letter_subjects
from qmq.proto import qmq_pb2 as pb
from qmq.redrive.dead_letters import DeadLetters
from qmq.redrive.redriving import Choice, Chosen, Receipt, batches_of
from qmq.rights import CONSUME, PRODUCE, REDRIVE, Caller
from qmq.subjects import dead_letter_subject, is_derived_name, real_subject, retry_subject

Place = tuple[str, dict[str, str]]
"""A subject, and the properties that messages there must have."""

BODIES_BYTES_MAX = 4 << 20
"""Limit for the sum of bodies in one answer; the bodies of later messages are cut."""
QUESTIONS_MAX = 20
"""Number of requests per broker: each searches for a bounded time, so rare messages take several."""


async def _browse(context: ActionContext, arguments: Arguments, caller: Caller) -> Any:
    """List messages as the tools' Browse does: one list over all broker groups, with the missing answers."""
    caller.require_subject(CONSUME, arguments["subject"])
    groups = groups_of_subject(context, arguments["subject"], arguments["brokerGroup"])
    for group in groups:
        caller.require_group(group.name)
    places, limit = _places(context, arguments["subject"], arguments["deadLettersOf"]), arguments.number("limit")
    newest_first = not arguments.is_given("since") and not arguments.is_given("sequence")
    request = pb.BrowseRequest(
        begin=arguments.number("sequence"),
        since_ms=arguments.number("since"),
        until_ms=arguments.number("until"),
        id=arguments["id"],
        tags=arguments.names("tag"),
        properties=_properties(arguments["property"]),
        newest_first=newest_first,
        messages_max=limit,
        with_properties=True,
        body_bytes_max=arguments.number("bodyBytes"),
    )
    asked = [(group, place) for group in groups for place in places]
    found = await together([_look(context, group, place, request, limit) for group, place in asked])
    unasked = {
        group.name: str(answer) for (group, _), answer in zip(asked, found, strict=True) if isinstance(answer, QmqError)
    }
    messages = [
        (group.name, row)
        for (group, _), rows in zip(asked, found, strict=True)
        if not isinstance(rows, QmqError)
        for row in rows
    ]
    messages.sort(key=lambda pair: pair[1].stored_ms, reverse=newest_first)
    shown = await asyncio.to_thread(_messages_json, messages[:limit], request.body_bytes_max)  # bodies are decompressed
    return {"subject": places[0][0], "messages": shown, "unasked": unasked}


def _properties(text: str) -> dict[str, str]:
    """Read `name=value,name=value`. Raises OperatorError."""
    pairs = [pair.partition("=") for pair in text.split(",") if pair]
    if wrong := [name for name, equals, _ in pairs if not (name.strip() and equals)]:
        raise OperatorError(f"property {wrong[0][:100]!r} has no value; write name=value, several separated by commas")
    return {name.strip(): value.strip() for name, _, value in pairs}


def _places(context: ActionContext, subject: str, dead_letters_of: str) -> list[Place]:
    """Return the places to read. A group's dead letters may also be in a subject chosen by an operator, marked as the
    group's.
    """
    if not dead_letters_of:
        return [(subject, {})]
    source = real_subject(subject), dead_letters_of
    places: list[Place] = [(dead_letter_subject(*source), {})]
    if chosen := dead_letter_subjects(context.registry.directory.limits).get(source):
        places.append((chosen, {SUBJECT: source[0], GROUP: source[1]}))
    return places


async def _look(
    context: ActionContext, group: Group, place: Place, request: pb.BrowseRequest, limit: int
) -> list[pb.BrowsedMessage] | QmqError:
    """Return the first `limit` messages of one broker group, or the error."""
    request = pb.BrowseRequest.FromString(request.SerializeToString())
    request.subject = place[0]
    request.properties.update(place[1])
    found: list[pb.BrowsedMessage] = []
    try:
        for _ in range(QUESTIONS_MAX):
            answer = await context.brokers.browse(context.master_of(group), request)
            found += answer.messages
            if len(found) >= limit or answer.begin >= answer.end:
                break
            request.begin, request.end, request.since_ms, request.until_ms = answer.begin, answer.end, 0, 0
    except QmqError as error:
        return error
    return list(islice(found, limit))


def _messages_json(messages: Iterable[tuple[str, pb.BrowsedMessage]], body_bytes_max: int) -> list[dict[str, Any]]:
    """Return the JSON of messages of broker groups. Blocks; runs on a thread."""
    shown, left = [], BODIES_BYTES_MAX
    for broker_group, message in messages:
        shown.append(_message_json(broker_group, message, min(body_bytes_max, left)))
        left -= min(len(shown[-1].get("body", shown[-1].get("bodyBase64", ""))), left)
    return shown


def _message_json(broker_group: str, message: pb.BrowsedMessage, body_bytes_max: int) -> dict[str, Any]:
    content = content_of({property.name: property.value for property in message.properties})
    order_key = content.properties.pop(ORDER_KEY, None)
    properties, types = properties_json(content.properties)
    body = {}
    if message.HasField("body_bytes"):
        body = body_json(
            message.body,
            message.body_bytes,
            content_type=content.type,
            encoding=content.encoding,
            bytes_max=body_bytes_max,
        )
    return {
        "brokerGroup": broker_group,
        "sequence": message.sequence,
        "stored": message.stored_ms,
        "created": message.created_ms,
        "id": message.id,
        "tags": sorted(message.tags),
        "orderKey": order_key,
        "bytes": message.stored_bytes,
        "problem": message.problem,
        "properties": properties,
        **({"propertyTypes": types} if types else {}),
        **body,
    }


log = logging.getLogger("qmq.metaserver")

LOOKED_AT_MAX = 50_000
"""Dead letters read in one run: those not chosen stay unacked to its end, and a broker delivers at most 200,000 unacked
messages to one consumer.
"""
BATCH_MESSAGES_MAX = 500
ALL = (0, 1 << 62)
SHOWN_MAX = 20


@dataclass(slots=True)
class _Taken:
    """Dead letters that stay unacked until the end of `_taking`."""

    chosen: list[tuple[DeadLetters, list[Chosen]]] = field(default_factory=list)
    looked_at: int = 0
    unasked: dict[str, str] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return sum(len(letters) for _, letters in self.chosen)


@asynccontextmanager
async def _taking(context: ActionContext, arguments: Arguments, groups: Sequence[Group]) -> AsyncIterator[_Taken]:
    taken, source_subject = _Taken(), arguments["from"]
    owner = (arguments["subject"], arguments["group"]) if source_subject else None
    choice = Choice(id=arguments["id"], reason=arguments["reason"], owner=owner)
    to = arguments["to"]
    at = [context.master_of(group) for group in groups_of_subject(context, to, "")] if to else []
    async with AsyncExitStack() as stack:
        for group in groups:
            try:
                master = context.master_of(group)
                source = await context.brokers.dead_letters(
                    master, subject=arguments["subject"], group=arguments["group"], to=to, at=at, source=source_subject
                )
                stack.push_async_callback(source.close)
                await _take(taken, source, choice, arguments.number("limit"))
            except QmqError as error:
                taken.unasked[group.name] = str(error)
        yield taken


async def _take(taken: _Taken, source: DeadLetters, choice: Choice, limit: int) -> None:
    chosen: list[Chosen] = []
    taken.chosen.append((source, chosen))
    while taken.count < limit and taken.looked_at < LOOKED_AT_MAX and (pieces := await source.take()):
        taken.looked_at += sum(piece.count for piece in pieces)
        chosen += list(choice.of(source.broker_group, pieces, ALL))[: limit - taken.count]


def _needs_redrive(arguments: Arguments) -> tuple[tuple[str, str], ...]:
    """Return the rights for Redrive. In a subject shared with other groups, all messages are read to choose from."""
    named = ((CONSUME, arguments["from"]), (PRODUCE, arguments["to"]))
    own = (REDRIVE, retry_subject(arguments["subject"], arguments["group"]))
    return (own, *((right, subject) for right, subject in named if subject))


async def _plan_redrive(context: ActionContext, arguments: Arguments) -> Plan:
    to = arguments["to"]
    if is_derived_name(to):
        return refused(f"{to} is written by brokers alone; without a subject they go back to their group")
    try:
        groups = groups_of_subject(context, arguments["subject"], arguments["brokerGroup"])
        others = groups_of_subject(context, to, "") if to else []
    except OperatorError as refusal:
        return refused(str(refusal))
    async with _taking(context, arguments, groups) as taken:
        rows = [letter.json() for _, letters in taken.chosen for letter in letters[:SHOWN_MAX]]
    after = {"deadLetters": taken.looked_at - taken.count, "moved": taken.count, "among them": rows[:SHOWN_MAX]}
    return Plan(
        orders=taken.count > 0,
        subjects=frozenset({to or retry_subject(arguments["subject"], arguments["group"])}),
        groups=frozenset(group.name for group in (*groups, *others)),
        needs=_needs_redrive(arguments),
        before={"deadLetters": taken.looked_at},
        after=after | ({"notAsked": taken.unasked} if taken.unasked else {}),
    )


async def _carry_out_redrive(context: ActionContext, arguments: Arguments, plan: Plan, audit: AuditRow) -> Any:
    """Carry out the move. The audit row is written first, the outcome second."""
    try:
        await context.registry.change((), replace(audit, result="begun"))
    except OutcomeUnknown as error:
        raise NotServed(f"no dead letter was moved, as the database failed: {error}") from error
    receipt = Receipt(arguments["subject"], arguments["group"], arguments["to"])
    groups = groups_of_subject(context, arguments["subject"], arguments["brokerGroup"])
    async with _taking(context, arguments, groups) as taken:
        receipt.looked_at, receipt.unasked = taken.looked_at, taken.unasked
        for source, letters in taken.chosen:
            await _move_all(source, letters, receipt)
    counts = {name: len(getattr(receipt, name)) for name in ("moved", "unknown", "left")}
    is_whole = not (receipt.unknown or receipt.left or receipt.unasked)
    result = "done" if is_whole else "partly done" if receipt.moved or receipt.unknown else "failed"
    try:
        await context.registry.change((), replace(audit, after=counts, result=result))
    except QmqError as error:  # they were moved, and the first row records the beginning
        log.warning("end of Redrive not recorded subject=%s reason=%s", arguments["subject"], error)
    return _as_shown(receipt, counts, is_whole=is_whole)


def _as_shown(receipt: Receipt, counts: dict[str, int], *, is_whole: bool) -> Any:
    shown = {**counts, "unasked": receipt.unasked, "ids": [row["id"] for row in receipt.moved[:SHOWN_MAX]]}
    why = next((str(row["why"]) for row in (*receipt.unknown, *receipt.left)), "; ".join(receipt.unasked.values()))
    if is_whole:
        return shown
    if receipt.moved or receipt.unknown:
        text = (
            f"{counts['moved']} went {receipt.goes_to}, not all: {why}. Messages with an unknown outcome may go twice"
        )
        raise PartlyDone(text, shown)
    raise NotServed(f"no dead letter went {receipt.goes_to}: {why}")


async def _move_all(source: DeadLetters, letters: Sequence[Chosen], receipt: Receipt) -> None:
    why = ""
    for batch in batches_of(letters, messages_max=BATCH_MESSAGES_MAX, bytes_max=source.batch_bytes_max):
        if not why:
            why = await _move(source, batch, receipt)
        else:
            receipt.left += [letter.json(why=why) for letter in batch]


async def _move(source: DeadLetters, batch: Sequence[Chosen], receipt: Receipt) -> str:
    """Move one batch; return the reason to stop, or an empty text."""
    try:
        produced = await source.send_back(batch)
    except OutcomeUnknown as error:
        receipt.unknown += [letter.json(why=str(error)) for letter in batch]
        return str(error)
    except QmqError as error:
        receipt.left += [letter.json(why=str(error)) for letter in batch]
        return str(error)
    refusals = dict(produced.refused)
    receipt.left += [letter.json(why=refusals[at]) for at, letter in enumerate(batch) if at in refusals]
    stored = [letter for at, letter in enumerate(batch) if at not in refusals]
    try:
        if stored:
            await source.settle(stored)
    except QmqError as error:
        why = f"they went back, but may be dead letters still: {error}"
        receipt.unknown += [letter.json(why=why) for letter in stored]
        return why
    receipt.moved += [letter.json() for letter in stored]
    return ""


UNSENT = "-"
"""Id of a message that is only checked."""


def _needs_produce(arguments: Arguments) -> tuple[tuple[str, str], ...]:
    return ((PRODUCE, arguments["subject"]),)


async def _plan_produce(context: ActionContext, arguments: Arguments) -> Plan:
    try:
        message = _message(arguments)
        encode_message(_message(arguments, id=UNSENT), 0)  # raises what the producer would
        groups = groups_of_subject(
            context, arguments["subject"], ""
        )  # without a route, a typing error would make a subject
    except QmqError as refusal:
        return refused(str(refusal))
    if is_derived_name(arguments["subject"]):
        return refused(f"{arguments['subject']} is written by brokers alone")
    return Plan(
        orders=True,
        subjects=frozenset({arguments["subject"]}),
        groups=frozenset(group.name for group in groups),
        needs=_needs_produce(arguments),
        before={},
        after={"message": dict(message.properties), "tags": sorted(message.tags)}
        | ({} if message.body is None else {"body": arguments["body"], "contentType": message.content_type}),
    )


def _message(arguments: Arguments, id: str | None = None) -> Message:
    """Make the message of Produce. Raises OperatorError, InvalidMessage, InvalidName."""
    try:
        value = json.loads(arguments["properties"] or "{}")
    except (ValueError, RecursionError) as error:
        raise OperatorError(f"properties are not JSON: {error}") from None
    if not isinstance(value, dict):
        raise OperatorError('properties are no JSON object; write {"name": "value"}')
    texts = {
        name: json.dumps(item, ensure_ascii=False) if isinstance(item, dict | list) else item
        for name, item in value.items()
        if item is not None
    }
    try:
        body = body_bytes({"body": arguments["body"] or None})
    except ValueError as error:
        raise OperatorError(str(error)) from None
    if body is None and not texts:
        raise OperatorError("the message is empty; give properties or a body")
    if body is None and arguments["contentType"]:
        raise OperatorError("contentType describes the body; give a body")
    content_type = arguments["contentType"] or json_type_of(body)
    return Message(
        arguments["subject"], texts, body=body, content_type=content_type, tags=arguments.names("tags"), id=id
    )


async def _carry_out_produce(context: ActionContext, arguments: Arguments, plan: Plan, audit: AuditRow) -> Any:
    """Send the message. The audit row is written first: a message cannot be taken back."""
    try:
        await context.registry.change((), audit)
    except OutcomeUnknown as error:
        raise NotServed(f"no message was sent, as the database failed: {error}") from error
    receipt = (await context.send(_message(arguments))).check()
    return {"id": receipt.message_id, "brokerGroup": receipt.broker_group, "sequence": receipt.sequence}


HANDLERS = {
    "Produce": Handler(plan=_plan_produce, needs=_needs_produce, carry_out=_carry_out_produce),
    "Browse": Handler(look_as=_browse),
    "Redrive": Handler(plan=_plan_redrive, needs=_needs_redrive, carry_out=_carry_out_redrive),
}
