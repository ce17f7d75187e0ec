"""Shell. The gRPC method by which brokers ask what a token may do, and the metaserver's own acceptor.

Counts refused requests, and logs each once: there may be thousands a second.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import grpc

from qmq.errors import AccessError
from qmq.metaserver.access import RPC_ROLES, Access, UnknownToken
from qmq.metaserver.observability.metrics import Metrics
from qmq.metaserver.storage.database import Database
from qmq.proto import qmq_pb2 as pb
from qmq.rights import Caller
from qmq.rpc_access import RpcAcceptor

ANSWER_VALID_MS = 20_000
"""How long a broker uses an answer without asking again: what is revoked ends there within a minute."""


def make_acceptor(access: Access, refusals: Refusals) -> RpcAcceptor:
    """The interceptor that every call passes."""

    async def check(token: str) -> Caller:
        return access.check(token, now_ms=wall_ms())

    def refused(method: str, peer: str, reason: str) -> None:
        refusals.note(method, peer.rpartition(":")[0], reason)

    return RpcAcceptor(RPC_ROLES, check, refused)


class TokenRpc:
    """Part of the metaserver's service."""

    _access: Access
    _database: Database

    async def CheckToken(self, request: pb.TokenQuestion, context: Any) -> pb.TokenAnswer:
        now_ms = wall_ms()
        try:
            who, expires_ms = self._access.look_up(request.token, now_ms=now_ms)
        except AccessError as error:
            lost = self._database.set_aside_because if isinstance(error, UnknownToken) else ""
            await context.abort(grpc.StatusCode.UNAVAILABLE if lost else grpc.StatusCode.NOT_FOUND, lost or str(error))
            raise  # abort has raised already
        left_ms = expires_ms - now_ms if expires_ms else 0
        return pb.TokenAnswer(
            name=who.name,
            role=who.role,
            subjects=who.scope.subjects,
            groups=who.scope.groups,
            valid_ms=min(ANSWER_VALID_MS, left_ms) if expires_ms else ANSWER_VALID_MS,
            expires_in_ms=left_ms,
        )


def wall_ms() -> int:
    """Milliseconds since 1970: tokens' times are told to people."""
    return time.time_ns() // 1_000_000


log = logging.getLogger("qmq.metaserver")

REMEMBERED_MAX = 10_000


class Refusals:
    """Created by main for both acceptors, HTTP and gRPC; used on the loop."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._logged: set[tuple[str, str]] = set()

    def note(self, what: str, peer: str, reason: str) -> None:
        """`what`: the method or address; `peer`: the host, without its port."""
        self._metrics.refused_tokens.inc()
        if (peer, reason) in self._logged:
            return
        if len(self._logged) >= REMEMBERED_MAX:
            self._logged.clear()
        self._logged.add((peer, reason))
        log.warning("refused at=%.100s peer=%s: %s", what, peer, reason)
