"""Shell. Removal of consumer groups that no consumer used for `group_expiry_days`, as by RemoveConsumerGroup, and of
the rows of broadcast consumers that every broker group has forgotten.

Every metaserver looks once an hour. A group is removed if every broker group answered, it is unused at all that have
it, and an earlier look, `WARNED_S` ago or more, found it too: so its metric and alert come first. Groups on dead-letter
and retry subjects stay: their positions tell which dead letters went back to their group.

A forgotten broadcast consumer has nothing left but its row, which its next SUBSCRIBE would replace. Such rows go
without a warning, whatever `group_expiry_days` is.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Iterable

from prometheus_client.core import GaugeMetricFamily, Metric

from qmq.errors import QmqError
from qmq.metaserver.actions.context import ActionContext, together, wall_ms
from qmq.metaserver.actions.runner import Actions
from qmq.metaserver.cluster.group_starts import STALE_MS, NewGroup
from qmq.proto import qmq_pb2 as pb
from qmq.rights import Caller, TokenRole
from qmq.subjects import real_subject

log = logging.getLogger("qmq.metaserver")

LOOK_S = 3_600.0
DAY_MS = 86_400_000
WARNED_S = 86_400.0
SHOWN_MAX = 100
"""Groups of one look: those unused for longest."""
ROWS_MAX = 1_000
"""Rows of broadcast consumers of one look; the next look continues after them. Each request makes a master note so many
ends, of which it keeps 10,000 for new groups.
"""
BY_ITSELF = Caller("metaserver", TokenRole.CLUSTER)

Key = tuple[str, str]


class GroupExpiry:
    """Finds unused consumer groups, reports and removes them. Made by main; `days` 0: only broadcasts' rows."""

    def __init__(self, context: ActionContext, actions: Actions, days: int) -> None:
        self._context = context
        self._actions = actions
        self._days = days
        self._first_seen_s: dict[Key, float] = {}
        self._removal_ms: dict[Key, int] = {}
        self._broadcasts_after: Key = ("", "")

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.remove_broadcasts(now_ms=wall_ms())
                if self._days:
                    await self.look(now_ms=wall_ms(), now_s=time.monotonic())
            except QmqError as error:
                log.warning("search for unused consumer groups failed, repeated in an hour reason=%s", error)

    async def remove_broadcasts(self, *, now_ms: int) -> None:
        """Remove the rows of broadcast consumers without a position on any broker group, `ROWS_MAX` per call.

        A row that a returning consumer replaced meanwhile stays.

        Raises:
            NotServed: a broker group or the database does not answer. Nothing was removed.
        """
        context, after = self._context, self._broadcasts_after
        rows = await context.database.read(lambda repository: repository.broadcasts(now_ms - STALE_MS, after, ROWS_MAX))
        if rows:
            groups = [NewGroup(*row.key, latest=False, since_ms=0, broadcast=True) for row in rows]
            mark, masters = secrets.token_hex(8), map(context.master_of, context.groups_with_master())
            answers = await together([context.brokers.mark_groups(master, mark, groups) for master in masters])
            forgotten = [row for row, *known in zip(rows, *answers, strict=False) if not any(known)]
            await context.database.write(lambda repository: repository.store_consumer_groups([], forgotten))
            if forgotten:
                log.info("rows of forgotten broadcast consumers removed rows=%d", len(forgotten))
        self._broadcasts_after = rows[-1].key if len(rows) == ROWS_MAX else ("", "")

    def read(self) -> Iterable[Metric]:
        """Yield the metric of groups that will be removed."""
        removal = GaugeMetricFamily(
            "qmq_metaserver_consumer_group_removal_timestamp_seconds",
            "When an unused consumer group will be removed (group_expiry_days), of the 100 unused for longest.",
            labels=["subject", "consumer_group"],
        )
        for key, removal_ms in self._removal_ms.items():
            removal.add_metric(list(key), removal_ms / 1000)
        yield removal

    async def look(self, *, now_ms: int, now_s: float) -> None:
        """Report unused groups from a week before their removal on, and remove those that were reported for a day."""
        warning_ms = min(7, (self._days + 1) // 2) * DAY_MS
        found = await self._unused_since(now_ms - self._days * DAY_MS + warning_ms)
        self._first_seen_s = {key: self._first_seen_s.get(key, now_s) for key in found}
        self._removal_ms = {key: self._due_ms(key, since_ms, now_ms, now_s) for key, since_ms in found.items()}
        for (subject, group), since_ms in found.items():
            if self._first_seen_s[subject, group] == now_s:
                text = "unused consumer group, removed soon subject=%s group=%s unused_days=%d"
                log.warning(text, subject, group, (now_ms - since_ms) // DAY_MS)
        for key in [key for key, due_ms in self._removal_ms.items() if due_ms <= now_ms]:
            await self._remove(*key)

    def _due_ms(self, key: Key, since_ms: int, now_ms: int, now_s: float) -> int:
        warned_s = now_s - self._first_seen_s[key]
        return max(since_ms + self._days * DAY_MS, now_ms + int((WARNED_S - warned_s) * 1000))

    async def _remove(self, subject: str, group: str) -> None:
        answer = await self._actions.run("RemoveConsumerGroup", {"subject": subject, "group": group}, BY_ITSELF)
        if answer.done:
            del self._removal_ms[subject, group]
        else:
            log.warning(
                "unused consumer group not removed subject=%s group=%s reason=%s", subject, group, answer.message
            )

    async def _unused_since(self, before_ms: int) -> dict[Key, int]:
        """Return the groups that have no consumer on any broker group since before this time, the oldest first.

        Raises:
            NotServed: a broker group does not answer.
        """
        unused = {
            (row.subject, row.group): row.unused_since_ms
            for row in await self._ask(unused_before_ms=before_ms)
            if row.unused_since_ms and real_subject(row.subject) == row.subject  # older brokers return all, with 0
        }
        found = {}
        for subject, group in sorted(unused, key=lambda key: unused[key])[:SHOWN_MAX]:
            times = [row.unused_since_ms for row in await self._ask(subject=subject, group=group)]
            if 0 < min(times, default=0) <= max(times, default=0) < before_ms:
                found[subject, group] = max(times)
        return found

    async def _ask(self, *, subject: str = "", group: str = "", unused_before_ms: int = 0) -> list[pb.GroupProgress]:
        context = self._context
        questions = [
            context.brokers.consumers(
                context.master_of(broker_group), subject=subject, group=group, unused_before_ms=unused_before_ms
            )
            for broker_group in context.groups_with_master()
        ]
        return [row for answer in await together(questions) for row in answer.groups]
