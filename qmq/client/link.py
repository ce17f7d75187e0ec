"""Shell. Authenticated connection to the master of a broker group, reconnected after restarts, swaps and moves."""

from __future__ import annotations

import asyncio
import random
from typing import Protocol

from qmq.access import Token, token_text
from qmq.client.routes import Routing
from qmq.errors import AccessError, NotServed, QmqError
from qmq.logs import bounded
from qmq.message_sizes import ANSWER_BYTES_MAX
from qmq.remoting.connection import Connection, connect
from qmq.remoting.packet import Packet
from qmq.types import Endpoint

log = bounded(__name__)

CONNECT_TIMEOUT_S = 3.0
RETRY_S_MIN, RETRY_S_MAX = 0.05, 2.0
"""A restarted broker listens again within a second or two. Half of the wait is random, so that clients do not reconnect
at the same time.
"""


class LinkOwner(Protocol):
    """Owner of a link, called on the event loop."""

    def link_opened(self, link: Link) -> None: ...

    def link_lost(self, link: Link, reason: str) -> None: ...

    def link_failed(self, link: Link, error: QmqError) -> None: ...

    def link_writable(self, link: Link) -> None: ...


class Link:
    """Connection to one broker group. Its owner runs it as a task until it cancels it."""

    def __init__(self, broker_group: str, *, owner: LinkOwner, routing: Routing, token: Token, app: str) -> None:
        self.broker_group = broker_group
        self.connection: Connection | None = None
        self.welcome: dict[str, object] = {}
        self.endpoint: Endpoint | None = None
        self.failure: str = ""
        """Reason of the last failed attempt to connect; "" after a success."""
        self._owner = owner
        self._routing = routing
        self._token = token
        self._sent_token = ""
        self._app = app
        self._woken = asyncio.Event()
        self._failures = 0
        self._progress_at = 0.0
        """Time of the last answer, or of the first request since the connection was idle."""
        self._unsent_bytes = 0

    @property
    def is_open(self) -> bool:
        return self.connection is not None and self.connection.is_open

    @property
    def has_old_token(self) -> bool:
        """Whether the token's file holds another token than the one that opened this connection."""
        return token_text(self._token) != self._sent_token

    def route_changed(self) -> None:
        """Leave a master that was replaced, and connect to the new one at once."""
        if self.connection is not None and self._routing.master(self.broker_group) != self.endpoint:
            self.connection.close("the group has another master")
        self._failures = 0
        self._woken.set()

    def drop(self, reason: str) -> None:
        """Close the connection; the link reconnects."""
        if self.connection is not None:
            self.connection.close(reason)

    def progressed(self, now_s: float) -> None:
        """Record an answer, or the first request since the connection was idle."""
        self._progress_at = now_s

    def is_late(self, now_s: float, timeout_s: float) -> bool:
        """Return whether a request has waited for `timeout_s` without an answer, and the broker read no bytes
        meanwhile.

        A body of 64 MiB takes 5.4 s at 100 Mbit/s, longer than the default timeout.
        """
        unsent_bytes = 0 if self.connection is None else self.connection.unsent_bytes
        if unsent_bytes < self._unsent_bytes:
            self._progress_at = now_s
        self._unsent_bytes = unsent_bytes
        return now_s - self._progress_at > timeout_s

    async def run(self) -> None:
        """Connect and reconnect until cancelled."""
        try:
            while True:
                self._woken.clear()
                if await self._connect():
                    await self._woken.wait()  # lost, or the route changed
                    while self.connection is not None:
                        self._woken.clear()
                        await self._woken.wait()
                else:
                    await self._rest()
        finally:
            if self.connection is not None:
                self.connection.close("the client closes")

    async def _connect(self) -> bool:
        endpoint = self._routing.master(self.broker_group)
        if endpoint is None:
            return self._failed(NotServed("the group has no master"))
        self._sent_token = token_text(self._token)
        try:
            connection, welcome = await connect(
                endpoint,
                handler=self,
                token=self._sent_token,
                app=self._app,
                packet_bytes_max=ANSWER_BYTES_MAX,
                timeout_s=CONNECT_TIMEOUT_S,
            )
        except QmqError as error:
            if self._failures == 0 or isinstance(error, AccessError):
                log.warning("broker not reachable group=%s endpoint=%s error=%s", self.broker_group, endpoint, error)
            return self._failed(error)
        if self._routing.master(self.broker_group) != endpoint:  # the route changed while this was connecting
            connection.close("the group has another master")
        if not connection.is_open:
            return False
        self.connection = connection
        self.welcome = welcome
        self.endpoint = endpoint
        self._failures = 0
        self.failure = ""
        log.info("connected group=%s endpoint=%s", self.broker_group, endpoint)
        self._owner.link_opened(self)
        return True

    def _failed(self, error: QmqError) -> bool:
        self.failure = str(error)
        self._owner.link_failed(self, error)
        return False

    async def _rest(self) -> None:
        """Wait before the next attempt, or until the route changes."""
        wait_s = min(RETRY_S_MIN * 2 ** min(self._failures, 10), RETRY_S_MAX)
        self._failures += 1
        try:
            async with asyncio.timeout(wait_s * random.uniform(0.5, 1.0)):
                await self._woken.wait()
        except TimeoutError:
            pass

    # Called by the connection.

    def packet_received(self, connection: Connection, packet: Packet) -> None:
        """Ignore a request: brokers send none to clients today."""

    def connection_lost(self, connection: Connection, reason: str) -> None:
        if connection is self.connection:
            self.connection = None
            log.info("connection lost group=%s endpoint=%s reason=%s", self.broker_group, self.endpoint, reason)
            self._owner.link_lost(self, reason)
            self._woken.set()

    def writable_again(self, connection: Connection) -> None:
        self._owner.link_writable(self)
