"""Shell. The broker in memory as tests see it: `Broker` beside coroutines, `BlockingBroker` beside plain functions.

It runs on a thread and an event loop of its own, so that it serves whatever loop, or none, the tested code has, and
goes on while that code blocks.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from qmq.broker.settings import BrokerSettings
from qmq.errors import ClientClosed, InvalidRequest, QmqError
from qmq.message import Message
from qmq.plain import plain, plain_text
from qmq.subjects import dead_letter_subject
from qmq.testing.machine import Machine
from qmq.testing.standing import Wish, consumed, delayed, subscribed

T = TypeVar("T")

CLOSE_S = 5.0
ADVANCE_S = 300.0
"""A year goes by in about a minute: leases are renewed at each step."""
WAIT_S = 20.0
"""How long the `wait_until` functions wait if they are not told: far longer than it takes, as machines stand still."""


class _Broker:
    """What both brokers have. Each call is carried out on the broker's loop, at once; from any thread but that.

    Args:
        group: name of the broker group, as messages and receipts show it.
        lease: seconds after which a consumer that vanished without a word loses what it held.
    """

    def __init__(self, *, group: str = "test", lease: float = 30.0) -> None:
        self._group = plain_text("group", group)
        self._settings = BrokerSettings(
            hostname="test",
            data=Path("memory"),
            token="any",
            segment_bytes=1 << 20,
            lease_ms=int(lease * 1000),
            # A test may skip days between two steps of the cores; the slave is not late because of that.
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

    # What clients need.

    @property
    def metaserver(self) -> str:
        """HTTP address for `Producer(metaserver=…)` and `Consumer(metaserver=…)`. Any token is accepted."""
        return self._running.metaserver.url

    # What was stored.

    def messages(self, subject: str) -> list[Message]:
        """Return all stored messages of `subject`, in order; consumed ones, too."""
        return self._ask(lambda machine: machine.messages(plain(subject)))

    def dead_letters(self, subject: str, group: str) -> list[Message]:
        """Return the messages of `subject` on which the consumer group `group` gave up, in order.

        Their properties tell more: `qmq_deadReason`, `qmq_times`, `qmq_deadSequence`.
        """
        return self.messages(dead_letter_subject(subject, group))

    def delayed(self, subject: str) -> list[Message]:
        """Return the messages of `subject` that wait until they are due, the first one first."""
        return self._ask(lambda machine: machine.delayed(plain(subject)))

    # Time.

    def advance(self, seconds: float) -> None:
        """Put the broker's clock forward: delayed messages and retries come due, vanished consumers lose their leases.

        When it returns, consumers can get what was delayed until then. Consumers that are connected keep their leases,
        however far it goes. Timers of clients do not change.
        """
        if seconds < 0:
            raise InvalidRequest("time goes forward only")
        machine = self._running
        machine.check()
        self._await(machine.advance(int(seconds * 1000)), ADVANCE_S)

    # What may go wrong.

    def readonly(self, subject: str = "*") -> None:
        """Take no new messages of `subject` (by default: of none) until `writable`, as after MarkReadonly.

        Producers keep messages until their `timeout_s`, and then say that they were refused. Consumers go on.
        """
        self._ask(lambda machine: machine.mark(readonly=plain(subject)))

    def writable(self) -> None:
        """End what `readonly` began."""
        self._ask(lambda machine: machine.mark(readonly=None))

    def refuse_next(self, error: QmqError, count: int = 1) -> None:
        """Answer the next `count` produce requests with `error`, without looking at them.

        The class tells the producer what to do, as ever: `InvalidMessage` refuses the messages, `Overloaded` and
        `NotServed` make it try again, after `OutcomeUnknown` it repeats the batch.
        """
        self._ask(lambda machine: machine.refusals.extend([error] * count))

    def drop_connections(self) -> None:
        """Hang up on all clients. They connect again by themselves; what was under way is asked for again."""
        self._running.check()
        self._await(self._running.drop())

    def swap_roles(self) -> None:
        """Let the group's other copy take over, as if its master had died.

        Consumers may be given again what they hold, and hear of it (`Consumer.on_master_changed`).
        """
        self._ask(lambda machine: machine.swap())


class Broker(_Broker):
    """A broker for tests of coroutines: `async with qmq.testing.Broker() as broker`.

    Each function but the three that wait does its work at once.
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
        """Wait until the consumer group has settled every message of `subject`: acked it or given up on it.

        Args:
            timeout: seconds of real time.
            skip_delays: whether to put the clock forward to the next retry whenever consumers hold nothing.

        Raises:
            TimeoutError: says what is not settled.
        """
        await self._wait(consumed(subject, group, skip_delays), timeout)

    async def wait_until_delayed(self, subject: str, group: str, messages: int = 1, timeout: float = WAIT_S) -> None:
        """Wait until at least `messages` wait for their retry; then `advance` brings them.

        Raises:
            TimeoutError: says how far the group is.
        """
        await self._wait(delayed(subject, group, messages), timeout)

    async def wait_until_subscribed(
        self, subject: str, group: str, consumers: int = 1, timeout: float = WAIT_S
    ) -> None:
        """Wait until so many consumers of the group are connected: who starts at "latest" gets all that comes now.

        Raises:
            TimeoutError: says how far the group is.
        """
        await self._wait(subscribed(subject, group, consumers), timeout)

    async def _wait(self, wish: Wish, timeout: float) -> None:
        self._ask(lambda machine: machine.watch(wish))
        try:
            async with asyncio.timeout(timeout):
                await asyncio.wrap_future(wish.granted)
        except TimeoutError:
            raise TimeoutError(self._ask(lambda machine: machine.give_up(wish, timeout))) from None


class BlockingBroker(_Broker):
    """A broker for tests of plain functions: `with qmq.testing.BlockingBroker() as broker`."""

    def wait_until_consumed(
        self, subject: str, group: str, timeout: float = WAIT_S, *, skip_delays: bool = True
    ) -> None:
        """See `Broker.wait_until_consumed`."""
        self._wait(consumed(subject, group, skip_delays), timeout)

    def wait_until_delayed(self, subject: str, group: str, messages: int = 1, timeout: float = WAIT_S) -> None:
        """See `Broker.wait_until_delayed`."""
        self._wait(delayed(subject, group, messages), timeout)

    def wait_until_subscribed(self, subject: str, group: str, consumers: int = 1, timeout: float = WAIT_S) -> None:
        """See `Broker.wait_until_subscribed`."""
        self._wait(subscribed(subject, group, consumers), timeout)

    def _wait(self, wish: Wish, timeout: float) -> None:
        self._ask(lambda machine: machine.watch(wish))
        try:
            wish.granted.result(timeout)
        except TimeoutError:
            raise TimeoutError(self._ask(lambda machine: machine.give_up(wish, timeout))) from None
