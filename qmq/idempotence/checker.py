"""Shell. Filter that lets a message through once: claim its key, handle the message, mark the key as handled."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from qmq.client.handler import check_plain
from qmq.client.received import ReceivedMessage
from qmq.errors import DeadLetter, InvalidRequest, RetryLater
from qmq.idempotence.keys import Claim, KeyOf, KeyStore, State, message_key
from qmq.logs import bounded

T = TypeVar("T")


async def in_thread(call: Callable[[], T]) -> T:
    """Run a blocking call in a thread. Who is cancelled meanwhile goes on when it has ended, as nothing can stop it:
    what is done next, for instance to undo it, then finds it done."""
    task = asyncio.ensure_future(asyncio.to_thread(call))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        task.exception()  # nobody waits for it any more
        raise


log = bounded(__name__)

RENEWALS_PER_LEASE = 3
"""Two of them may fail or be late before anybody else takes the message."""


class Idempotence:
    """A filter for `Consumer.listen`: a message that the group has handled is acked without its handler.

    The key is claimed before the handler and marked as handled after it, each in a step of its own. So a process that
    dies in between leaves a claim, and once its lease has ended the message is handled again: never lost, and repeated
    only by a crash in the handler or right behind it. What must not even be repeated then belongs into a database
    transaction with the key: `qmq.idempotence.transaction`.

    Two processes that have the same message at the same time: one handles it, the other one asks for it again when
    the first one's lease will have ended. A handler that raises gives the key back before the message fails.

    Args:
        keys: where keys are kept, for instance `SqlKeys(engine)`.
        key: what identifies the work instead of the message's id, for instance `lambda message: message["orderNo"]`.
        lease_s: how long a message waits whose process died. While a handler runs, its lease is renewed.
        done_for: errors after which the message still counts as handled. It fails, comes again, and is acked.
        handle_anyway: handle messages also when the store fails, more than once perhaps; otherwise they fail.
    """

    needs_auto_ack = True
    """An ack of its own would leave before the key is kept, or a nack of its own after."""

    def __init__(
        self,
        keys: KeyStore,
        *,
        key: KeyOf | None = None,
        lease_s: float = 30.0,
        done_for: tuple[type[Exception], ...] = (),
        handle_anyway: bool = False,
    ) -> None:
        if not lease_s > 0:
            raise InvalidRequest(f"a lease is longer than 0 s, not {lease_s}")
        self._keys = keys
        self._lease_s = lease_s
        self._name_of = None if key is None else check_plain("key", key)
        self._done_for = done_for
        self._handle_anyway = handle_anyway

    async def __call__(self, message: ReceivedMessage, handle: Callable[[ReceivedMessage], Awaitable[object]]) -> None:
        held = _Held(self._keys, message_key(message, self._name_of), self._lease_s)
        try:
            claim = await held.claim()
        except Exception as error:
            self._may_go_on(message, error)
            await handle(message)
            return
        if claim.state is State.HANDLED:
            return
        if claim.state is State.BUSY:
            raise RetryLater(claim.left_s)
        try:
            async with held.renewed():
                await handle(message)
        except BaseException as error:
            await (held.finish() if self._is_done(error) else held.release())
            raise
        try:
            await held.finish()
        except RetryLater:
            raise
        except Exception as error:
            self._may_go_on(message, error)

    def _is_done(self, error: BaseException) -> bool:
        """Whoever asks for the message again, or gives it up, has not handled it."""
        return isinstance(error, self._done_for) and not isinstance(error, RetryLater | DeadLetter)

    def _may_go_on(self, message: ReceivedMessage, error: Exception) -> None:
        if not self._handle_anyway:
            raise error
        log.warning("keys are not kept, message may be handled again id=%s error=%r", message.id, error)


class _Held:
    """The claim of one message; made and ended by one call of the filter."""

    def __init__(self, keys: KeyStore, key: str, lease_s: float) -> None:
        self._keys = keys
        self._key = key
        self._lease_s = lease_s
        self._pause_s = lease_s / RENEWALS_PER_LEASE
        self._owner = secrets.token_hex(16)

    async def claim(self) -> Claim:
        try:
            return await self._keys.claim(self._key, self._owner, self._lease_s)
        except asyncio.CancelledError:
            await self.release()  # it may have been carried out
            raise

    async def finish(self) -> None:
        if not await self._keys.finish(self._key, self._owner):
            log.warning("key was taken over while its message was handled key=%s", self._key)
            raise RetryLater(self._lease_s)  # by then it is known what the other one made of it

    async def release(self) -> None:
        """Give the key back. If that fails, the lease does it later: what the handler raised is what counts."""
        try:
            await self._keys.release(self._key, self._owner)
        except Exception as error:
            log.warning("key stays until its lease ends key=%s error=%r", self._key, error)

    @asynccontextmanager
    async def renewed(self) -> AsyncIterator[None]:
        """Renew the lease meanwhile, as often as it needs."""
        loop, tasks = asyncio.get_running_loop(), list[asyncio.Task[None]]()
        # Most handlers end before: a timer costs them 2 µs, a task 30 µs.
        timer = loop.call_later(self._pause_s, lambda: tasks.append(loop.create_task(self._renew())))
        try:
            yield
        finally:
            timer.cancel()
            for task in tasks:
                task.cancel()
                await asyncio.wait([task])

    async def _renew(self) -> None:
        while True:
            try:
                if not await self._keys.renew(self._key, self._owner, self._lease_s):
                    return  # `finish` says so
            except Exception as error:
                log.warning("lease of a key is not renewed key=%s error=%r", self._key, error)
            await asyncio.sleep(self._pause_s)
