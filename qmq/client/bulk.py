"""Shell. One call of `send_many`: encodes messages into batches and keeps the receipts in their order.

The bytes are those of `qmq.codec`, whose encoder handles all unusual cases. The simple way encodes each value, joins
each message, and joins the batch. In its profile, with one property of 1 KiB, small copies and calls took half of the
time and page faults of fresh buffers the other half. Therefore:

- a batch is built as *text* in which one character stands for one byte (latin-1): ASCII strings, the usual case, go
  into it without an object or a copy of their own;
- the text is encoded in blocks that stay in the processor's cache and are sent without joining them;
- bodies stay bytes: a small one joins the block of its text, a large one is a block of its own, without a copy.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from itertools import accumulate, chain, islice
from typing import NamedTuple

from qmq.client.backlog import QueuedMessage, SubjectQueue
from qmq.client.batch import (
    BATCH_BYTES_MAX,
    BATCH_MESSAGES_MAX,
    Batch,
    MessageIds,
    Outcome,
    Receipt,
    Receipts,
    unstored,
    with_labels,
)
from qmq.client.delay import Delay
from qmq.client.sender import Flight, Sender
from qmq.codec import (
    FLAG_BODY,
    FLAG_TAGS,
    KEPT_MAX,
    VALUE_BYTES_MAX,
    Encoder,
    batch_blocks,
    batch_encoder,
    delayed_encoder,
    encode_content,
    encode_labels,
    encode_own,
    encode_tags,
    label_of_message,
)
from qmq.errors import InvalidMessage, InvalidName, InvalidRequest, QmqError
from qmq.log.frame import label_flags
from qmq.message import RESERVED, Message, not_a_message, text_of
from qmq.message_sizes import BODY_BYTES_MAX
from qmq.plain import plain

_LENGTHS = [n.to_bytes(2, "big").decode("latin-1") for n in range(VALUE_BYTES_MAX + 1)]
_SIZES = [n.to_bytes(4, "big").decode("latin-1") for n in range(4_096)]
BLOCK_BYTES = 32 * 1024
"""Measured: 16 to 64 KiB cost the same; with 512 KiB a message of 1 KiB takes twice as long."""
RAW_BYTES_MIN = 16 * 1024
"""Size of a body above which a copy costs more than a block of its own."""
_names: dict[str, str] = {}
"""Cache of encoded property names, each with its length in front."""
_UNUSUAL = "left to the encoder"
_LEFT_TO_THE_ENCODER = InvalidMessage, UnicodeEncodeError, IndexError, AttributeError
"""Exceptions that unusual messages raise. AttributeError: the properties are not a dict."""


class EncodedRun(NamedTuple):
    """Batch of the messages read. Labels follow it if `flags` has their bit.

    `rest` is the last message read, if it is not in the batch: it did not fit, has an order key or another subject, or
    cannot be encoded, because of `error`.
    """

    ids: list[str]
    blocks: list[bytes]
    rest: Message | None
    error: InvalidMessage | None
    flags: int


def encode_run(
    subject: str,
    messages: Iterable[Message],
    *,
    ids: MessageIds,
    now_ms: int,
    due_ms: int | None = None,
    bytes_max: int = BATCH_BYTES_MAX,
    compress_bytes_min: int | None = None,
) -> EncodedRun:
    """Encode messages until the batch is full or a message cannot be in it; sets missing ids.

    Args:
        messages: read no further than to the first message that is not in the batch.
        due_ms: common due time of delayed messages.
        bytes_max: limit of a batch of several messages.
        compress_bytes_min: see `batch_encoder`.

    Raises:
        InvalidMessage: an element of `messages` is not a message.
    """
    if due_ms is None:
        encoder = batch_encoder(subject, now_ms, compress_bytes_min)
    else:
        encoder = delayed_encoder(subject, now_ms, due_ms, compress_bytes_min)
    body_bytes_end = BODY_BYTES_MAX + 1 if compress_bytes_min is None else min(BODY_BYTES_MAX + 1, compress_bytes_min)
    run = _Run(subject, ids, encoder, body_bytes_end, bytes_max)
    source = iter(messages)
    while not run.is_over:
        _encode_block(run, source)
    return run.result()


class _Run:
    """A batch that is being encoded, in blocks. Made and used by `encode_run`."""

    __slots__ = (
        "bare",
        "blocks",
        "bodied",
        "body_bytes_end",
        "bytes_max",
        "encoder",
        "error",
        "fixed_bytes",
        "ids",
        "is_over",
        "labels",
        "message_bytes",
        "message_ids",
        "rest",
        "subject",
        "total",
    )

    def __init__(self, subject: str, ids: MessageIds, encoder: Encoder, body_bytes_end: int, bytes_max: int) -> None:
        self.subject = subject
        self.ids = ids
        self.encoder = encoder
        self.bare, self.bodied = _fronts(encoder, 0), _fronts(encoder, FLAG_BODY)
        self.fixed_bytes = len(self.bare[0]) + 2 + 4
        self.body_bytes_end = body_bytes_end
        """Smallest size of a body that is left to the encoder, because it is too large or gets compressed."""
        self.bytes_max = bytes_max
        self.blocks: list[bytes] = [b""]
        """The first block is for the end offsets of the messages."""
        self.message_bytes: list[int] = []
        self.message_ids: list[str] = []
        self.labels: dict[int, int] = {}
        self.total = 0
        self.rest: Message | None = None
        self.error: InvalidMessage | None = None
        self.is_over = False

    def encode_alone(self, message: Message) -> bytes | None:
        """Return an unusual message as encoded by the encoder, or None if that refuses it, which ends the batch.

        Raises:
            InvalidMessage: `message` is not a message.
        """
        if not isinstance(message, Message):
            raise not_a_message(message)
        try:
            message.id = plain(message.id)
            data = self.encoder(message)
        except InvalidMessage as error:
            self.rest, self.error = message, error
            return None
        if message.tags:
            self.labels[len(self.message_ids)] = encode_tags(message.tags).bits
        return data

    def end_block(self, pieces: list[bytes], text: str, made: int, total: int, last: Message | None = None) -> None:
        """Add a block, without its message `last` if the batch has no room for that."""
        self.ids.made, self.total = made, total
        raw = pieces.pop() if pieces and not text and len(pieces[-1]) >= RAW_BYTES_MIN else b""
        pieces.append(text.encode("latin-1"))
        data = b"".join(pieces)
        if self.total > self.bytes_max and len(self.message_ids) > 1 and last is not None:
            self.message_ids.pop()
            size = self.message_bytes.pop()
            self.total -= size
            self.rest, data, raw = last, data[: len(data) - size + len(raw)], b""
            self.is_over = True
        if data:
            self.blocks.append(data)
        if raw:
            self.blocks.append(raw)

    def result(self) -> EncodedRun:
        ends = array("I", accumulate(self.message_bytes, initial=0))
        blocks, count, flags = self.blocks, len(self.message_ids), 0
        blocks[0] = ends.tobytes()
        padding = bytes(-(4 * len(ends) + self.total) % 8)
        if len(blocks[-1]) < RAW_BYTES_MIN:
            blocks[-1] += padding
        elif padding:
            blocks.append(padding)
        self.labels.pop(count, None)
        if self.labels:
            every = [self.labels.get(position, 0) for position in range(count)]
            flags = label_flags(every)
            blocks.append(encode_labels(every))
        return EncodedRun(self.message_ids, blocks, self.rest, self.error, flags)


def _encode_block(run: _Run, messages: Iterator[Message]) -> None:
    """Encode messages until a block is full or the batch is over. Hot path: a call per message would cost a tenth."""
    subject, bare, bodied, fixed_bytes = run.subject, run.bare, run.bodied, run.fixed_bytes
    message_ids, message_bytes, labels, total = run.message_ids, run.message_bytes, run.labels, run.total
    prefix, made, body_bytes_end = run.ids.prefix, run.ids.made, run.body_bytes_end
    block_end = min(total + BLOCK_BYTES, run.bytes_max + 1)
    lengths, small_sizes, small_sizes_end, names = _LENGTHS, _SIZES, len(_SIZES), _names
    parts: list[str] = []
    pieces: list[bytes] = []
    for message in messages:
        mark, is_typed = len(parts), False
        try:
            if message.order_key is not None or message.subject != subject:
                run.rest = message
                break
            if (identity := message.id) is None:
                made += 1
                message.id = identity = f"{prefix}{made}"
            elif identity.__class__ is not str or not identity.isascii() or not 0 < len(identity) <= 100:
                raise InvalidMessage(_UNUSUAL)
            if (raw := message.body) is not None and (raw.__class__ is not bytes or len(raw) >= body_bytes_end):
                raise InvalidMessage(_UNUSUAL)
            untagged, tagged, fronts = bare if raw is None else bodied
            id_bytes, tags = len(identity), ""
            if message.tags:
                section, labels[len(message_ids)] = encode_tags(message.tags)
                front, tags = tagged + lengths[id_bytes], section.decode("latin-1")
            else:
                front = fronts.get(id_bytes) or _add_front(fronts, untagged, id_bytes)
            parts += (front, identity, tags, "")
            size_at, size = len(parts) - 1, 0
            for name, value in message.properties.items():
                if value.__class__ is not str:
                    value, is_typed = text_of(value), True
                if not value.isascii():
                    value = value.encode().decode("latin-1")
                key, length = names.get(name) or _name(name), len(value)
                parts += (key, lengths[length], value)
                size += len(key) + 2 + length
            content_type, retries, expires = message.content_type, message.retries_max, message.expires_after
            if is_typed or content_type is not None or retries is not None or expires is not None:
                parts.append(own := _own(message, is_typed))
                size += len(own)
            parts[size_at] = small_sizes[size] if size < small_sizes_end else size.to_bytes(4, "big").decode("latin-1")
            size += fixed_bytes + id_bytes + len(tags) + (0 if raw is None else len(raw))
        except _LEFT_TO_THE_ENCODER:
            del parts[mark:]
            if (raw := run.encode_alone(message)) is None:
                break
            identity, size = str(message.id), len(raw)
        total += size
        message_bytes.append(size)
        message_ids.append(identity)
        if raw is not None:
            pieces += ("".join(parts).encode("latin-1"), raw)
            parts.clear()
        if total >= block_end or size >= RAW_BYTES_MIN:
            return run.end_block(pieces, "".join(parts), made, total, message)
    run.is_over = True
    run.end_block(pieces, "".join(parts), made, total)


def _fronts(encoder: Encoder, flag: int) -> tuple[str, str, dict[int, str]]:
    """Return the text before a message's id: without tags, with tags, and an empty cache of texts that end with the
    id's length.
    """
    front, flag = encoder.front.decode("latin-1"), encoder.flag | flag
    return chr(flag) + front, chr(flag | FLAG_TAGS) + front, {}


def _add_front(fronts: dict[int, str], untagged: str, id_bytes: int) -> str:
    front = fronts[id_bytes] = untagged + _LENGTHS[id_bytes]
    return front


def _own(message: Message, is_typed: bool) -> str:
    """Return the encoded properties that QMQ itself adds to a message."""
    if message.retries_max is not None or message.expires_after is not None:
        return encode_own(message, is_typed=is_typed, encoding="").decode("latin-1")
    content_type = message.content_type
    if content_type is not None and (message.body is None or content_type.__class__ is not str):
        raise InvalidMessage(_UNUSUAL)
    return _content(tuple(map(type, message.properties.values())) if is_typed else (), content_type)


@lru_cache(1_000)
def _content(classes: tuple[type, ...], content_type: str | None) -> str:
    if content_type is not None and not content_type.strip():
        raise InvalidMessage(_UNUSUAL)
    return encode_content(classes, content_type).decode("latin-1")


def _name(name: str) -> str:
    """Return a property's name with its length in front, from a bounded cache."""
    if not isinstance(name, str) or name.startswith(RESERVED):
        raise InvalidMessage(_UNUSUAL)
    data = name.encode()
    text = _LENGTHS[len(data)] + data.decode("latin-1")
    if len(_names) < KEPT_MAX and len(data) < 100:
        _names[name] = text
    return text


READY_BATCHES_MAX = 2
"""Whole batches in a queue, so that one can be sent while the next is encoded."""
MIXED_BYTES = 8 << 20
"""Encoded messages of several subjects after which their batches are made."""


class _Encoded(NamedTuple):
    """Encoded message of a stretch with several subjects; `position` is its place in the stretch."""

    position: int
    id: str
    data: bytes
    label: int


class BulkSend:
    """One call of `send_many`, made by a producer.

    Args:
        timeout_ms: time limit of each batch, which begins when there is room for it.
        until_ms: common deadline by the sender's clock, waiting for room included; None for none.
    """

    def __init__(
        self,
        sender: Sender,
        ids: MessageIds,
        timeout_ms: int,
        flight: Callable[[], Flight],
        delay: Delay | None = None,
        until_ms: int | None = None,
        compress_bytes_min: int | None = None,
    ) -> None:
        self.receipts: Receipts = Receipts()
        self._compress_bytes_min = compress_bytes_min
        self._delay = delay
        self._due_ms = delay.due_ms if delay else None
        self._sender = sender
        self._ids = ids
        self._timeout_ms = timeout_ms
        self._flight = flight
        self._until_ms = until_ms
        self._bytes_max = sender.queue_bytes_max
        self._unresolved = self._unresolved_bytes = 0
        self._is_mixed = False
        """Whether the subject changed at the last message, so that the next ones share batches per subject."""
        self._stuck: set[str] = set()
        """Subjects whose last batch waited until its deadline. Their next batches do not wait as long again."""

    async def send(self, messages: Iterable[Message]) -> None:
        """Send messages. Reads no further ahead than the queue has room, because all messages together may take
        gigabytes.
        """
        source = iter(messages)
        for message in source:
            rest = await self._send_first(message, source)
            while rest is not None:
                rest = await self._send_first(rest, source)

    async def _send_first(self, message: Message, source: Iterator[Message]) -> Message | None:
        """Send `message` together with the next messages of `source`; return the first message that cannot go with
        them, or None.
        """
        if not isinstance(message, Message):
            raise not_a_message(message)
        stretch = islice(chain((message,), source), BATCH_MESSAGES_MAX)
        if self._can_share(message):
            try:
                return await self._send_run(self._sender.queue(message.subject), stretch)
            except InvalidName:
                pass
        return await self._send_mixed(stretch)

    async def all_resolved(self) -> None:
        while self._unresolved:
            await self._sender.wait()

    def _can_share(self, message: Message) -> bool:
        """Return whether a message may be encoded together with the next ones."""
        return not self._is_mixed and message.order_key is None and (self._delay is None or self._delay.key is None)

    async def _send_run(self, queue: SubjectQueue, messages: Iterator[Message]) -> Message | None:
        """Send a batch of one subject. Hot path: no step per message without an order key."""
        run = encode_run(
            queue.subject,
            messages,
            ids=self._ids,
            now_ms=_now_ms(),
            due_ms=self._due_ms,
            bytes_max=self._sender.batch_bytes_max(queue.subject),
            compress_bytes_min=self._compress_bytes_min,
        )
        if run.ids:
            self.receipts.add(await self._submit(queue, run.ids, run.blocks, run.flags))
        if run.rest is not None and run.error is not None:
            self.receipts.add([self._refused(run.rest, run.error)])
            return None
        self._is_mixed = run.rest is not None and run.rest.subject != queue.subject
        return run.rest

    async def _send_mixed(self, messages: Iterator[Message]) -> Message | None:
        """Send messages of several subjects: a batch per subject, and messages with an order key one by one."""
        now_ms, size, rest = _now_ms(), 0, None
        makers: list[Callable[[], Receipt]] = []
        by_subject: dict[str, list[_Encoded]] = {}
        for position, message in enumerate(messages):
            if not isinstance(message, Message):
                raise not_a_message(message)
            if position and self._can_share(message):
                rest = message
                break
            try:
                encoded = self._encoded(position, message, now_ms)
                size += len(encoded.data)
                if message.order_key is not None:
                    makers.append(await self._send_in_order(message.subject, encoded))
                else:
                    by_subject.setdefault(message.subject, []).append(encoded)
                    makers.append(_not_sent)
            except (InvalidName, InvalidMessage) as error:
                makers.append(self._refused(message, error))
            if size >= MIXED_BYTES:
                break
        for subject, encodings in by_subject.items():
            for piece in _pieces(encodings, self._sender.batch_bytes_max(subject)):
                batch = batch_blocks([encoded.data for encoded in piece])
                blocks, flags = with_labels(batch, [encoded.label for encoded in piece])
                ids = [encoded.id for encoded in piece]
                sent = await self._submit(self._sender.queue(subject), ids, blocks, flags)
                for at, encoded in enumerate(piece):
                    makers[encoded.position] = partial(sent.receipt, at)
        self._is_mixed = self._is_mixed and len(by_subject) > 1
        self.receipts.add(makers)
        return rest

    def _encoded(self, position: int, message: Message, now_ms: int) -> _Encoded:
        """Encode one message; raises InvalidName, InvalidMessage."""
        self._sender.queue(message.subject)
        message.id = next(self._ids) if message.id is None else plain(message.id)
        delay, compress = self._delay, self._compress_bytes_min
        if delay is None:
            data = batch_encoder(message.subject, now_ms, compress)(message)
        else:
            data = delay.encode(message, now_ms, compress)
        return _Encoded(position, message.id, data, label_of_message(message))

    async def _send_in_order(self, subject: str, message: _Encoded) -> Callable[[], Receipt]:
        """Queue a message with an order key once there is room; its batch is made when its broker group is known."""
        deadline_ms = self._deadline_ms()
        queue = await self._sender.room(subject, message.label, len(message.data), deadline_ms)
        if isinstance(queue, QmqError) or self._is_over():
            error = queue if isinstance(queue, QmqError) else self._sender.too_late(subject)
            receipt = unstored(Outcome.REFUSED, message.id, subject, "", error, self._due_ms)
            self._sender.count_refused()
            return lambda: receipt
        later, flight = _Later(), self._flight()
        self._unresolved += 1

        def done(receipt: Receipt) -> None:
            later.receipt = receipt if self._due_ms is None else receipt._replace(due_ms=self._due_ms)
            self._unresolved -= 1
            flight.open -= 1

        self._sender.add(queue, QueuedMessage(message.data, message.id, deadline_ms, done, message.label))
        return later

    async def _submit(self, queue: SubjectQueue, ids: list[str], blocks: list[bytes], flags: int) -> Batch:
        """Queue a whole batch once there is room."""
        size = sum(map(len, blocks))
        if queue.entering or not self._has_room(queue, size):
            await self._wait_for_room(queue, size)
        deadline_ms, flight = self._deadline_ms(), self._flight()
        batch = Batch(queue.subject, ids, blocks, deadline_ms, partial(self._resolved, flight), flags, self._due_ms)
        self._unresolved += 1
        self._unresolved_bytes += size
        if self._is_over():
            self._sender.refuse_late(batch)
        else:
            self._sender.add_batch(queue, batch)
            if queue.subject in self._stuck:
                self._sender.refuse_stuck(queue, batch)
        await asyncio.sleep(0)  # let the loop write the batch and read answers: encoding never waits
        return batch

    async def _wait_for_room(self, queue: SubjectQueue, size: int) -> None:
        """Wait for room, or the deadline, in the order of the calls."""
        # This wait comes before the call takes its place in the line, where other calls would wait behind it.
        while not self._takes(size) and not self._is_over():
            await self._sender.wait()
        await self._sender.wait_for_room(queue.entering, lambda: self._has_room(queue, size), self._until_ms)

    def _has_room(self, queue: SubjectQueue, size: int) -> bool:
        return len(queue.ready) < READY_BATCHES_MAX and self._takes(size)

    def _takes(self, size: int) -> bool:
        """Return whether the call may have `size` more bytes without an outcome."""
        return not self._unresolved_bytes or self._unresolved_bytes + size <= self._bytes_max

    def _deadline_ms(self) -> int:
        return self._sender.now_ms() + self._timeout_ms if self._until_ms is None else self._until_ms

    def _is_over(self) -> bool:
        return self._until_ms is not None and self._sender.now_ms() >= self._until_ms

    def _refused(self, message: Message, error: QmqError) -> Callable[[], Receipt]:
        receipt = unstored(Outcome.REFUSED, str(message.id or ""), message.subject, "", error, self._due_ms)
        self._sender.count_refused()
        return lambda: receipt

    def _resolved(self, flight: Flight, batch: Batch) -> None:
        self._unresolved -= 1
        self._unresolved_bytes -= batch.body_bytes
        flight.open -= 1
        if batch.was_answered:
            self._stuck.discard(batch.subject)
        else:
            self._stuck.add(batch.subject)


class _Later:
    """Receipt that is set when the message is resolved."""

    __slots__ = ("receipt",)
    receipt: Receipt

    def __call__(self) -> Receipt:
        return self.receipt


def _not_sent() -> Receipt:
    raise InvalidRequest("the message has no outcome yet")


def _pieces(messages: list[_Encoded], bytes_max: int) -> Iterator[list[_Encoded]]:
    """Cut messages of one subject into pieces of at most `bytes_max`, or one message."""
    begin = size = 0
    for at, message in enumerate(messages):
        if size + len(message.data) > bytes_max and at > begin:
            yield messages[begin:at]
            begin, size = at, 0
        size += len(message.data)
    yield messages[begin:]


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
