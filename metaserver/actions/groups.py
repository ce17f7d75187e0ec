"""Shell. Actions on what a broker group is used for: readonly marks, drains, tags."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from qmq.errors import QmqError
from qmq.metaserver.actions import group_plans
from qmq.metaserver.actions.desk import Desk, OldRoutes, together
from qmq.metaserver.actions.handler import Handler
from qmq.metaserver.actions.plan import LISTED_MAX, Plan
from qmq.metaserver.actions.words import Words
from qmq.metaserver.console.rates import Look, per_second
from qmq.metaserver.model import ALL_SUBJECTS, Route

R = TypeVar("R")

LOOK_AGAIN_S = 0.1
"""Routes reach clients within tens of milliseconds."""


async def _mark(desk: Desk, words: Words) -> Plan:
    return await _plan_mark(desk, words, readonly=True)


async def _unmark(desk: Desk, words: Words) -> Plan:
    return await _plan_mark(desk, words, readonly=False)


async def _plan_mark(desk: Desk, words: Words, *, readonly: bool) -> Plan:
    directory, subject, group = desk.registry.directory, words["subject"], words["brokerGroup"]
    return await _on_routes(
        desk,
        subject,
        group,
        lambda routes: group_plans.mark_readonly(directory, routes, subject, group, readonly=readonly),
    )


async def _on_routes(desk: Desk, subject: str, group: str, work: Callable[[Mapping[str, Route]], R]) -> R:
    """Run `work` on the routes that a mark of this subject, or of all, concerns."""
    if subject == ALL_SUBJECTS:
        return await desk.on_routes_of({group}, work)
    return work(desk.registry.routes)


async def _after_mark(desk: Desk, words: Words, plan: Plan) -> Any:
    directory, group = desk.registry.directory, words["brokerGroup"]
    without = await _on_routes(
        desk, words["subject"], group, lambda routes: group_plans.stranded(directory, routes, group, plan.subjects)
    )
    held = await wait_for_old_routes(desk, group, words["subject"], words.number("waitMs"))
    return {**plan.data, **held, "withoutOtherGroup": {"count": len(without), "names": without[:LISTED_MAX]}}


async def wait_for_old_routes(desk: Desk, group: str, subject: str, wait_ms: int) -> dict[str, Any]:
    """Count the clients that may still use a group as writable; wait until there are none, or `wait_ms` passed."""
    began = time.monotonic()
    counts = await desk.clients.old_routes(group, subject)
    while not _all_know(counts) and (time.monotonic() - began) * 1000 < wait_ms:
        await asyncio.sleep(LOOK_AGAIN_S)
        counts = await desk.clients.old_routes(group, subject)
    return {
        "producers": counts.producers,
        "consumers": counts.consumers,
        "watchers": counts.watchers,
        "metaserversUnasked": list(counts.unasked),
        "allKnow": _all_know(counts),
        "waitedMs": round((time.monotonic() - began) * 1000) if wait_ms else 0,
    }


def _all_know(counts: OldRoutes) -> bool:
    return not counts.producers and not counts.consumers and not counts.unasked


async def _list_readonly(desk: Desk, words: Words) -> Any:
    marks = [mark for mark in sorted(desk.registry.directory.marks) if words["brokerGroup"] in ("", mark.group)]
    counts = await together([wait_for_old_routes(desk, mark.group, mark.subject, 0) for mark in marks])
    shown = [
        {"subject": mark.subject, "brokerGroup": mark.group, **held} for mark, held in zip(marks, counts, strict=True)
    ]
    draining = [
        {"brokerGroup": name, "subject": ALL_SUBJECTS, "draining": True}
        for name, group in sorted(desk.registry.directory.groups.items())
        if group.draining and words["brokerGroup"] in ("", name)
    ]
    return {"marks": shown, "draining": draining}


async def _drain(desk: Desk, words: Words) -> Plan:
    return await _plan_draining(desk, words, draining=True)


async def _undrain(desk: Desk, words: Words) -> Plan:
    return await _plan_draining(desk, words, draining=False)


async def _plan_draining(desk: Desk, words: Words, *, draining: bool) -> Plan:
    directory, group = desk.registry.directory, words["brokerGroup"]
    return await desk.on_routes_of(
        {group}, lambda routes: group_plans.set_draining(directory, routes, group, draining=draining)
    )


async def _after_drain(desk: Desk, words: Words, plan: Plan) -> Any:
    """Say what is left: producers that may still send, messages that wait for consumers, dead letters, routes that name
    the group."""
    name = words["brokerGroup"]
    held = await wait_for_old_routes(desk, name, ALL_SUBJECTS, words.number("waitMs"))
    contents = await desk.contents(name, ALL_SUBJECTS)
    left = contents.most_first
    return {
        **plan.data,
        **held,
        "subjects": len(plan.subjects),
        "messagesLeft": sum(leftover.messages for leftover in left),
        "deadLettersLeft": sum(leftover.dead_letters for leftover in left),
        "left": [
            {
                "subject": leftover.subject,
                "group": leftover.consumer_group,
                "messages": leftover.messages,
                "deadLetters": leftover.dead_letters,
                "oldest": leftover.oldest_ms,
            }
            for leftover in left[:LISTED_MAX]
        ],
        "unknown": contents.unknown,
        "empty": held["allKnow"] and not left and not contents.unknown,
    }


async def _set_tag(desk: Desk, words: Words) -> Plan:
    return group_plans.set_tag(desk.registry.directory, words["brokerGroup"], words["tag"])


async def _set_failover(desk: Desk, words: Words) -> Plan:
    return group_plans.set_failover(desk.registry.directory, words["brokerGroup"], words["failover"])


async def _acknowledge_loss(desk: Desk, words: Words) -> Plan:
    return group_plans.acknowledge_loss(desk.registry.directory, words["brokerGroup"])


async def _rates(desk: Desk, words: Words) -> Any:
    """Of the master, since its process began; a change of roles begins anew."""
    group = desk.find_group(words["brokerGroup"])
    try:
        samples = (await desk.brokers.rates(desk.master_of(group))).samples
    except QmqError as error:
        return {"brokerGroup": group.name, "rates": [], "unasked": {group.name: str(error)}}
    looks = [Look(one.at_ms, {"taken": one.taken, "delivered": one.delivered}) for one in samples]
    rates = [{"at": one.at_ms, **one.values} for one in per_second(looks)]
    return {"brokerGroup": group.name, "rates": rates, "unasked": {}}


HANDLERS = {
    "MarkReadonlyBrokerGroup": Handler(plan=_mark, afterwards=_after_mark),
    "UnMarkReadonlyBrokerGroup": Handler(plan=_unmark),
    "ListReadonly": Handler(look=_list_readonly),
    "DrainGroup": Handler(plan=_drain, afterwards=_after_drain),
    "UndrainGroup": Handler(plan=_undrain),
    "SetGroupTag": Handler(plan=_set_tag),
    "SetFailover": Handler(plan=_set_failover),
    "AcknowledgeLoss": Handler(plan=_acknowledge_loss),
    "Rates": Handler(look=_rates),
}
