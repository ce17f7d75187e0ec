"""Shell. Tasks of kombu's queues that a worker pulls, and the signal of their arrival."""

from __future__ import annotations

import os
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from queue import Empty
from threading import Event, Lock
from time import monotonic, sleep
from typing import Any

from qmq.blocking import Consumer
from qmq.client.health import HealthState
from qmq.client.received import ReceivedMessage
from qmq.errors import NotServed

PULL_S = 3_600.0
"""Of one pull; its end without a message costs nothing."""
LOOK_S = 1.0
"""Longest sleep of a thread that waits for tasks; arrivals and acks wake it earlier."""

JOIN_LOOK_S = 0.01


class Arrivals:
    """Signal that a task came, or that one was settled, which makes room for another. Set from any thread.

    A thread waits for it, or kombu's event loop, in which Celery's workers run, for the pipe.
    """

    def __init__(self) -> None:
        self._event = Event()
        self._lock = Lock()
        self._pipe: tuple[int, int] | None = None

    def set(self) -> None:
        self._event.set()
        with self._lock, suppress(BlockingIOError):  # a full pipe wakes the loop, too
            if self._pipe is not None:
                os.write(self._pipe[1], b"\0")

    def clear(self) -> None:
        self._event.clear()

    def wait(self, seconds: float) -> None:
        self._event.wait(seconds)

    def descriptor(self) -> int:
        """Return the end of the pipe that is readable after `set`."""
        with self._lock:
            if self._pipe is None:
                self._pipe = os.pipe()
                for end in self._pipe:
                    os.set_blocking(end, False)
            return self._pipe[0]

    def read(self) -> None:
        """Empty the pipe."""
        with suppress(BlockingIOError):
            while os.read(self.descriptor(), 4096):
                pass

    def close(self) -> None:
        with self._lock:
            pipe, self._pipe = self._pipe, None
            for end in pipe or ():
                os.close(end)


class Tasks:
    """Tasks of one queue for one channel: one waits here, others in the broker, for any worker."""

    def __init__(self, consumer: Consumer, subject: str, arrived: Arrivals, options: dict[str, Any]) -> None:
        self._puller = consumer.pull(subject, prefetch_messages=1, **options)
        self._puller.__enter__()
        self._arrived = arrived
        self._coming: Future[list[ReceivedMessage]] | None = None
        self._ask()

    def wait_until_joined(self, timeout_s: float) -> None:
        """Wait until brokers have the queue's group. Raises NotServed."""
        until_s = monotonic() + timeout_s
        while (health := self._puller._inner.health).state is HealthState.NOT_CONNECTED:
            if monotonic() > until_s:
                raise NotServed(f"the queue is not declared at any broker group: {health.reason}")
            sleep(JOIN_LOOK_S)

    def get(self, timeout: float = 0.0) -> ReceivedMessage:
        """Return the next task; raises Empty."""
        coming = self._ask()
        try:
            messages = coming.result(timeout)
        except TimeoutError:
            raise Empty from None
        self._coming = None
        self._ask()
        if not messages:
            raise Empty
        return messages[0]

    def _ask(self) -> Future[list[ReceivedMessage]]:
        if self._coming is None:
            background, puller = self._puller._opened()
            self._coming = background.submit(puller.pull(1, timeout=PULL_S))
            self._coming.add_done_callback(lambda _: self._arrived.set())
        return self._coming

    def close(self) -> None:
        """Leave: undecided tasks return to the group at once."""
        if self._coming is not None:
            self._coming.cancel()
            with suppress(CancelledError, NotServed):
                self._coming.result(LOOK_S)
        self._puller.close()
