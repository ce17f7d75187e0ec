"""Shell. Facts that only one metaserver has: its clients, refusals and settings. Each metaserver queries the others."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Protocol, TypeVar
from urllib.parse import urlencode

import grpc

from qmq.access import Token, token_metadata, token_text
from qmq.control_plane import CHANNEL_OPTIONS
from qmq.metaserver.actions.context import OldRoutes
from qmq.metaserver.model import DELAY, MetaserverRow
from qmq.metaserver.routes.audience import ClientInfo, Counts
from qmq.proto import qmq_pb2 as pb
from qmq.proto.qmq_pb2_grpc import MetaserverStub

log = logging.getLogger("qmq.metaserver")

ANSWER_BYTES_MAX = 64 * 1024 * 1024

T = TypeVar("T")


class Hub(Protocol):
    """Clients of this metaserver."""

    def old_routes(self, group: str, subject: str) -> Counts: ...

    def clients(self) -> list[ClientInfo]: ...


class Clients:
    """Directory of the installation's clients. Made by main.

    Args:
        others: the other metaservers that are up.
        token: the installation's key.
    """

    def __init__(
        self, hub: Hub, others: Callable[[], Iterable[MetaserverRow]], *, token: Token, timeout_ms: int
    ) -> None:
        self._hub = hub
        self._others = others
        self._token = token
        self._timeout_s = timeout_ms / 1000

    async def old_routes(self, group: str, subject: str) -> OldRoutes:
        """Count clients that may still use the group as writable, for a subject or for any (`*`)."""
        question = pb.OldRoutesQuestion(broker_group=group, subject=subject)
        answers, unasked = await self._ask_others(lambda row: self._count(row, question))
        counts: list[Counts | pb.OldRoutesAnswer] = [self._hub.old_routes(group, subject), *answers.values()]
        return OldRoutes(
            producers=sum(count.producers for count in counts),
            consumers=sum(count.consumers for count in counts),
            watchers=sum(count.watchers for count in counts),
            unasked=unasked,
        )

    async def connected(
        self, *, subject: str, app: str, limit: int, here: bool
    ) -> tuple[list[dict[str, object]], tuple[str, ...]]:
        """Return the connected clients, and the metaservers without an answer."""
        chosen = [
            client for client in self._hub.clients() if subject in ("", *client.subjects) and app in ("", client.app)
        ]
        rows = [_client_json(client) for client in chosen]
        unasked: tuple[str, ...] = ()
        if not here:
            arguments = {"subject": subject, "app": app, "limit": str(limit)}
            answers, unasked = await self.elsewhere("Clients", arguments)
            rows += [client for answer in answers.values() for client in answer["clients"]]
        return sorted(rows, key=lambda row: (str(row["app"]), str(row["clientId"])))[:limit], unasked

    async def elsewhere(
        self, action: str, arguments: Mapping[str, str] = MappingProxyType({})
    ) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Return the answers of the other metaservers about themselves, by address, and those without an answer."""
        asked = {"action": action, **arguments, "here": "true"}
        return await self._ask_others(lambda row: asyncio.to_thread(self._fetch, row, asked))

    async def _ask_others(self, ask: Callable[[MetaserverRow], Awaitable[T]]) -> tuple[dict[str, T], tuple[str, ...]]:
        rows = list(self._others())
        results = await asyncio.gather(*(ask(row) for row in rows), return_exceptions=True)
        answers, unasked = {}, []
        for row, result in zip(rows, results, strict=True):
            if isinstance(result, (grpc.aio.AioRpcError, OSError, http.client.HTTPException, ValueError)):
                log.warning("metaserver did not answer address=%s reason=%s", row.http_address, result)
                unasked.append(row.http_address)
            elif isinstance(result, BaseException):
                raise result
            else:
                answers[row.http_address] = result
        return answers, tuple(unasked)

    async def _count(self, row: MetaserverRow, question: pb.OldRoutesQuestion) -> pb.OldRoutesAnswer:
        async with grpc.aio.insecure_channel(row.grpc_address, options=CHANNEL_OPTIONS) as channel:
            metadata = token_metadata(self._token)
            answer: pb.OldRoutesAnswer = await MetaserverStub(channel).CountOldRoutes(
                question, metadata=metadata, timeout=self._timeout_s
            )
            return answer

    def _fetch(self, row: MetaserverRow, arguments: dict[str, str]) -> Any:
        """Return the data of another metaserver's answer."""
        address = row.http_address.removeprefix("http://")
        connection = http.client.HTTPConnection(address, timeout=self._timeout_s)
        headers = {"X-Api-Token": token_text(self._token), "Content-Type": "application/x-www-form-urlencoded"}
        try:
            connection.request("POST", "/management", urlencode(arguments), headers)
            answer: Any = json.loads(connection.getresponse().read(ANSWER_BYTES_MAX))
        finally:
            connection.close()
        if not isinstance(answer, dict) or answer.get("status") != 0:
            raise ValueError(f"it answered {str(answer)[:200]}")
        return answer["data"]


def _client_json(client: ClientInfo) -> dict[str, object]:
    return {
        "app": client.app,
        "clientId": client.client_id,
        "peer": client.peer,
        "produces": client.produces,
        "pushed": client.streams,
        "delayed": client.kind == DELAY,
        "subjects": sorted(client.subjects),
    }
