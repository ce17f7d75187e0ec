"""Core. Encodes a run of messages of one subject straight into the body of a batch.

The bytes are those of `qmq.codec`, where they are drawn and whose encoder has the last word; this is how `send_many`
makes them. Profile of the simple way (encode each value, join a message, join the batch) with one property of 1 KiB:
small copies and calls take half of it, the page faults of fresh buffers of a megabyte the other half. So

- a batch is put together as *text* in which one character stands for one byte (latin-1): strings of ASCII, which most
  are, go into it as they are, without an object or a copy of their own;
- it is turned into bytes in blocks that stay in the processor's cache and are sent as they are, never joined.
"""

from __future__ import annotations

from array import array
from itertools import accumulate
from typing import NamedTuple

from qmq.client.batching import BATCH_BYTES_MAX, MessageIds
from qmq.codec import (
    KEPT_MAX,
    VALUE_BYTES_MAX,
    batch_encoder,
    delayed_encoder,
    encode_labels,
    encode_own,
    encode_tags,
)
from qmq.errors import InvalidMessage
from qmq.log.frame import label_flags
from qmq.message import RESERVED, Message, text_of
from qmq.plain import plain

_LENGTHS = [n.to_bytes(2, "big").decode("latin-1") for n in range(VALUE_BYTES_MAX + 1)]
_SIZES = [n.to_bytes(4, "big").decode("latin-1") for n in range(4_096)]
BLOCK_BYTES = 32 * 1024
"""Measured: 16 to 64 KiB cost the same; with 512 KiB a message of 1 KiB takes twice as long."""
_names: dict[str, str] = {}
"""Names of properties repeat; here they are with their length in front."""


class EncodedRun(NamedTuple):
    """The batch of `messages[begin:end]`, its labels behind it if `flags` say so.

    What ended it, if it was not full: `error` says why the message at `end` cannot be encoded, or that message has an
    order key and has to go where its key goes.
    """

    ids: list[str]
    blocks: list[bytes]
    end: int
    error: InvalidMessage | None
    flags: int


def encode_run(
    subject: str,
    messages: list[Message],
    begin: int,
    *,
    ids: MessageIds,
    now_ms: int,
    due_ms: int | None = None,
    bytes_max: int = BATCH_BYTES_MAX,
) -> EncodedRun:
    """Encode messages from `begin` on, until a batch is full or one cannot be in it. Sets missing ids.

    Args:
        due_ms: when all of them are due, if they are delayed.
        bytes_max: of a batch of several messages.
    """
    # One long function on purpose: a call per message or property would cost as much as what it does.
    encoder = batch_encoder(subject, now_ms) if due_ms is None else delayed_encoder(subject, now_ms, due_ms)
    untagged, tagged = encoder.plain.decode("latin-1"), encoder.tagged.decode("latin-1")
    fixed_bytes = len(untagged) + 2 + 4
    prefix, made = ids.prefix, ids.made
    lengths, small_sizes, small_sizes_end, names = _LENGTHS, _SIZES, len(_SIZES), _names
    blocks: list[bytes] = [b""]
    parts: list[str] = []
    message_bytes: list[int] = []
    run_ids: list[str] = []
    labels: dict[int, int] = {}
    fronts: dict[int, str] = {}
    total, block_end, error = 0, BLOCK_BYTES, None
    for position in range(begin, len(messages)):
        message = messages[position]
        if message.order_key is not None:
            break
        identity = message.id
        mark = len(parts)
        is_plain = True
        if identity is None:
            made += 1
            message.id = identity = f"{prefix}{made}"
        elif identity.__class__ is str:
            is_plain = identity.isascii() and 0 < len(identity) <= 100
        else:
            message.id, is_plain = plain(identity), False
            identity = message.id
        try:
            if not is_plain:
                raise InvalidMessage("the encoder knows better")
            if message.tags:
                section, labels[len(run_ids)] = encode_tags(message.tags)
                tags = section.decode("latin-1")
                parts += (tagged, lengths[len(identity)], identity, tags, "")
                front = fixed_bytes + len(identity) + len(tags)
            else:
                id_bytes = len(identity)
                parts += (
                    fronts.get(id_bytes) or fronts.setdefault(id_bytes, untagged + lengths[id_bytes]),
                    identity,
                    "",
                )
                front = fixed_bytes + id_bytes
            size_at = len(parts) - 1
            size = 0
            for name, value in message.properties.items():
                if value.__class__ is not str:
                    value = text_of(value)
                if not value.isascii():
                    value = value.encode().decode("latin-1")
                key = names.get(name) or _name(name)
                length = len(value)
                parts += (key, lengths[length], value)
                size += len(key) + 2 + length
            if message.retries_max is not None or message.expires_after is not None:
                parts.append(own := encode_own(message).decode("latin-1"))
                size += len(own)
            parts[size_at] = small_sizes[size] if size < small_sizes_end else size.to_bytes(4, "big").decode("latin-1")
            size += front
        except (InvalidMessage, UnicodeEncodeError, IndexError, AttributeError):  # the last: of what is no dict
            del parts[mark:]
            try:
                data = encoder(message)
            except InvalidMessage as refusal:
                error = refusal
                labels.pop(len(run_ids), None)
                break
            parts.append(data.decode("latin-1"))
            size = len(data)
            if message.tags:
                labels[len(run_ids)] = encode_tags(message.tags).bits
        if total + size > bytes_max and total:
            del parts[mark:]
            labels.pop(len(run_ids), None)
            break
        total += size
        message_bytes.append(size)
        run_ids.append(identity)
        if total >= block_end:
            blocks.append("".join(parts).encode("latin-1"))
            parts.clear()
            block_end = total + BLOCK_BYTES
    ids.made = made
    ends = array("I", accumulate(message_bytes, initial=0))
    parts.append("\0" * (-(4 * len(ends) + total) % 8))
    blocks[0] = ends.tobytes()
    blocks.append("".join(parts).encode("latin-1"))
    flags = 0
    if labels:
        every = [labels.get(position, 0) for position in range(len(run_ids))]
        flags = label_flags(every)
        blocks.append(encode_labels(every))
    return EncodedRun(run_ids, blocks, begin + len(run_ids), error, flags)


def _name(name: str) -> str:
    """Put the length in front of a property's name. Names are kept, up to a bound."""
    if not isinstance(name, str) or name.startswith(RESERVED):
        raise InvalidMessage("the encoder says it better")
    data = name.encode()
    text = _LENGTHS[len(data)] + data.decode("latin-1")
    if len(_names) < KEPT_MAX and len(data) < 100:
        _names[name] = text
    return text
