"""Shell. Redrive: gives dead letters back to the consumer group that could not handle them, as the tools' command does,
or to a subject that is named.

Dead letters are taken, those that were chosen go back in their order, a batch at a time: stored for the group first, no
dead letters after that. Whatever ends this in between, none is lost; those of the batch under way may go back twice,
with the same ids. The plan takes them as well and gives all of them back.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from qmq.errors import NotServed, OperatorError, OutcomeUnknown, QmqError
from qmq.metaserver.actions.consumers import groups_of_subject
from qmq.metaserver.actions.desk import Desk
from qmq.metaserver.actions.handler import Handler, PartlyDone
from qmq.metaserver.actions.plan import Plan, refused
from qmq.metaserver.actions.words import Words
from qmq.metaserver.model import AuditRow, Group
from qmq.redrive.dead_letters import DeadLetters
from qmq.redrive.redriving import Choice, Chosen, Receipt, batches_of
from qmq.rights import CONSUME, PRODUCE, REDRIVE
from qmq.subjects import is_derived_name, retry_subject

log = logging.getLogger("qmq.metaserver")

LOOKED_AT_MAX = 50_000
"""A broker delivers 200,000 to one consumer before it acks: what was not chosen is held to the end."""
BATCH_MESSAGES_MAX = 500
ALL = (0, 1 << 62)
SHOWN_MAX = 20


@dataclass(slots=True)
class _Taken:
    """Dead letters that are ours until the end of `_taking`."""

    chosen: list[tuple[DeadLetters, list[Chosen]]] = field(default_factory=list)
    looked_at: int = 0
    unasked: dict[str, str] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return sum(len(letters) for _, letters in self.chosen)


@asynccontextmanager
async def _taking(desk: Desk, words: Words, groups: Sequence[Group]) -> AsyncIterator[_Taken]:
    taken, source_subject = _Taken(), words["from"]
    whose = (words["subject"], words["group"]) if source_subject else None
    choice = Choice(id=words["id"], reason=words["reason"], whose=whose)
    to = words["to"]
    at = [desk.master_of(group) for group in groups_of_subject(desk, to, "")] if to else []
    async with AsyncExitStack() as stack:
        for group in groups:
            try:
                master = desk.master_of(group)
                source = await desk.brokers.dead_letters(
                    master, subject=words["subject"], group=words["group"], to=to, at=at, source=source_subject
                )
                stack.push_async_callback(source.close)
                await _take(taken, source, choice, words.number("limit"))
            except QmqError as error:
                taken.unasked[group.name] = str(error)
        yield taken


async def _take(taken: _Taken, source: DeadLetters, choice: Choice, limit: int) -> None:
    chosen: list[Chosen] = []
    taken.chosen.append((source, chosen))
    while taken.count < limit and taken.looked_at < LOOKED_AT_MAX and (pieces := await source.take()):
        taken.looked_at += sum(piece.count for piece in pieces)
        chosen += list(choice.of(source.broker_group, pieces, ALL))[: limit - taken.count]


def _needs(words: Words) -> tuple[tuple[str, str], ...]:
    """Whoever looks for dead letters in a subject of others gets all that lies there, to choose from."""
    named = ((CONSUME, words["from"]), (PRODUCE, words["to"]))
    own = (REDRIVE, retry_subject(words["subject"], words["group"]))
    return (own, *((right, subject) for right, subject in named if subject))


async def _plan(desk: Desk, words: Words) -> Plan:
    to = words["to"]
    if is_derived_name(to):
        return refused(f"{to} is written by brokers alone; without a subject they go back to their group")
    try:
        groups = groups_of_subject(desk, words["subject"], words["brokerGroup"])
        others = groups_of_subject(desk, to, "") if to else []
    except OperatorError as refusal:
        return refused(str(refusal))
    async with _taking(desk, words, groups) as taken:
        rows = [one.json() for _, letters in taken.chosen for one in letters[:SHOWN_MAX]]
    after = {"deadLetters": taken.looked_at - taken.count, "goBack": taken.count, "among them": rows[:SHOWN_MAX]}
    return Plan(
        orders=taken.count > 0,
        subjects=frozenset({to or retry_subject(words["subject"], words["group"])}),
        groups=frozenset(group.name for group in (*groups, *others)),
        needs=_needs(words),
        before={"deadLetters": taken.looked_at},
        after=after | ({"notAsked": taken.unasked} if taken.unasked else {}),
    )


async def _carry_out(desk: Desk, words: Words, plan: Plan, audit: AuditRow) -> Any:
    """The row of the trail comes first, what became of it second."""
    try:
        await desk.registry.change((), replace(audit, result="begun"))
    except OutcomeUnknown as error:
        raise NotServed(f"no dead letter was moved, as the database failed: {error}") from error
    receipt = Receipt(words["subject"], words["group"])
    groups = groups_of_subject(desk, words["subject"], words["brokerGroup"])
    async with _taking(desk, words, groups) as taken:
        receipt.looked_at, receipt.unasked = taken.looked_at, taken.unasked
        for source, letters in taken.chosen:
            await _move_all(source, letters, receipt)
    counts = {name: len(getattr(receipt, name)) for name in ("moved", "unknown", "left")}
    is_whole = not (receipt.unknown or receipt.left or receipt.unasked)
    result = "done" if is_whole else "partly done" if receipt.moved or receipt.unknown else "failed"
    try:
        await desk.registry.change((), replace(audit, after=counts, result=result))
    except QmqError as error:  # they have gone back, and the first row says that it was begun
        log.warning("end of Redrive not recorded subject=%s reason=%s", words["subject"], error)
    return _told(receipt, counts, is_whole=is_whole)


def _told(receipt: Receipt, counts: dict[str, int], *, is_whole: bool) -> Any:
    shown = {**counts, "unasked": receipt.unasked, "ids": [row["id"] for row in receipt.moved[:SHOWN_MAX]]}
    why = next((str(row["why"]) for row in (*receipt.unknown, *receipt.left)), "; ".join(receipt.unasked.values()))
    if is_whole:
        return shown
    if receipt.moved or receipt.unknown:
        raise PartlyDone(f"{counts['moved']} went back, not all: {why}. What may have gone back may go twice", shown)
    raise NotServed(f"no dead letter went back: {why}")


async def _move_all(source: DeadLetters, letters: Sequence[Chosen], receipt: Receipt) -> None:
    why = ""
    for batch in batches_of(letters, messages_max=BATCH_MESSAGES_MAX, bytes_max=source.batch_bytes_max):
        if not why:
            why = await _move(source, batch, receipt)
        else:
            receipt.left += [one.json(why=why) for one in batch]


async def _move(source: DeadLetters, batch: Sequence[Chosen], receipt: Receipt) -> str:
    """Move one batch; return why the next one need not be tried, empty: it may be."""
    try:
        produced = await source.send_back(batch)
    except OutcomeUnknown as error:
        receipt.unknown += [one.json(why=str(error)) for one in batch]
        return str(error)
    except QmqError as error:
        receipt.left += [one.json(why=str(error)) for one in batch]
        return str(error)
    refusals = dict(produced.refused)
    receipt.left += [one.json(why=refusals[at]) for at, one in enumerate(batch) if at in refusals]
    stored = [one for at, one in enumerate(batch) if at not in refusals]
    try:
        if stored:
            await source.settle(stored)
    except QmqError as error:
        why = f"they went back, but may be dead letters still: {error}"
        receipt.unknown += [one.json(why=why) for one in stored]
        return why
    receipt.moved += [one.json() for one in stored]
    return ""


HANDLERS = {"Redrive": Handler(plan=_plan, needs=_needs, carry_out=_carry_out)}
