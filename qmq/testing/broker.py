"""Shell. In-memory broker for tests: `Broker` for coroutines, `BlockingBroker` for plain functions.

It runs on a thread and an event loop of its own, so it serves code on any loop or none, and continues while that code
blocks.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from qmq.blocking import Producer, Requester
from qmq.blocking import background as process
from qmq.broker.settings import BrokerSettings
from qmq.client import route_watch
from qmq.errors import ClientClosed, InvalidRequest, QmqError
from qmq.message import Message
from qmq.plain import plain, plain_text
from qmq.subjects import dead_letter_subject
from qmq.testing.conditions import Condition, consumed, delayed, stored, subscribed
from qmq.testing.machine import Machine

T = TypeVar("T")

CLOSE_S = 5.0
ADVANCE_S = 300.0
"""Time limit of `advance`: each message, retry and recurring schedule that comes due takes a step of the clock."""
_urls: set[str] = set()
"""Addresses of all brokers of this process: their clients are never redirected."""
WAIT_S = 20.0
"""Default timeout of the `wait_until` functions: far longer than needed, for machines that pause."""


def _blocking_clients() -> set[process.Client]:
    background = process.current()
    return set() if background is None else set(background.clients)


class _Broker:
    """Base of both brokers. Each call runs on the broker's loop, at once; it may come from any other thread.

    Args:
        group: name of the broker group in messages and receipts.
        lease: seconds until a consumer that vanished loses its unacked messages.
    """

    def __init__(self, *, group: str = "test", lease: float = 30.0) -> None:
        self._group = plain_text("group", group, is_blank_allowed=False)
        self._settings = BrokerSettings(
            hostname="test",
            data=Path("memory"),
            token="any",
            segment_bytes=1 << 20,
            lease_ms=int(lease * 1000),
            # A test may skip days between two steps of the cores, which does not mean that the slave is late.
            slave_lag_ms_max=1 << 50,
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._machine: Machine | None = None

    def __enter__(self) -> Self:
        self._open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _open(self) -> None:
        if self._loop is not None:
            raise ClientClosed("a broker is opened once")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="qmq broker of a test", daemon=True)
        self._thread.start()
        try:
            self._machine = self._await(self._start())
        except BaseException:
            self._end_loop(self._loop)
            raise
        _urls.add(self.metaserver)

    async def _start(self) -> Machine:
        machine = Machine(self._group, self._settings)
        await machine.open()
        return machine

    def _close(self) -> None:
        machine, self._machine = self._machine, None
        if machine is None or self._loop is None:
            return
        try:
            self._await(machine.close())
        finally:
            self._end_loop(self._loop)
        machine.check()

    def _end_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.call_soon_threadsafe(loop.stop)
        self._thread.join(CLOSE_S)
        loop.close()

    def _await(self, work: Coroutine[Any, Any, T], timeout_s: float = CLOSE_S) -> T:
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    @property
    def _running(self) -> Machine:
        if self._machine is None:
            raise ClientClosed("the broker is not open: use it with `with` or `async with`")
        return self._machine

    def _ask(self, question: Callable[[Machine], T]) -> T:
        machine = self._running

        async def answer() -> T:
            machine.check()
            return question(machine)

        return self._await(answer())

    # Addresses.

    @property
    def metaserver(self) -> str:
        """HTTP address for `Producer(metaserver=…)` and `Consumer(metaserver=…)`. Any token is accepted."""
        return self._running.metaserver.url

    @contextmanager
    def redirected(self) -> Iterator[None]:
        """Connect all clients that open meanwhile to this broker, also those at the top of the application's modules.

        Clients with the address of an in-memory broker keep it. On leaving, blocking clients that were opened meanwhile
        disconnect; on their next use they connect again.
        """
        address, outer, older = self.metaserver, route_watch.redirect, _blocking_clients()
        route_watch.redirect = lambda url: url if url in _urls else address
        try:
            yield
        finally:
            if self._machine is not None:
                self.writable()  # so that the last messages are sent without a timeout
            opened = _blocking_clients() - older
            for client in sorted(opened, key=lambda client: isinstance(client, Producer)):  # handlers end first
                with suppress(QmqError):  # error of a consumer, which its own thread reports
                    client.disconnect() if isinstance(client, Producer | Requester) else client.close()
            route_watch.redirect = outer

    # Stored messages.

    def messages(self, subject: str) -> list[Message]:
        """Return all stored messages of `subject`, in order, consumed ones included."""
        return self._ask(lambda machine: machine.messages(plain(subject)))

    def dead_letters(self, subject: str, group: str) -> list[Message]:
        """Return the dead letters of the consumer group `group` on `subject`, in order.

        Their properties include `qmq_deadReason`, `qmq_times` and `qmq_deadSequence`.
        """
        return self.messages(dead_letter_subject(subject, group))

    def delayed(self, subject: str) -> list[Message]:
        """Return the delayed messages of `subject`, earliest due first."""
        return self._ask(lambda machine: machine.delayed(plain(subject)))

    # Time.

    def advance(self, seconds: float) -> None:
        """Advance the broker's clock: delayed messages and retries come due, vanished consumers lose their leases.

        On return, consumers can get all messages that are due. Connected consumers keep their leases. Timers of clients
        do not change.
        """
        if seconds < 0:
            raise InvalidRequest("advance takes 0 seconds or more")
        machine = self._running
        machine.check()
        self._await(machine.advance(int(seconds * 1000)), ADVANCE_S)

    # Faults.

    def readonly(self, subject: str = "*") -> None:
        """Reject new messages of `subject` (by default of all) until `writable`, as after MarkReadonly.

        Producers keep messages until their `timeout_s`, then report them as refused. Consumers continue.
        """
        self._ask(lambda machine: machine.mark(readonly=plain(subject)))

    def writable(self) -> None:
        """End `readonly`."""
        self._ask(lambda machine: machine.mark(readonly=None))

    def refuse_next(self, error: QmqError, count: int = 1) -> None:
        """Answer the next `count` produce requests with `error`, unread.

        The class determines the producer's next step, as always: `InvalidMessage` refuses the messages, `Overloaded`
        and `NotServed` cause retries, `OutcomeUnknown` repeats the batch.
        """
        self._ask(lambda machine: machine.refusals.extend([error] * count))

    def drop_connections(self) -> None:
        """Close all client connections. Clients reconnect and repeat requests in flight."""
        self._running.check()
        self._await(self._running.drop())

    def swap_roles(self) -> None:
        """Promote the group's slave, as after a crash of the master.

        Consumers may get unacked messages again, and are notified (`Consumer.on_master_changed`).
        """
        self._ask(lambda machine: machine.swap())


class Broker(_Broker):
    """Broker for tests of coroutines: `async with qmq.testing.Broker() as broker`.

    All methods return at once, except the three that wait.
    """

    async def __aenter__(self) -> Self:
        self._open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    async def wait_until_consumed(
        self, subject: str, group: str, timeout: float = WAIT_S, *, skip_delays: bool = True
    ) -> None:
        """Wait until the consumer group has settled every message of `subject`, by ack or as a dead letter.

        Args:
            timeout: seconds of real time.
            skip_delays: whether to advance the clock to the next retry whenever all other messages are settled.

        Raises:
            TimeoutError: with the unsettled messages.
        """
        await self._wait(consumed(subject, group, skip_delays), timeout)

    async def wait_until_stored(self, subject: str, messages: int = 1, timeout: float = WAIT_S) -> list[Message]:
        """Wait until the broker has at least `messages` of the subject, and return all of them, as `messages` does.

        A delayed message counts when it is due.

        Raises:
            TimeoutError: with the number of messages.
        """
        await self._wait(stored(subject, messages), timeout)
        return self.messages(subject)

    async def wait_until_delayed(self, subject: str, group: str, messages: int = 1, timeout: float = WAIT_S) -> None:
        """Wait until at least `messages` wait for their retry; `advance` then makes them due.

        Raises:
            TimeoutError: with the group's progress.
        """
        await self._wait(delayed(subject, group, messages), timeout)

    async def wait_until_subscribed(
        self, subject: str, group: str, consumers: int = 1, timeout: float = WAIT_S
    ) -> None:
        """Wait until this many consumers of the group are connected: with start "latest" they get all later messages.

        Raises:
            TimeoutError: with the group's progress.
        """
        await self._wait(subscribed(subject, group, consumers), timeout)

    async def _wait(self, condition: Condition, timeout: float) -> None:
        self._ask(lambda machine: machine.watch(condition))
        try:
            async with asyncio.timeout(timeout):
                await asyncio.wrap_future(condition.met)
        except TimeoutError:
            raise TimeoutError(self._ask(lambda machine: machine.give_up(condition, timeout))) from None


class BlockingBroker(_Broker):
    """Broker for tests of plain functions: `with qmq.testing.BlockingBroker() as broker`."""

    def wait_until_consumed(
        self, subject: str, group: str, timeout: float = WAIT_S, *, skip_delays: bool = True
    ) -> None:
        """Wait until a group has settled all messages; see `Broker.wait_until_consumed`."""
        self._wait(consumed(subject, group, skip_delays), timeout)

    def wait_until_stored(self, subject: str, messages: int = 1, timeout: float = WAIT_S) -> list[Message]:
        """Wait until messages are stored, and return them; see `Broker.wait_until_stored`."""
        self._wait(stored(subject, messages), timeout)
        return self.messages(subject)

    def wait_until_delayed(self, subject: str, group: str, messages: int = 1, timeout: float = WAIT_S) -> None:
        """Wait for delayed retries; see `Broker.wait_until_delayed`."""
        self._wait(delayed(subject, group, messages), timeout)

    def wait_until_subscribed(self, subject: str, group: str, consumers: int = 1, timeout: float = WAIT_S) -> None:
        """Wait for consumers; see `Broker.wait_until_subscribed`."""
        self._wait(subscribed(subject, group, consumers), timeout)

    def _wait(self, condition: Condition, timeout: float) -> None:
        self._ask(lambda machine: machine.watch(condition))
        try:
            condition.met.result(timeout)
        except TimeoutError:
            raise TimeoutError(self._ask(lambda machine: machine.give_up(condition, timeout))) from None
