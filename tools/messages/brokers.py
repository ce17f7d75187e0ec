"""Shell. Masters of broker groups, and reads of their stored messages."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import grpc
import grpc.aio

from qmq.control_plane import CHANNEL_OPTIONS, find_metaserver
from qmq.proto import qmq_pb2 as pb
from qmq.proto.qmq_pb2_grpc import BrokerStub, MetaserverStub
from qmq.redrive.dead_letters import Master
from qmq.tools.call import CallFailed, Exit, post
from qmq.tools.command import LIST_TIMEOUT_S
from qmq.tools.session import Session
from qmq.tools.terminal import complain
from qmq.types import Endpoint

APP = "tools.sh"
ANSWER_S = 10.0
TRIES, AGAIN_S = 5, 0.5
"""A group has no master for a moment while its roles are swapped."""
_LATER = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.FAILED_PRECONDITION,
}
"""Another master, or the same one later, may answer."""


class Unanswered(Exception):
    """No broker answered the request; the text gives the reason. Nothing was changed."""

    def __init__(self, exit_status: Exit, text: str) -> None:
        super().__init__(text)
        self.exit = exit_status


def run_on_loop(session: Session, work: Callable[[Session], Awaitable[Exit]]) -> Exit:
    """Run a command's work on a new event loop; report brokers that do not answer."""

    async def main() -> Exit:
        return await work(session)

    logging.getLogger("qmq").addHandler(logging.NullHandler())  # outcomes and errors are shown by the command
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # a broker that closes a connection does not end the command
    try:
        return asyncio.run(main())
    except Unanswered as why:
        complain(str(why))
        return why.exit
    except BrokenPipeError:  # the reader of the output is gone
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.raise_signal(signal.SIGPIPE)
        raise


async def find_masters(session: Session, subject: str) -> list[Master]:
    """Return the masters of all broker groups that may have messages of `subject`, its retries or its dead letters.

    A token that may list brokers gets all groups, because a group removed from a route still has its messages. A
    client's token gets the groups of the route.

    Raises:
        Unanswered: the metaserver does not answer, or rejects the token.
    """
    try:
        answer = await asyncio.to_thread(
            post,
            session.metaserver,
            session.token,
            {"action": "ListBrokers", "details": "true"},
            timeout_s=LIST_TIMEOUT_S,
        )
    except CallFailed as error:
        raise Unanswered(Exit.UNREACHABLE, str(error)) from None
    if answer.exit in (Exit.UNREACHABLE, Exit.UNKNOWN):
        raise Unanswered(Exit.UNREACHABLE, answer.message)
    if answer.exit is not Exit.DONE:
        return await masters_of_route(session, subject)
    return [
        Master(row["group"], row["ip"], row["servePort"], row["controlPort"])
        for row in answer.data
        if row["role"] == "MASTER" and row["controlPort"]
    ]


async def masters_of_route(session: Session, subject: str, *, writes: bool = False) -> list[Master]:
    """Return the masters of a subject's route. Without `writes`, a new subject gets a route by this call.

    Raises:
        Unanswered: the metaserver does not answer, or rejects the token; with `writes` also: the subject has no route.
    """
    try:
        address = await asyncio.to_thread(find_metaserver, session.metaserver.url)
        async with asyncio.timeout(ANSWER_S), grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
            stream = MetaserverStub(channel).WatchRoutes(metadata=_metadata(session))
            await stream.write(
                pb.RouteRequest(subjects=[subject], app=APP, client_id=APP, produces=writes, looks_only=writes)
            )
            update = await stream.read()
            stream.cancel()
    except grpc.aio.AioRpcError as error:
        raise _unanswered(error, "the metaserver") from None
    except (OSError, ValueError, TimeoutError) as error:
        raise Unanswered(Exit.UNREACHABLE, f"the metaserver does not answer: {error or 'not in time'}") from None
    for route in [] if update is grpc.aio.EOF else update.routes:
        if route.refused:
            raise Unanswered(Exit.REFUSED, route.refused)
        return [
            Master(group.broker_group, group.master.ip, group.master.serve_port, group.master.control_port)
            for group in route.groups
            if group.HasField("master")
        ]
    return []


class Looker:
    """Reader of one broker group's messages, across changes of its master. Made and closed by `looking`."""

    def __init__(self, session: Session, subject: str, master: Master) -> None:
        self._session = session
        self._subject = subject
        self.master = master
        self._channel: grpc.aio.Channel | None = None

    @property
    def broker_group(self) -> str:
        return self.master.broker_group

    async def ask(self, request: pb.BrowseRequest, *, tries: int = TRIES) -> pb.BrowseAnswer:
        """Send a request, and repeat it where that may help. Raises Unanswered."""
        request.subject = self._subject
        for left in range(tries - 1, -1, -1):
            try:
                return await self._ask(request)
            except grpc.aio.AioRpcError as error:
                await self.close()
                if error.code() not in _LATER or not left:
                    raise _unanswered(error, self.broker_group) from None
            await asyncio.sleep(AGAIN_S)
            await self._find_again()
        raise ValueError("at least one try")

    async def _ask(self, request: pb.BrowseRequest) -> pb.BrowseAnswer:
        if self._channel is None:
            address = str(Endpoint(self.master.ip, self.master.control_port))
            self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        answer: pb.BrowseAnswer = await BrokerStub(self._channel).Browse(
            request, metadata=_metadata(self._session), timeout=ANSWER_S
        )
        return answer

    async def _find_again(self) -> None:
        try:
            masters = await find_masters(self._session, self._subject)
        except Unanswered:
            return  # the master is unchanged or unknown
        self.master = next((master for master in masters if master.broker_group == self.broker_group), self.master)

    async def messages(self, request: pb.BrowseRequest) -> AsyncGenerator[pb.BrowsedMessage]:
        """Yield matching messages, page by page, up to the end. Raises Unanswered."""
        request = pb.BrowseRequest.FromString(request.SerializeToString())
        while True:
            answer = await self.ask(request)
            for message in answer.messages:
                yield message
            if answer.begin >= answer.end:
                return
            request.begin, request.end = answer.begin, answer.end
            request.since_ms = request.until_ms = 0

    async def whole_body(self, message: pb.BrowsedMessage) -> bytes:
        """Return the whole stored body of a message, which holds only its begin. The rest is missing if retention
        deletes the message meanwhile.

        Raises Unanswered.
        """
        parts, at = [message.body], len(message.body)
        request = pb.BrowseRequest(begin=message.sequence, end=message.sequence + 1, messages_max=1)
        request.body_bytes_max = message.body_bytes
        while at < message.body_bytes:
            request.body_begin = at
            answer = await self.ask(request)
            part = answer.messages[0].body if answer.messages else b""
            if not part:
                break
            parts.append(part)
            at += len(part)
        return b"".join(parts)

    async def close(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()


@asynccontextmanager
async def looking(session: Session, subject: str, broker_group: str = "") -> AsyncIterator[list[Looker]]:
    """Yield one Looker for each broker group, or for the named one. Raises Unanswered."""
    masters = await find_masters(session, subject)
    if broker_group and broker_group not in [master.broker_group for master in masters]:
        raise Unanswered(Exit.REFUSED, f"there is no broker group {broker_group!r} that may have messages of {subject}")
    chosen = [master for master in masters if broker_group in ("", master.broker_group)]
    lookers = [Looker(session, subject, master) for master in chosen]
    try:
        yield lookers
    finally:
        for looker in lookers:
            await looker.close()


def _metadata(session: Session) -> tuple[tuple[str, str]]:
    return (("x-api-token", session.token),)


def _unanswered(error: grpc.aio.AioRpcError, broker: str) -> Unanswered:
    exit_status = Exit.UNREACHABLE if error.code() in _LATER else Exit.REFUSED
    return Unanswered(exit_status, f"{broker}: {error.details()}")
