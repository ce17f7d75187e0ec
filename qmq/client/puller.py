"""Shell. Puller: a consumer for applications that request messages."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Collection, Iterable
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import Protocol

from qmq.client.lifetime import check_loop
from qmq.client.membership import Connections, Membership, announce
from qmq.client.received import ReceivedMessage, UnackedPiece
from qmq.client.subscription import Subscription
from qmq.client.terms import Terms
from qmq.errors import ClientClosed, NotServed, QmqError

CUT_OFF_S = 30.0
"""Shortest time without a connection to any broker group after which a pull fails: a producer's default timeout."""
JOINED_S = 1.0
"""Longest wait for the messages of a broker group after the subscribe. Before they can arrive, "none" would mean
nothing.
"""


class PullerOwner(Protocol):
    """Consumer of a puller."""

    def entered(self, puller: Puller) -> Connections: ...

    async def left(self, puller: Puller) -> None: ...


class Puller(Membership):
    """Source of messages on request; an async context manager, made by `Consumer.pull`.

    It prefetches messages. On leaving, decisions are sent and undecided messages return to the group at once.
    """

    def __init__(self, terms: Terms, home: PullerOwner, *, drain_s: float, is_online: bool) -> None:
        super().__init__(terms, drain_s=drain_s, is_online=is_online)
        self._home = home
        self._task: asyncio.Task[None] | None = None
        self._turned = asyncio.Event()
        """Set while there is a subscription, and at the end."""
        self._acked: deque[list[ReceivedMessage]] = deque()
        """At most once: messages that were acked for a pull that was then cancelled. No broker delivers them again."""

    async def __aenter__(self) -> Puller:
        if self._task is not None:
            raise ClientClosed("a puller is opened once")
        self._task = self.start(self._home.entered(self))
        self._task.add_done_callback(lambda _: self._turned.set())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        check_loop("the puller", self._loop)
        try:
            self.end()
            if self._subscription is not None:
                self._subscription.settled()  # calls that wait for decisions before going offline return
            with suppress(QmqError):
                await self._task
        finally:
            await self._home.left(self)

    async def pull(self, messages_max: int, *, timeout: float) -> list[ReceivedMessage]:
        """Return up to `messages_max` messages; without any, wait up to `timeout` seconds for the first one.

        The timeout does not count while no broker group is connected, so an empty result means that the connected
        ones have none. `trouble` names broker groups that are not connected. With a timeout of 0, it returns prefetched
        messages only. While the puller is stopped or offline, it returns none.

        Raises:
            AccessError: the token is rejected.
            NotServed: no broker group was connected for 30 s, or for `timeout` if that is longer; retry.
            QmqError: the subscription ended, for instance because another process uses the consumer id.
        """
        check_loop("the puller", self._loop)
        if messages_max <= 0:
            return []
        await asyncio.sleep(0)  # a loop of pulls must not keep the event loop from reading
        begun_s, wait_s = asyncio.get_running_loop().time(), timeout
        while True:
            try:
                async with asyncio.timeout(wait_s):
                    subscription, messages = await self._taken(messages_max)
                break
            except TimeoutError:
                pass
            if (wait_s := self._still_waits_s(begun_s, timeout)) <= 0:
                return []
        if messages[0]._piece.suspected:
            await _begun(messages[0])
        return await self._confirmed(subscription, messages) if self.terms.most_once else messages

    def _still_waits_s(self, begun_s: float, timeout: float) -> float:
        """Return the time for which a pull at its timeout still waits; raises NotServed."""
        subscription, now_s = self._subscription, asyncio.get_running_loop().time()
        if timeout <= 0 or subscription is None or subscription.is_closing:
            return 0.0
        if not subscription.is_cut_off:
            return subscription.joined_s + min(timeout, JOINED_S) - now_s
        if (left_s := begun_s + max(timeout, CUT_OFF_S) - now_s) <= 0:
            raise NotServed(f"no broker group is connected: {subscription.trouble}")
        return min(left_s, timeout)

    async def _taken(self, messages_max: int) -> tuple[Subscription, list[ReceivedMessage]]:
        while True:
            subscription = await self._current()
            if messages := self._take_acked(messages_max) or subscription.take(messages_max):
                return subscription, messages  # no await from here on: a cancellation would lose the messages
            await subscription.wait()

    def _take_acked(self, messages_max: int) -> list[ReceivedMessage]:
        if not self._acked:
            return []
        messages = self._acked.popleft()
        if left := messages[messages_max:]:
            self._acked.appendleft(left)
        return messages[:messages_max]

    async def _confirmed(self, subscription: Subscription, messages: list[ReceivedMessage]) -> list[ReceivedMessage]:
        """At most once: ack messages; return those with a stored ack that no other consumer has begun."""
        try:
            confirmed = await subscription.confirmed(messages)
        except asyncio.CancelledError:
            self._acked.append(messages)
            raise
        return [message for message in confirmed if message.times == 1 and not message._piece.suspected]

    async def _current(self) -> Subscription:
        while True:
            if self._task is None or self._is_ended:
                raise ClientClosed("the puller is not open: use it with `async with`")
            subscription = self._subscription
            if subscription is not None and subscription.error is not None:
                raise subscription.error
            if subscription is not None and not subscription.is_closing:
                return subscription
            if self._task.done():
                self._task.result()
                raise ClientClosed("the puller is closed")
            self._turned.clear()
            await self._turned.wait()

    async def __aiter__(self) -> AsyncIterator[ReceivedMessage]:
        """Yield messages until the puller ends. The next step acks a message that the application did not decide."""
        while True:
            try:
                messages = await self.pull(1, timeout=CUT_OFF_S)
            except NotServed:
                continue
            except ClientClosed:
                if self._is_ended:
                    return
                raise
            for message in messages:
                yield message
                await self.ack([message])

    async def ack(self, messages: Iterable[ReceivedMessage]) -> None:
        """Mark messages as done, in any order. The acks are sent in the background; `flush` waits for them."""
        piece: UnackedPiece | None = None
        for message in messages:
            if message._piece is not piece:
                piece = message._piece
                piece.acker.done(piece)
            piece.mark(message._at)

    async def nack(
        self, messages: Iterable[ReceivedMessage], reason: str = "", *, delay: float | timedelta | None = None
    ) -> None:
        """Have messages delivered again, to any consumer of the group: see `ReceivedMessage.nack`."""
        for message in messages:
            message.nack_nowait(reason, delay=delay)

    async def dead_letter(self, messages: Iterable[ReceivedMessage], reason: str) -> None:
        """Make messages dead letters: see `ReceivedMessage.dead_letter`."""
        for message in messages:
            message.dead_letter_nowait(reason)

    async def flush(self, messages: Collection[ReceivedMessage] | None = None) -> None:
        """Wait until brokers have stored all decisions, or those on `messages` that this consumer has not lost.

        Raises:
            QmqError: the subscription ended; whether the decisions are stored is not known.
        """
        check_loop("the puller", self._loop)
        if (subscription := self._subscription) is not None:
            await subscription.flush(messages)
            if subscription.error is not None:
                raise subscription.error
        elif self._task is not None and self._task.done():
            self._task.result()

    # Hooks of Membership.

    def _joined(self, subscription: Subscription) -> None:
        self._turned.set()

    async def _leaving(self, subscription: Subscription, deadline: float) -> None:
        subscription.stop()
        await self._decided(subscription, deadline)

    def _waits_for_decisions(self) -> bool:
        return not self._is_ended


async def _begun(message: ReceivedMessage) -> None:
    """Announce to the broker that the application gets a suspected message, so a crash from now on counts."""
    try:
        await announce(message)
    except asyncio.CancelledError:
        message._piece.acker.not_begun(message)
        raise
