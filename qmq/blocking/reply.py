"""Shell. Request and reply for programs without an event loop: see `qmq.reply`."""

from __future__ import annotations

from types import TracebackType
from typing import Final, Self

from qmq.blocking import background as process
from qmq.blocking.background import Background, waits_for
from qmq.blocking.consumer import Consumer
from qmq.blocking.producer import Producer
from qmq.client.batch import Receipt
from qmq.client.lifetime import no_pickle
from qmq.client.received import ReceivedMessage
from qmq.errors import ClientClosed
from qmq.message import Message
from qmq.reply import Requester as AsyncRequester
from qmq.reply import reply as async_reply


class Requester:
    """Requester for threads: sends requests and returns their answers. A context manager.

    It connects on first use. A forked process connects again.

    Args: see `qmq.reply.Requester`.
    """

    def __init__(
        self, producer: Producer | None = None, consumer: Consumer | None = None, *, reply_subject: str
    ) -> None:
        self._producer = Producer() if producer is None else producer
        self._is_own = producer is None
        self._consumer = Consumer() if consumer is None else consumer
        self._reply_subject = reply_subject
        self._open: tuple[Background, AsyncRequester] | None = None
        self._is_closed = False

    def __enter__(self) -> Self:
        self._opened()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __getstate__(self) -> None:
        raise no_pickle("A requester")

    request: Final = waits_for(AsyncRequester.request)

    def close(self) -> None:
        """Stop waiting for answers; waiting requests raise ClientClosed."""
        self._is_closed = True
        self.disconnect()

    def disconnect(self) -> None:
        """Close as `close` does, but connect again on the next use."""
        opened, self._open = self._open_here(), None
        if opened is not None:
            background, requester = opened
            background.clients.discard(self)
            background.run(requester.__aexit__(None, None, None))
        if self._is_own:
            self._producer.close()

    def flush_at_exit(self) -> None:
        """Do nothing at the end of the process, because each request waits for its answer or timeout."""

    def _open_here(self) -> tuple[Background, AsyncRequester] | None:
        opened = self._open
        return opened if opened is not None and opened[0] is process.current() else None

    def _opened(self) -> tuple[Background, AsyncRequester]:
        if (opened := self._open_here()) is not None:
            return opened
        session = self._producer._session()
        with process.lock:
            if self._is_closed:
                raise ClientClosed("the requester is closed")
            if (opened := self._open_here()) is None:
                requester = AsyncRequester(session.producer, self._consumer._own, reply_subject=self._reply_subject)
                session.background.run(requester.__aenter__())
                session.background.clients.add(self)
                opened = self._open = session.background, requester
            return opened


def reply(producer: Producer, message: ReceivedMessage, answer: Message) -> Receipt:
    """Answer a request, in its handler, before it returns. See `qmq.reply.reply`."""
    session = producer._session()
    return session.background.run(async_reply(session.producer, message, answer))
