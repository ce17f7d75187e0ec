"""Shell. The gRPC methods of watchdogs: the lease by which one of them acts, and the databases that it scans.

Passwords leave the metaserver here alone, decrypted, for holders of the key of the installation.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, Protocol

import grpc

from qmq.errors import InvalidName, NotServed, OperatorError, QmqError
from qmq.metaserver.actions.vault import Vault
from qmq.metaserver.cluster.registry import Registry
from qmq.metaserver.model import WATCHDOGS, DataSource, LeaseRow
from qmq.metaserver.storage.database import Database
from qmq.proto import qmq_pb2 as pb
from qmq.subjects import check_name

ONLINE = 0


class Hold(Protocol):
    """Keeps, takes or gives back a lease; see `Upkeep.hold_lease`."""

    def __call__(self, wish: LeaseRow, *, take: bool, release: bool) -> Awaitable[LeaseRow]: ...


class WatchdogRpc:
    """Part of the metaserver's service."""

    _registry: Registry
    _hold: Hold
    _database: Database
    _vault: Vault
    _sources: tuple[int, list[DataSource]] = (-1, [])
    """With the directory's version before they were read."""

    async def HoldLease(self, request: pb.LeaseRequest, context: Any) -> pb.Lease:
        try:
            check_name("room", request.name.removeprefix(WATCHDOGS))
            check_name("node", request.node)
            wish = LeaseRow(request.name, request.node, request.term, request.beat, request.address)
            row = await self._hold(wish, take=request.take, release=request.release)
        except QmqError as error:
            await context.abort(_status(error), str(error))
            raise  # abort has raised already
        return pb.Lease(node=row.node, term=row.term, beat=row.beat, address=row.address)

    async def ListSources(self, request: pb.SourcesQuestion, context: Any) -> pb.SourceList:
        try:
            sources = await self._read_sources()
        except NotServed as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
            raise  # abort has raised already
        wanted = [one for one in sources if one.status == ONLINE and one.room == request.room]
        return pb.SourceList(sources=map(self._source, wanted))

    async def _read_sources(self) -> list[DataSource]:
        """They are asked for every few seconds, and each change of them raises the directory's version."""
        version = self._registry.directory.version
        if not self._database.is_up or self._sources[0] != version:
            self._sources = version, await self._database.read(lambda repository: repository.data_sources())
        return self._sources[1]

    def _source(self, source: DataSource) -> pb.Source:
        try:
            password, problem = self._vault.decrypt(source.password) if source.password else "", ""
        except OperatorError as error:
            password, problem = "", str(error)
        return pb.Source(
            url=source.url,
            user=source.user_name,
            password=password,
            table=source.table,
            rate=source.rate,
            age_s=source.age_s,
            problem=problem,
        )


def _status(error: QmqError) -> grpc.StatusCode:
    return grpc.StatusCode.INVALID_ARGUMENT if isinstance(error, InvalidName) else grpc.StatusCode.UNAVAILABLE
