"""Shell. The gRPC method for new consumer groups: store them, and return their begin on a broker group (decision
80).
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping, Sequence
from operator import methodcaller
from typing import Any, Protocol

import grpc

from qmq.errors import CallError, MissingRight, NotServed, OperatorError, QmqError
from qmq.metaserver.cluster.group_starts import Asked, Begin, begin_at, new_row, to_store
from qmq.metaserver.cluster.registry import Registry
from qmq.metaserver.model import Broker, ConsumerGroupRow
from qmq.metaserver.storage.database import Database
from qmq.proto import qmq_pb2 as pb
from qmq.rpc_access import caller
from qmq.subjects import check_name, check_subject, real_subject

TRIES = 5
"""An attempt fails when another metaserver stores one of the groups meanwhile."""

Key = tuple[str, str]


class Marks(Protocol):
    """Part of `Brokers`: makes a master note ends of subjects; returns which groups have a position.

    Raises QmqError.
    """

    async def mark_groups(self, broker: Broker, mark: str, groups: Sequence[Asked]) -> list[bool]: ...


class ConsumerGroups:
    """New consumer groups. Made by main."""

    def __init__(self, registry: Registry, database: Database, brokers: Marks) -> None:
        self._registry = registry
        self._database = database
        self._brokers = brokers

    async def begin(self, broker_group: str, asked: Sequence[Asked]) -> list[Begin]:
        """Return the begin of each group on a broker group; store groups that are new in the cluster.

        Raises:
            NotServed, CommitUnknown: the database cannot be read or written now. Repeat.
        """
        keys = [group.key for group in asked]
        checked: set[Key] = set()
        for _ in range(TRIES):
            rows = await self._database.read(lambda repository: repository.consumer_groups(keys))
            missing = [group for group in to_store(asked, rows, now_ms=_wall_ms()) if group.key not in checked]
            if not missing:
                return [begin_at(rows[key], broker_group) for key in keys]
            new = await self._new_rows(broker_group, missing, rows)
            checked |= {group.key for group in missing if group.key in rows}
            if new:
                replaced = [rows[row.key] for row in new if row.key in rows]
                store = methodcaller("store_consumer_groups", new, replaced)
                await self._database.write(store)
        raise NotServed("other metaservers store the same consumer groups at this moment; repeat")

    async def _new_rows(
        self, broker_group: str, missing: Sequence[Asked], rows: Mapping[Key, ConsumerGroupRow]
    ) -> list[ConsumerGroupRow]:
        """Query the masters of the subjects' routes, then make rows. The marks are older than the rows."""
        now_ms, mark = _wall_ms(), secrets.token_hex(8)
        members = {group.key: self._members(group.subject, broker_group) for group in missing}
        names = sorted({name for route in members.values() for name in route})
        parts = [[group for group in missing if name in members[group.key]] for name in names]
        answers = await asyncio.gather(*map(self._ask, names, [mark] * len(names), parts))
        silent = {name for name, known in zip(names, answers, strict=True) if known is None}
        known = {key for answer in answers for key in answer or ()}
        return [
            new_row(group, members[group.key], is_known=group.key in known, mark=mark, now_ms=now_ms)
            for group in missing
            # A possibly stale row stays if a broker group has a position, or did not answer.
            if group.key not in rows or not (group.key in known or members[group.key] & silent)
        ]

    def _members(self, subject: str, broker_group: str) -> frozenset[str]:
        route = self._registry.find(real_subject(subject))
        return frozenset((*(route.groups if route else ()), broker_group))

    async def _ask(self, name: str, mark: str, groups: Sequence[Asked]) -> set[Key] | None:
        """Return the groups with a position at a broker group; None: it does not answer, and begins by time."""
        group = self._registry.directory.groups.get(name)
        if group is None or group.master is None or not self._registry.may_be_up(group.master):
            return None
        try:
            known = await self._brokers.mark_groups(group.master, mark, groups)
        except QmqError:
            return None
        return {asked.key for asked, is_known in zip(groups, known, strict=False) if is_known}


def _wall_ms() -> int:
    return time.time_ns() // 1_000_000


class ConsumerGroupRpc:
    """Part of the metaserver's service."""

    _consumer_groups: ConsumerGroups

    async def BeginGroups(self, request: pb.BeginGroupsRequest, context: Any) -> pb.BeginGroupsAnswer:
        try:
            caller().require_group(request.broker_group)
            asked = [_asked(group) for group in request.groups]
            begins = await self._consumer_groups.begin(request.broker_group, asked)
        except QmqError as error:
            await context.abort(_status(error), str(error))
            raise  # abort has raised already
        return pb.BeginGroupsAnswer(begins=[pb.GroupBegin(**begin._asdict()) for begin in begins])


def _asked(group: pb.NewGroup) -> Asked:
    check_subject(group.subject)
    check_name("consumer group", group.group)
    return Asked(group.subject, group.group, group.latest, max(group.since_ms, 0), group.broadcast)


def _status(error: QmqError) -> grpc.StatusCode:
    if isinstance(error, MissingRight):
        return grpc.StatusCode.PERMISSION_DENIED
    if isinstance(error, CallError | OperatorError):
        return grpc.StatusCode.INVALID_ARGUMENT
    return grpc.StatusCode.UNAVAILABLE
