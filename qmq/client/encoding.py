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
from qmq.codec import VALUE_BYTES_MAX, batch_encoder, encode_tags, text_of
from qmq.errors import InvalidMessage
from qmq.message import Message

_LENGTHS = [n.to_bytes(2, "big").decode("latin-1") for n in range(VALUE_BYTES_MAX + 1)]
_SIZES = [n.to_bytes(4, "big").decode("latin-1") for n in range(4_096)]
BLOCK_BYTES = 32 * 1024
"""Measured: 16 to 64 KiB cost the same; with 512 KiB a message of 1 KiB takes twice as long."""
_KEPT_MAX = 10_000
_names: dict[str, str] = {}
"""Names of properties repeat; here they are with their length in front."""


class EncodedRun(NamedTuple):
    """The batch of `messages[begin:end]`; `error` says why the message at `end` cannot be encoded, if that ended it."""

    ids: list[str]
    blocks: list[bytes]
    end: int
    error: InvalidMessage | None


def encode_run(subject: str, messages: list[Message], begin: int, *, ids: MessageIds, now_ms: int) -> EncodedRun:
    """Encode messages from `begin` on, until a batch is full or one cannot be encoded. Sets missing ids."""
    # One long function on purpose: a call per message or property would cost as much as what it does.
    encoder = batch_encoder(subject, now_ms)
    plain, tagged = encoder.plain.decode("latin-1"), encoder.tagged.decode("latin-1")
    fixed_bytes = len(plain) + 2 + 4
    prefix, made = ids.prefix, ids.made
    lengths, small_sizes, small_sizes_end, names = _LENGTHS, _SIZES, len(_SIZES), _names
    blocks: list[bytes] = [b""]
    parts: list[str] = []
    message_bytes: list[int] = []
    run_ids: list[str] = []
    total, block_end, error = 0, BLOCK_BYTES, None
    for position in range(begin, len(messages)):
        message = messages[position]
        identity = message.id
        mark = len(parts)
        is_plain = True
        if identity is None:
            made += 1
            message.id = identity = f"{prefix}{made}"
        else:
            is_plain = identity.isascii() and 0 < len(identity) <= 100
        try:
            if not is_plain:
                raise InvalidMessage("the encoder knows better")
            if message.tags:
                tags = encode_tags(message).decode("latin-1")
                parts += (tagged, lengths[len(identity)], identity, tags, "")
                front = fixed_bytes + len(identity) + len(tags)
            else:
                parts += (plain, lengths[len(identity)], identity, "")
                front = fixed_bytes + len(identity)
            size_at = len(parts) - 1
            size = 0
            for name, value in message.properties.items():
                if value.__class__ is not str:
                    value = text_of(value)
                if not value.isascii():
                    value = value.encode().decode("latin-1")
                key = names.get(name) or _name(name)
                parts += (key, lengths[len(value)], value)
                size += len(key) + 2 + len(value)
            parts[size_at] = small_sizes[size] if size < small_sizes_end else size.to_bytes(4, "big").decode("latin-1")
            size += front
        except (InvalidMessage, UnicodeEncodeError, IndexError):
            del parts[mark:]
            try:
                data = encoder(message)
            except InvalidMessage as refusal:
                error = refusal
                break
            parts.append(data.decode("latin-1"))
            size = len(data)
        if total + size > BATCH_BYTES_MAX and total:
            del parts[mark:]
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
    return EncodedRun(run_ids, blocks, begin + len(run_ids), error)


def _name(name: str) -> str:
    """Put the length in front of a property's name. Names are kept, up to a bound."""
    data = name.encode()
    text = _LENGTHS[len(data)] + data.decode("latin-1")
    if len(_names) < _KEPT_MAX and len(data) < 100:
        _names[name] = text
    return text
