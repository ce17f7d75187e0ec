"""Shell. Looks at stored messages where they are: no consumer notices."""

from __future__ import annotations

from itertools import islice
from typing import Any

from qmq.dead_letters import GROUP, SUBJECT
from qmq.errors import QmqError
from qmq.message import ORDER_KEY
from qmq.metaserver.actions.consumers import groups_of_subject
from qmq.metaserver.actions.desk import Desk, together
from qmq.metaserver.actions.handler import Handler
from qmq.metaserver.actions.words import Words
from qmq.metaserver.model import Group
from qmq.operator_limits import dead_letter_subjects
from qmq.proto import qmq_pb2 as pb
from qmq.rights import CONSUME, Caller
from qmq.subjects import dead_letter_subject, real_subject

Place = tuple[str, dict[str, str]]
"""A subject, and the properties that messages there have to have."""

QUESTIONS_MAX = 20
"""A broker looks for a bounded time at each question; what is rare takes several, and nobody waits for ever."""


async def _browse(desk: Desk, words: Words, caller: Caller) -> Any:
    """As the tools' Browse: all broker groups of the route as one list, with who did not answer."""
    caller.require_subject(CONSUME, words["subject"])
    groups = groups_of_subject(desk, words["subject"], words["brokerGroup"])
    for group in groups:
        caller.require_group(group.name)
    places, limit = _places(desk, words["subject"], words["deadLettersOf"]), words.number("limit")
    newest_first = not words.is_given("since") and not words.is_given("sequence")
    request = pb.BrowseRequest(
        begin=words.number("sequence"),
        since_ms=words.number("since"),
        until_ms=words.number("until"),
        id=words["id"],
        tags=words.names("tag"),
        newest_first=newest_first,
        messages_max=limit,
        with_properties=True,
    )
    asked = [(group, place) for group in groups for place in places]
    found = await together([_look(desk, group, place, request, limit) for group, place in asked])
    unasked = {group.name: str(one) for (group, _), one in zip(asked, found, strict=True) if isinstance(one, QmqError)}
    messages = [message for one in found if not isinstance(one, QmqError) for message in one]
    messages.sort(key=lambda message: message["stored"], reverse=newest_first)
    return {"subject": places[0][0], "messages": messages[:limit], "unasked": unasked}


def _places(desk: Desk, subject: str, dead_letters_of: str) -> list[Place]:
    """Where to look. A group's dead letters are also where an operator had them go, marked as the group's."""
    if not dead_letters_of:
        return [(subject, {})]
    whose = real_subject(subject), dead_letters_of
    places: list[Place] = [(dead_letter_subject(*whose), {})]
    if chosen := dead_letter_subjects(desk.registry.directory.limits).get(whose):
        places.append((chosen, {SUBJECT: whose[0], GROUP: whose[1]}))
    return places


async def _look(
    desk: Desk, group: Group, place: Place, request: pb.BrowseRequest, limit: int
) -> list[dict[str, Any]] | QmqError:
    """The first `limit` messages of one broker group; or why it does not answer."""
    request = pb.BrowseRequest.FromString(request.SerializeToString())
    request.subject = place[0]
    request.properties.update(place[1])
    found: list[dict[str, Any]] = []
    try:
        for _ in range(QUESTIONS_MAX):
            answer = await desk.brokers.browse(desk.master_of(group), request)
            found += [_message_json(group.name, message) for message in answer.messages]
            if len(found) >= limit or answer.begin >= answer.end:
                break
            request.begin, request.end, request.since_ms, request.until_ms = answer.begin, answer.end, 0, 0
    except QmqError as error:
        return error
    return list(islice(found, limit))


def _message_json(broker_group: str, message: pb.BrowsedMessage) -> dict[str, Any]:
    properties = {one.name: one.value for one in message.properties}
    return {
        "brokerGroup": broker_group,
        "sequence": message.sequence,
        "stored": message.stored_ms,
        "created": message.created_ms,
        "id": message.id,
        "tags": sorted(message.tags),
        "orderKey": properties.pop(ORDER_KEY, None),
        "bytes": message.bytes,
        "problem": message.problem,
        "properties": properties,
    }


HANDLERS = {"Browse": Handler(look_as=_browse)}
