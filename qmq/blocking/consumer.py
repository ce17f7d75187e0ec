"""Shell. Consumer for programs without an event loop: `qmq.Consumer`, used from any thread."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from qmq.blocking import background as process
from qmq.blocking.background import Background, arguments_of, waits_for
from qmq.blocking.producer import Producer
from qmq.client.batch import Receipts
from qmq.client.consumer import Consumer as AsyncConsumer
from qmq.client.handler import Handler, check_callable
from qmq.client.health import Health
from qmq.client.lifetime import no_pickle, sigterm_calls
from qmq.client.listener import Listener
from qmq.client.membership import MasterChanged
from qmq.client.puller import Puller as AsyncPuller
from qmq.client.received import ReceivedMessage
from qmq.client.router import Listening, Router
from qmq.errors import ClientClosed, InvalidRequest, QmqError
from qmq.message import Message

H = TypeVar("H", bound=Handler)
C = TypeVar("C", bound=Callable[[MasterChanged], object])


class Consumer:
    """Consumer for threads, with listeners (`listen`, `run`), pullers (`pull`), or both.

    Listeners may be registered before a process forks: each process that calls `run` is a consumer of its own.

    Args: see `qmq.Consumer`.
    """

    @arguments_of(AsyncConsumer.__init__)
    def __init__(self, **settings: Any) -> None:
        self._producer = settings.get("producer")
        if isinstance(self._producer, Producer):
            settings["producer"] = _OnLoop(self._producer)
        self._make = partial(AsyncConsumer, **settings)
        self._asked: list[Callable[[AsyncConsumer], object]] = []
        """Registrations, which a forked process repeats."""
        self._pid = os.getpid()
        self._inner = self._make()
        self._run: _Run | None = None

    def __getstate__(self) -> dict[str, Any]:
        if self._asked or self._run is not None:
            raise no_pickle("A consumer with listeners")
        return self.__dict__

    @property
    def _own(self) -> AsyncConsumer:
        """Consumer of this process. One inherited from the parent has the parent's id and place in the groups."""
        if self._pid != os.getpid():
            self._pid, self._inner, self._run = os.getpid(), self._make(online=self._inner.is_online), None
            for ask in self._asked:
                ask(self._inner)
        return self._inner

    @property
    def id(self) -> str:
        """Name of this consumer in its groups."""
        return self._own.id

    # Listening.

    @arguments_of(AsyncConsumer.listen)
    def listen(self, subject: str, **options: Any) -> Callable[[H], H]:
        """Decorate the function that handles messages of `subject`: see `qmq.Consumer.listen`.

        Each of the `concurrency` handlers has a thread of its own. With `auto_ack=False`, a handler calls the message's
        `ack_nowait`, `nack_nowait` or `dead_letter_nowait`.
        """
        for name in {"tags", "filters"} & options.keys():
            if not isinstance(options[name], str):
                options[name] = list(options[name])  # read again in a forked process

        def register(handler: H) -> H:
            return self._register(handler, lambda consumer: consumer.listen(subject, **options)(handler))

        return register

    def include(self, router: Router) -> None:
        """Register the listeners of a router, which are plain functions: see `qmq.Consumer.include`."""

        def register(handler: H, listening: Listening, /) -> H:
            return self._register(handler, lambda consumer: consumer._register(handler, listening))

        router._included_by(register)

    def _register(self, handler: H, ask: Callable[[AsyncConsumer], object]) -> H:
        if check_callable("a handler", handler):
            raise InvalidRequest("a handler here is a plain function; qmq.Consumer takes coroutine functions")
        self._on_loop(ask)
        self._asked.append(ask)
        return handler

    def _on_loop(self, ask: Callable[[AsyncConsumer], object]) -> None:
        """Register a listener; on the loop if the consumer runs, where it starts at once."""
        consumer, run = self._own, self._run
        if run is None:
            ask(consumer)
            return

        async def work() -> None:
            ask(consumer)

        run.background.run(work())

    @property
    def listeners(self) -> Mapping[tuple[str, str], Listener]:
        """Listeners by subject and group: to stop and resume them, and to change their concurrency."""
        return self._own.listeners

    def run(self) -> None:
        """Call handlers until `stop`, SIGTERM or Ctrl-C; then finish running handlers, send acks, return the rest.

        SIGTERM is handled in the main thread, unless the application has a handler of its own.

        Raises:
            QmqError: a subscription ended, for instance because another process uses the consumer id.
        """
        consumer = self._own
        with process.lock:
            background = process.background()
        background.check_may_wait()
        if self._run is not None:
            raise InvalidRequest("this consumer runs already")
        if isinstance(self._producer, Producer):
            self._producer._connect()
        self._run = run = _Run(background, consumer)
        background.clients.add(self)
        try:
            with sigterm_calls(run.stop):
                run.wait()
        finally:
            background.clients.discard(self)
            self._run = None

    def stop(self) -> None:
        """End `run` as SIGTERM does; may be called from any thread, returns at once."""
        if self._pid == os.getpid() and (run := self._run) is not None:
            run.stop()

    def flush_at_exit(self) -> None:
        """End a `run` in a daemon thread at the end of the process, and wait for it."""
        self.close()

    def close(self) -> None:
        """End `run`, and wait for its end."""
        if self._pid == os.getpid() and (run := self._run) is not None:
            run.stop()
            run.wait()

    # Pulling.

    @arguments_of(AsyncConsumer.pull)
    def pull(self, subject: str, **options: Any) -> Puller:
        """Return a puller for `with`: see `qmq.Consumer.pull`."""
        return Puller(self._own.pull(subject, **options))

    # Together.

    def offline(self) -> None:
        """Leave all groups for now: see `qmq.Consumer.offline`."""
        self._own.offline()

    def online(self) -> None:
        """Join the groups again."""
        self._own.online()

    @property
    def is_online(self) -> bool:
        return self._own.is_online

    @property
    def cut_off(self) -> str:
        """Reason why a listener or puller is connected to no broker group: see `qmq.Consumer.cut_off`."""
        return self._own.cut_off

    @property
    def health(self) -> Health:
        """State of all listeners and pullers, with the reason: see `qmq.Consumer.health`."""
        return self._own.health

    def on_master_changed(self, callback: C) -> C:
        """Call `callback` with each `MasterChanged`, on the background thread, where it must not wait.

        Messages delivered by the old master whose acks it did not store may be delivered again.
        """
        self._own.on_master_changed(callback)
        self._asked.append(lambda consumer: consumer.on_master_changed(callback))
        return callback


class _OnLoop:
    """Producer for threads, with the methods of one for the loop's coroutines."""

    def __init__(self, producer: Producer) -> None:
        self._producer = producer

    async def send_many(self, messages: Iterable[Message], /) -> Receipts:
        return await self._producer._connect().send_many(messages)


class _Run:
    """Call of `run`."""

    def __init__(self, background: Background, consumer: AsyncConsumer) -> None:
        self.background = background
        self._stopped = asyncio.Event()
        self._ended: Future[None] = background.submit(self._serve(consumer))

    async def _serve(self, consumer: AsyncConsumer) -> None:
        running = asyncio.create_task(consumer.run())
        stopping = asyncio.create_task(self._stopped.wait())
        await asyncio.wait([running, stopping], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        consumer.stop()
        await running

    def stop(self) -> None:
        self.background.call_soon(self._stopped.set)

    def wait(self) -> None:
        """Wait for the end. An exception in the wait, such as Ctrl-C, begins the end and waits for it."""
        try:
            self._ended.result()
        except BaseException:
            if not self._ended.done():
                self.stop()
                with contextlib.suppress(QmqError):
                    self._ended.result()
            raise


class Puller:
    """Source of messages on request; a context manager, made by `Consumer.pull`, used from one thread at a time.

    On leaving, decisions are sent and undecided messages return to the group at once.
    """

    def __init__(self, inner: AsyncPuller) -> None:
        self._inner = inner
        self._background: Background | None = None

    def __getstate__(self) -> None:
        raise no_pickle("A puller")

    def __enter__(self) -> Self:
        with process.lock:
            background = process.background()
        background.run(self._inner.__aenter__())
        background.clients.add(self)
        self._background = background
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _opened(self) -> tuple[Background, AsyncPuller]:
        if self._background is None or self._background is not process.current():
            raise ClientClosed("the puller is not open in this process: use it with `with`")
        return self._background, self._inner

    pull: Final = waits_for(AsyncPuller.pull)
    flush: Final = waits_for(AsyncPuller.flush)
    _ack = waits_for(AsyncPuller.ack)
    _nack = waits_for(AsyncPuller.nack)
    _dead_letter = waits_for(AsyncPuller.dead_letter)

    def ack(self, messages: Iterable[ReceivedMessage]) -> None:
        """Mark messages as done, in any order. The acks are sent in the background; `flush` waits for them."""
        self._ack(list(messages))  # read in the caller's thread

    def nack(
        self, messages: Iterable[ReceivedMessage], reason: str = "", *, delay: float | timedelta | None = None
    ) -> None:
        """Have messages delivered again, to any consumer of the group: see `ReceivedMessage.nack`."""
        self._nack(list(messages), reason, delay=delay)

    def dead_letter(self, messages: Iterable[ReceivedMessage], reason: str) -> None:
        """Make messages dead letters: see `ReceivedMessage.dead_letter`."""
        self._dead_letter(list(messages), reason)

    @property
    def trouble(self) -> str:
        """Reasons why messages of some or all broker groups do not come now; "" while all are connected."""
        return self._inner.trouble

    def stop(self) -> None:
        """Take no more messages: see `qmq.client.membership`."""
        self._inner.stop()

    def resume(self) -> None:
        """Resume receiving."""
        self._inner.resume()

    def flush_at_exit(self) -> None:
        """Leave at the end of the process."""
        self.close()

    def close(self) -> None:
        """Leave, as at the end of `with`."""
        background, self._background = self._background, None
        if background is not None and background is process.current():
            background.clients.discard(self)
            background.run(self._inner.__aexit__(None, None, None))
