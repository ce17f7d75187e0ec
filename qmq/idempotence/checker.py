"""Shell. Filter that passes a message on once: claim its key, handle the message, mark the key as handled."""

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
from qmq.logs import bounded, shielded

T = TypeVar("T")


async def in_thread(call: Callable[[], T]) -> T:
    """Run a blocking call in a thread. A cancelled caller continues only after the call, which cannot be stopped.

    So a later step, for instance one that undoes the call, finds it done.
    """
    task = asyncio.ensure_future(asyncio.to_thread(call))
    try:
        return await shielded(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


log = bounded(__name__)

RENEWALS_PER_LEASE = 3
"""Number of renewals per lease. Two may fail or be late before another consumer takes the message."""


class Idempotence:
    """Filter for `Consumer.listen`: a message already handled by the group is acked without calling the handler.

    The key is claimed before the handler and marked as handled after it, each in a step of its own. If the process
    crashes in between, the claim's lease ends and the message is handled again. So no message is lost, and only a crash
    within or right after the handler repeats one. To exclude that too, write the key in the handler's database
    transaction: `qmq.idempotence.transaction`.

    If two processes have the same message at the same time, one handles it, and the other requests redelivery after the
    lease. If the handler raises, the key is released before the message fails.

    Args:
        keys: store of keys, for instance `SqlKeys(engine)`.
        key: identifies the work instead of the message's id, for instance `lambda message: message["orderNo"]`.
        lease_s: delay of a message after its process crashed. The lease is renewed while a handler runs.
        done_for: errors that mark a message as handled. The message fails, is redelivered, and is then acked.
        handle_anyway: whether messages are handled even if the store fails, perhaps more than once; otherwise they
            fail.
    """

    needs_auto_ack = True
    """True, because the handler's own ack would be sent before the key is stored, its own nack after."""

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
        """Return whether an error marks the message as handled; requests for redelivery or a dead letter never do."""
        return isinstance(error, self._done_for) and not isinstance(error, RetryLater | DeadLetter)

    def _may_go_on(self, message: ReceivedMessage, error: Exception) -> None:
        if not self._handle_anyway:
            raise error
        log.warning("keys are not kept, message may be handled again id=%s error=%r", message.id, error)


class _Held:
    """Claim of one message, for one call of the filter."""

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
            await self.release()  # the claim may have been stored
            raise

    async def finish(self) -> None:
        if not await self._keys.finish(self._key, self._owner):
            log.warning("key was taken by another process while its message was handled key=%s", self._key)
            raise RetryLater(self._lease_s)  # by then the other process's outcome is known

    async def release(self) -> None:
        """Release the key. A failure is only logged, because the lease ends the claim later and the handler's error
        matters more.
        """
        try:
            await self._keys.release(self._key, self._owner)
        except Exception as error:
            log.warning("key stays until its lease ends key=%s error=%r", self._key, error)

    @asynccontextmanager
    async def renewed(self) -> AsyncIterator[None]:
        """Renew the lease while the block runs."""
        loop, tasks = asyncio.get_running_loop(), list[asyncio.Task[None]]()
        # Most handlers end earlier: a timer costs 2 µs, a task 30 µs.
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
                    return  # `finish` reports it
            except Exception as error:
                log.warning("lease of a key is not renewed key=%s error=%r", self._key, error)
            await asyncio.sleep(self._pause_s)
