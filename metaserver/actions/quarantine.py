"""Shell. ListQuarantine and ClearQuarantine: parts of logs that were set aside beside a copy."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Any

from qmq.errors import NotServed, OperatorError, OutcomeUnknown, QmqError
from qmq.metaserver.actions.desk import Desk, Handler
from qmq.metaserver.actions.plan import Plan, refused
from qmq.metaserver.actions.words import Words
from qmq.metaserver.model import AuditRow, Broker, Group
from qmq.proto import qmq_pb2 as pb

log = logging.getLogger("qmq.metaserver")


async def _list(desk: Desk, words: Words) -> Any:
    brokers = desk.find_group(words["brokerGroup"]).brokers
    answers = await asyncio.gather(*(_ask(desk, broker) for broker in brokers))
    return {
        "brokers": [_copy_json(broker, found) for broker, found in zip(brokers, answers, strict=True)],
        "unasked": {
            str(broker.key): str(found)
            for broker, found in zip(brokers, answers, strict=True)
            if isinstance(found, QmqError)
        },
    }


async def _ask(desk: Desk, broker: Broker) -> pb.QuarantineAnswer | QmqError:
    try:
        return await desk.brokers.quarantine(broker, pb.QuarantineRequest())
    except QmqError as error:
        return error


def _copy_json(broker: Broker, answer: pb.QuarantineAnswer | QmqError) -> dict[str, Any]:
    parts = [] if isinstance(answer, QmqError) else [_part_json(part) for part in answer.parts]
    return {
        "hostname": broker.hostname,
        "servePort": broker.serve_port,
        "bytes": sum(part["bytes"] for part in parts),
        "bytesMax": None if isinstance(answer, QmqError) else answer.bytes_max,
        "parts": parts,
    }


def _part_json(part: pb.KeptPart) -> dict[str, Any]:
    return {
        "name": part.name,
        "begin": part.begin,
        "end": part.end,
        "why": part.why,
        "bytes": part.bytes,
        "messages": part.messages,
        "evidence": part.evidence,
    }


async def _plan_clear(desk: Desk, words: Words) -> Plan:
    """Evidence is cleared by name only, so an operator must have seen it."""
    try:
        broker = _broker_at(desk.find_group(words["brokerGroup"]), words["host"])
        answer = await desk.brokers.quarantine(broker, pb.QuarantineRequest())
    except OperatorError as refusal:
        return refused(str(refusal))
    named, parts = words.names("parts"), [_part_json(part) for part in answer.parts]
    if unknown := set(named) - {part["name"] for part in parts}:
        return refused(f"{', '.join(sorted(unknown))}: {broker.key} has no such part; ListQuarantine names them")
    cleared = [part for part in parts if (part["name"] in named if named else not part["evidence"])]
    evidence = len(parts) - len(cleared)
    if not cleared:
        more = f"; {evidence} parts are evidence, and go by name: --parts" if evidence else ""
        return refused(f"{broker.key} has nothing to clear{more}")
    return Plan(orders=True, groups=frozenset({broker.group}), before=cleared, after=[])


async def _carry_out_clear(desk: Desk, words: Words, plan: Plan, audit: AuditRow) -> Any:
    """The audit row is written first: cleared parts are gone."""
    broker = _broker_at(desk.find_group(words["brokerGroup"]), words["host"])
    try:
        await desk.registry.change((), replace(audit, result="begun"))
    except OutcomeUnknown as error:
        raise NotServed(f"nothing was cleared, as the database failed: {error}") from error
    request = pb.QuarantineRequest(cleared=[part["name"] for part in plan.before])
    answer = await desk.brokers.quarantine(broker, request)
    cleared = [_part_json(part) for part in answer.parts]
    try:
        await desk.registry.change((), replace(audit, after={"cleared": cleared}, result="done"))
    except QmqError as error:  # it is cleared, and the first row records the beginning
        log.warning("end of ClearQuarantine not recorded broker=%s reason=%s", broker.key, error)
    return {"broker": str(broker.key), "bytes": sum(part["bytes"] for part in cleared), "cleared": cleared}


def _broker_at(group: Group, host: str) -> Broker:
    """Return the broker with this hostname, or hostname:port. Raises OperatorError."""
    named = [broker for broker in group.brokers if host in (broker.hostname, str(broker.key))]
    if len(named) == 1:
        return named[0]
    brokers = ", ".join(str(broker.key) for broker in named or group.brokers)
    raise OperatorError(
        f"{host} is {'several brokers' if named else 'no broker'} of {group.name}: name one of {brokers}"
    )


HANDLERS = {
    "ListQuarantine": Handler(look=_list),
    "ClearQuarantine": Handler(plan=_plan_clear, carry_out=_carry_out_clear),
}
