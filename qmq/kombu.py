"""Shell. Transport of kombu, with which Celery's tasks are messages of qmq: `broker_url = "qmq://127.0.0.1:8080"`.

Importing this module registers the name `qmq`. A queue is a subject, and all workers are one consumer group of it. A
fanout exchange is a subject, and each of its queues a consumer group; queues that end with their process receive its
messages as a broadcast. An unacked task belongs to its worker's lease; the broker keeps the log.
Differences from AMQP: docs/integrations.md.

    message of kombu    property `kombu`, JSON: body, headers, properties with delivery_tag and delivery_info
    task with an ETA    delayed message, unless the option `delay` is off
"""

from __future__ import annotations

import json
import os
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from queue import Empty
from threading import Event, Lock
from time import monotonic, sleep
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import Request

from kombu.exceptions import ChannelError
from kombu.transport import TRANSPORT_ALIASES, virtual
from kombu.transport.virtual.base import queue_declare_ok_t
from kombu.utils.json import dumps, loads
from kombu.utils.url import parse_url
from kombu.utils.uuid import uuid

from qmq.access import find_token
from qmq.blocking import Consumer, Producer
from qmq.client.batch import Receipt
from qmq.client.health import HealthState
from qmq.client.received import ReceivedMessage
from qmq.control_plane import first_answer, get, metaserver_urls
from qmq.errors import ClientClosed, NotServed, OutcomeUnknown
from qmq.message import Message
from qmq.types import Endpoint

TRANSPORT_ALIASES["qmq"] = "qmq.kombu:Transport"

CONTENT, FANOUT = "kombu", "fanout"
ANSWER_S, ANSWER_BYTES_MAX = 5.0, 1 << 20
GET_S = 2.0
"""Time for the first message of a queue that is read without a consumer."""


class NotStored(ConnectionError):
    """A task is not known to be stored. Celery's retry policy sends it again, so it may be stored twice."""


class QoS(virtual.QoS):  # type: ignore[misc]
    """Acks and rejections of a channel, from any thread; the broker has the unacked tasks, so none is restored here."""

    restore_at_shutdown = False

    def ack(self, delivery_tag: str) -> None:
        if (message := self.channel.take(delivery_tag)) is not None:
            message.ack_nowait()
        self._settled(delivery_tag)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        if (message := self.channel.take(delivery_tag)) is None:
            pass
        elif requeue:
            message.nack_nowait("requeued by kombu", delay=0)
        else:
            message.dead_letter_nowait("rejected by kombu")
        self._settled(delivery_tag)

    def restore_unacked(self) -> list[Any]:
        self._flush()
        for tag in list(self._delivered):
            self.reject(tag, requeue=True)
        return []

    def _settled(self, delivery_tag: str) -> None:
        super().ack(delivery_tag)
        self.channel.connection.arrived.set()


class Channel(virtual.Channel):  # type: ignore[misc]
    """Virtual channel on queues that are subjects."""

    QoS = QoS
    do_restore = False
    supports_fanout = True

    def __init__(self, connection: Transport, **more: Any) -> None:
        super().__init__(connection, **more)
        self._tasks: dict[str, Tasks] = {}
        self._received: dict[str, ReceivedMessage] = {}
        """Delivery tag -> message without a decision."""
        self._no_ack: set[str] = set()

    # Sending.

    def _put(self, queue: str, message: dict[str, Any], **more: Any) -> None:
        self._send(f"queue {queue}", Message(self._subject(queue)), message)

    def _put_fanout(self, exchange: str, message: dict[str, Any], routing_key: str, **more: Any) -> None:
        self._send(f"exchange {exchange}", Message(self._subject(f"{exchange}.{FANOUT}")), message)

    def _send(self, place: str, sent: Message, message: dict[str, Any]) -> None:
        sent.set_large(CONTENT, dumps(message))
        if expires_ms := message["properties"].get("expiration"):
            sent.expires_after = int(expires_ms) / 1000
        eta = self.connection.eta_of(message)
        try:
            receipt: Receipt = self.connection.producer.send(sent, at=eta)
        except ClientClosed as error:
            raise NotStored(str(error)) from error
        if not receipt.is_stored:
            hint = "" if eta is None else '; without a delay group, set broker_transport_options = {"delay": False}'
            raise NotStored(f"{place}: task is {receipt.outcome}: {receipt.reason}{hint}")

    # Receiving.

    def basic_consume(self, queue: str, no_ack: bool, *args: Any, **more: Any) -> None:
        (self._no_ack.add if no_ack else self._no_ack.discard)(queue)
        super().basic_consume(queue, no_ack, *args, **more)
        self._of(queue)
        self.connection.arrived.set()

    def basic_get(self, queue: str, no_ack: bool = False, **more: Any) -> Any:
        with suppress(Empty):
            message = self.Message(self._got(queue, GET_S), channel=self)
            if no_ack:
                self._received.pop(message.delivery_tag).ack_nowait()
            else:
                self.qos.append(message, message.delivery_tag)
            return message
        return None

    def _get(self, queue: str, timeout: float | None = None) -> dict[str, Any]:
        payload = self._got(queue, 0.0)
        if queue in self._no_ack:
            self._received.pop(payload["properties"]["delivery_tag"]).ack_nowait()
        return payload

    def _got(self, queue: str, timeout: float) -> dict[str, Any]:
        message = self._of(queue).get(timeout)
        try:
            payload: dict[str, Any] = loads(message.get_large(CONTENT, ""))
            properties = payload["properties"]
            properties["delivery_info"]["redelivered"] = message.times > 1
        except (ValueError, KeyError, TypeError) as error:  # a worker would fail at it again and again
            message.dead_letter_nowait(
                f"the message is not of kombu: its property {CONTENT!r} is missing or unreadable: {error!r}"
            )
            raise Empty from error
        if self._fanout_of(queue):  # other queues of this channel get the same message
            properties["delivery_tag"] = f"{queue} {properties['delivery_tag']}"
        self._received[properties["delivery_tag"]] = message
        return payload

    def _of(self, queue: str) -> Tasks:
        if (tasks := self._tasks.get(queue)) is None:
            subject, options = self._pulling(queue)
            tasks = Tasks(self.connection.consumer, subject, self.connection.arrived, options)
            self._tasks[queue] = tasks
        return tasks

    def _pulling(self, queue: str) -> tuple[str, dict[str, Any]]:
        """Return the subject of a queue and the options of its puller."""
        name, group = self._place(queue)
        is_transient = self._fanout_of(queue) and queue in self.connection.transient
        start = "earliest" if name == queue else "latest"
        options = self.connection.pull_options | {"group": None if is_transient else group, "start": start}
        return self._subject(name), options

    def _place(self, queue: str) -> tuple[str, str]:
        """Return the name, without its prefix, of a queue's subject, and its consumer group."""
        if exchange := self._fanout_of(queue):
            return f"{exchange}.{FANOUT}", queue
        return queue, self.connection.pull_options["group"]

    def _fanout_of(self, queue: str) -> str | None:
        """Return the fanout exchange of a queue."""
        exchanges = [binding.exchange for binding in self.state.queue_bindings(queue)]
        return next((exchange for exchange in exchanges if self.typeof(exchange).type == FANOUT), None)

    def take(self, delivery_tag: str) -> ReceivedMessage | None:
        """Return a message that gets its decision now, or None if it has one (for instance without acks) or its channel
        is closed.
        """
        return self._received.pop(delivery_tag, None)

    def _subject(self, queue: str) -> str:
        return f"{self.connection.subject_prefix}{queue}"

    # Queues.

    def _new_queue(self, queue: str, auto_delete: bool = False, exclusive: bool = False, **more: Any) -> None:
        if auto_delete or exclusive:
            self.connection.transient.add(queue)

    def queue_declare(self, queue: str | None = None, passive: bool = False, **more: Any) -> Any:
        """Declare a queue. A passive declaration counts its tasks, with a request to each of its broker groups."""
        if passive and queue is not None:
            return queue_declare_ok_t(queue, self.count_waiting(queue), 0)
        queue = queue or f"amq.gen-{uuid()}"
        self._new_queue(queue, **more)
        return queue_declare_ok_t(queue, 0, 0)

    def count_waiting(self, queue: str) -> int:
        """Return the number of tasks that were not delivered yet.

        Raises:
            ChannelError: the token may not read the number, or there is no such queue. OSError, ValueError: no answer.
        """
        name, group = self._place(queue)
        words = urlencode({"subject": self._subject(name), "group": group})
        lag, reason = first_answer(self.connection.metaservers, partial(_lag, words, self.connection.token))
        if reason:
            raise ChannelError(f"queue {queue}: {reason}")
        return lag

    def queue_bind(self, queue: str, exchange: str | None = None, *args: Any, **more: Any) -> None:
        super().queue_bind(queue, exchange, *args, **more)
        exchanges = {binding.exchange for binding in self.state.queue_bindings(queue)}
        if len(exchanges) > 1 and self._fanout_of(queue):
            self.state.queue_bindings_delete(queue)
            raise ChannelError(f"Queue {queue!r} is bound to a fanout exchange and another one. Use a queue for each.")
        if self._fanout_of(queue) and queue not in self.connection.begun:
            self._begin(queue)

    def _begin(self, queue: str) -> None:
        """Begin the group of a fanout exchange's queue, which gets the messages sent from its declaration on.

        Raises:
            NotServed: no broker group answers.
        """
        if queue in self.connection.transient:
            self._of(queue).wait_until_joined(self.connection.timeout_s)
        else:
            subject, options = self._pulling(queue)
            tasks = Tasks(self.connection.consumer, subject, self.connection.arrived, options)
            try:
                tasks.wait_until_joined(self.connection.timeout_s)
            finally:
                tasks.close()
        self.connection.begun.add(queue)

    def _queue_bind(self, exchange: str, routing_key: str, pattern: str, queue: str) -> None:
        """Do nothing: bindings are in the state of the process."""

    def _purge(self, queue: str) -> int:
        """Ack the tasks that are ready now, and return their number. Tasks at running workers, and later ones, stay."""
        count, tasks = 0, self._of(queue)
        with suppress(Empty):
            while True:
                tasks.get(GET_S).ack_nowait()
                count += 1
        return count

    def _delete(self, queue: str, *args: Any, **more: Any) -> None:
        """Leave the queue; its tasks stay, because other processes may bind it."""
        if (tasks := self._tasks.pop(queue, None)) is not None:
            tasks.close()

    def basic_cancel(self, consumer_tag: str) -> None:
        queue = self._tag_to_queue.get(consumer_tag)
        super().basic_cancel(consumer_tag)
        if queue is not None and queue not in self._active_queues and not self._received:
            self._delete(queue)

    def close(self) -> None:
        if not self.closed:
            for queue in list(self._tasks):
                self._delete(queue)
            self._received.clear()
        super().close()


def _lag(words: str, token: str, url: str) -> tuple[int, str]:
    """Return the lag of a consumer group, and the metaserver's reason for refusing it. Blocks."""
    request = Request(f"{url}/api/v1/Lag?{words}", headers={"X-Api-Token": token})
    try:
        answer = json.loads(get(request, timeout_s=ANSWER_S, bytes_max=ANSWER_BYTES_MAX))
        return sum(row["messages"] for row in answer["data"]["lag"]), ""
    except HTTPError as error:
        with error:
            if error.code >= 500:
                raise
            try:
                return 0, str(json.loads(error.read(ANSWER_BYTES_MAX))["error"]["message"])
            except (KeyError, TypeError, ValueError):
                return 0, f"the metaserver does not count tasks: status {error.code}"


class Transport(virtual.Transport):  # type: ignore[misc]
    """Transport of one kombu connection, with a producer and a consumer of its own, made on first use."""

    Channel = Channel
    default_port = 8080
    driver_type: str = "qmq"
    driver_name: str = "qmq"
    implements = virtual.Transport.implements.extend(asynchronous=True)
    connection_errors = (*virtual.Transport.connection_errors, NotServed, OutcomeUnknown, ClientClosed, NotStored)
    recoverable_connection_errors = connection_errors

    def __init__(self, client: Any, **more: Any) -> None:
        super().__init__(client, **more)
        options = dict(client.transport_options)
        self.arrived: Arrivals = Arrivals()
        self.transient: set[str] = set()
        """Queues that end with their process."""
        self.begun: set[str] = set()
        """Queues of fanout exchanges whose groups exist."""
        self._loop: Any = None
        self.subject_prefix: str = str(options.get("subject_prefix", ""))
        self.pull_options: dict[str, Any] = {
            "group": options.get("group", "celery"),
            "retries_max": options.get("retries_max", 32),
        }
        self._delays = bool(options.get("delay", True))
        self._settings = {
            "metaserver": options.get("metaserver", self._addresses(client)),
            "app": options.get("app", "celery"),
            "token": client.password or None,
        }
        self.metaservers: str = metaserver_urls(self._settings["metaserver"])
        self.timeout_s = float(options.get("timeout_s", 30.0))
        self._producer: Producer | None = None
        self._consumer: Consumer | None = None

    def _addresses(self, client: Any) -> str:
        """Return the metaservers of `qmq://a;qmq://b`. A connection has the addresses of all of them and uses one that
        answers.
        """
        urls = [parse_url(url) for url in client.alt] or [{"hostname": client.hostname, "port": client.port}]
        places = [Endpoint(url["hostname"] or "127.0.0.1", url["port"] or self.default_port) for url in urls]
        return ",".join(f"http://{place}" for place in places)

    @property
    def token(self) -> str:
        return find_token(self._settings["token"])

    @property
    def producer(self) -> Producer:
        if self._producer is None:
            self._producer = Producer(**self._settings, timeout_s=self.timeout_s)
        return self._producer

    @property
    def consumer(self) -> Consumer:
        if self._consumer is None:
            self._consumer = Consumer(**self._settings)
        return self._consumer

    def eta_of(self, message: dict[str, Any]) -> datetime | None:
        """Return the time from which a task may run, if that is later than now."""
        if not self._delays or not (text := message["headers"].get("eta")):
            return None
        eta = datetime.fromisoformat(text)
        eta = eta if eta.tzinfo is not None else eta.replace(tzinfo=UTC)
        return eta if eta > datetime.now(UTC) else None

    def drain_events(self, connection: Any, timeout: float | None = None) -> None:
        """Deliver one task; raises TimeoutError, which is `socket.timeout`."""
        until = None if timeout is None else monotonic() + timeout
        while True:
            self.arrived.clear()
            try:
                self.cycle.get(self._deliver, timeout=timeout)
                return
            except Empty:
                left = LOOK_S if until is None else until - monotonic()
                if left <= 0:
                    raise TimeoutError from None
                self.arrived.wait(min(LOOK_S, left))

    def register_with_event_loop(self, connection: Any, loop: Any) -> None:
        """Deliver tasks on kombu's event loop, as they come."""
        self._loop = loop
        loop.add_reader(self.arrived.descriptor(), self._deliver_ready)
        self.arrived.set()

    def _deliver_ready(self) -> None:
        self.arrived.read()
        with suppress(Empty):
            while True:
                self.cycle.get(self._deliver, timeout=0)

    def close_connection(self, connection: Any) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self.arrived.descriptor())
            self._loop = None
        super().close_connection(connection)
        self.arrived.close()
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.close()


# -- tasks of queues that a worker pulls --------------------------------------------------------------------------

PULL_S = 3_600.0
"""Time limit of one pull. An end without a message costs nothing."""
LOOK_S = 1.0
"""Longest sleep of a thread that waits for tasks; arrivals and acks wake it earlier."""

JOIN_LOOK_S = 0.01


class Arrivals:
    """Signal that a task arrived, or that one was settled, which makes room for another. Set from any thread.

    A thread waits for the signal itself. Kombu's event loop, in which Celery's workers run, waits for the pipe.
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
    """Tasks of one queue for one channel. One task waits here; the others wait in the broker, for any worker."""

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
        """Leave the group; undecided tasks return to it at once."""
        if self._coming is not None:
            self._coming.cancel()
            with suppress(CancelledError, NotServed):
                self._coming.result(LOOK_S)
        self._puller.close()
