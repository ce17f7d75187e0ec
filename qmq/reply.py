"""Shell. Request and reply: send a message, and wait for its handler's answer.

Properties of a request:

    qreply_subject   subject of the answer
    qreply_id        "requester-number"; the answer carries it too, and has the requester's part as its tag

Each requester receives the subject of answers as a broadcast, filtered by its tag.
"""

from __future__ import annotations

import asyncio
import secrets
from datetime import UTC, datetime, timedelta
from itertools import count
from types import TracebackType
from typing import Protocol

from qmq.client.batch import Outcome, Receipt
from qmq.client.consumer import Consumer
from qmq.client.health import Health, not_connected, worst
from qmq.client.lifetime import no_pickle
from qmq.client.producer import Producer
from qmq.client.puller import Puller
from qmq.client.received import ReceivedMessage
from qmq.errors import ClientClosed, InvalidRequest, NoAnswer, NotServed, QmqError
from qmq.logs import retrieve_error
from qmq.message import Message

REPLY_SUBJECT, REPLY_ID = "qreply_subject", "qreply_id"

CLOCKS_DIFFER = timedelta(seconds=60)
"""Answers are read from this time before the requester's begin on, by the brokers' clocks."""
PULL_MESSAGES, PULL_TIMEOUT_S = 1_000, 60.0


class Sends(Protocol):
    """A producer, or a wrapper of one."""

    async def send(self, message: Message) -> Receipt: ...


class Requester:
    """Requester for one event loop: sends requests and returns their answers. An async context manager.

    Args:
        producer: sends the requests; stays open afterwards. By default one of its own, with the settings of the
            environment: `qmq.Producer()`.
        consumer: receives the answers, beside its listeners. The default is `qmq.Consumer()`.
        reply_subject: subject of the answers of all requests of an application, for instance "shop.answers".
    """

    def __init__(self, producer: Sends | None = None, consumer: Consumer | None = None, *, reply_subject: str) -> None:
        self._own: Producer | None = None
        self._makes_own = producer is None
        self._producer: Sends = Producer() if producer is None else producer
        self._consumer = Consumer() if consumer is None else consumer
        self._reply_subject = reply_subject
        self._name_anew()
        self._numbers = count(1)
        self._waiting: dict[str, asyncio.Future[ReceivedMessage]] = {}
        self._reader: asyncio.Task[None] | None = None
        self.late_answers: int = 0
        """Number of answers after the timeout, and of second answers to requests that were handled twice."""

    def _name_anew(self) -> None:
        self._name = secrets.token_hex(8)
        start = datetime.now(UTC) - CLOCKS_DIFFER
        self._puller = self._consumer.pull(self._reply_subject, broadcast=True, tags=(self._name,), start=start)

    async def __aenter__(self) -> Requester:
        self._name_anew()  # otherwise forked workers would take each other's answers
        await self._puller.__aenter__()
        if self._makes_own:
            self._own = self._producer = await Producer().__aenter__()
        self._reader = asyncio.create_task(self._read(self._puller))
        self._reader.add_done_callback(retrieve_error)  # `_fail` reports it to requests
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        reader, self._reader = self._reader, None
        try:
            if reader is not None:
                reader.cancel()
                await asyncio.wait([reader])
        finally:
            self._fail(ClientClosed("the requester is closed"))
            if self._own is not None:
                await self._own.close()
            await self._puller.__aexit__(kind, error, trace)

    def __getstate__(self) -> None:
        raise no_pickle("A requester")

    @property
    def waiting(self) -> int:
        """Number of requests without an answer."""
        return len(self._waiting)

    @property
    def health(self) -> Health:
        """State of the answers' connections, and of the requester's own producer."""
        if self._reader is None:
            return not_connected("the requester is not open")
        return worst([self._puller.health, *([self._own.health] if self._own is not None else [])])

    async def request(self, message: Message, *, timeout: float) -> ReceivedMessage:
        """Send a message and return the answer; `timeout`, in seconds, includes sending.

        Raises:
            NoAnswer: there was no answer in time. The request may have been handled, or may still be.
            NotServed: the request was not stored.
            ClientClosed: the requester is not open, or was closed meanwhile.
            QmqError: answers cannot be received.
        """
        self._check_open()
        identity = f"{self._name}-{next(self._numbers)}"
        message.properties = {**message.properties, REPLY_SUBJECT: self._reply_subject, REPLY_ID: identity}
        future: asyncio.Future[ReceivedMessage] = asyncio.get_running_loop().create_future()
        self._waiting[identity] = future
        try:
            async with asyncio.timeout(timeout) as clock:
                receipt = await self._producer.send(message)
                if receipt.outcome is Outcome.REFUSED:
                    raise NotServed(f"request {receipt.message_id} is not stored: {receipt.reason}")
                return await future
        except TimeoutError:
            if not clock.expired():
                raise
            if future.done() and not future.cancelled():
                return future.result()  # the answer came before the receipt of the request
            raise NoAnswer(f"no answer to message {message.id} within {timeout} s") from None
        finally:
            del self._waiting[identity]

    def _check_open(self) -> None:
        if self._reader is None:
            raise ClientClosed("the requester is not open: use it with `async with`")
        if self._reader.done():
            self._reader.result()

    async def _read(self, puller: Puller) -> None:
        try:
            while True:
                try:
                    answers = await puller.pull(PULL_MESSAGES, timeout=PULL_TIMEOUT_S)
                except NotServed:  # until a broker group is connected again
                    continue
                for answer in answers:
                    self._arrived(answer)
                await puller.ack(answers)
        except QmqError as error:
            self._fail(error)
            raise

    def _arrived(self, answer: ReceivedMessage) -> None:
        future = self._waiting.get(str(answer.get(REPLY_ID)))
        if future is None or future.done():
            self.late_answers += 1
        else:
            future.set_result(answer)

    def _fail(self, error: QmqError) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)


def is_request(message: Message) -> bool:
    """Return whether a requester waits for an answer to `message`."""
    return REPLY_SUBJECT in message.properties and REPLY_ID in message.properties


async def reply(producer: Sends, message: ReceivedMessage, answer: Message) -> Receipt:
    """Answer a request, in its handler, before it returns. Sets the answer's subject and tags.

    Raises:
        InvalidRequest: `message` is not a request.
        NotServed: the answer is not known to be stored. Let the handler raise this, and the request is delivered again.
    """
    if not is_request(message):
        raise InvalidRequest(f"message {message.id} is no request: its reply properties are missing")
    identity = str(message[REPLY_ID])
    answer.subject = str(message[REPLY_SUBJECT])
    answer.properties = {**answer.properties, REPLY_ID: identity}
    answer.tags = frozenset({identity.partition("-")[0]})
    receipt = await producer.send(answer)
    if not receipt.is_stored:
        raise NotServed(f"the answer to message {message.id} is not stored ({receipt.outcome}): {receipt.reason}")
    return receipt
