"""Core. Check of a batch: finds messages over a limit of QMQ, which some consumer could not read.

The client refuses them before a send; this is for clients that do not. Many messages are checked together
(`are_usual`): 0.1 µs each. Few messages, or a batch with a fault, are checked one by one in some places: 0.5 µs. Only
unusual ones, all with properties above 32 KiB among them, are parsed: 10 µs.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from qmq.codec import (
    BATCH_MESSAGES_MAX,
    FLAG_BODY,
    FLAG_TAGS,
    ID_BYTES_MAX,
    MESSAGE_BYTES_MIN,
    TAGS_MAX,
    VALUE_BYTES_MAX,
    Buffer,
    check_batch,
    decode_envelope,
    decode_properties,
    properties_span,
)
from qmq.errors import InvalidMessage

_SUBJECT_AT = 19
"""Where the text of the subject begins (qmq.codec); its length stands before it, that of the id behind it."""


def check_messages(batch: Buffer, count: int, message_bytes_max: int) -> list[tuple[int, str]]:
    """Check the layout of a batch and each message; return (position, reason) of those that cannot be stored.

    Raises:
        InvalidRequest: the end offsets are invalid, so no message of the batch can be stored.
    """
    if are_usual(batch, count, message_bytes_max):
        return []
    ends, refused = check_batch(batch, count, message_bytes_max)
    data = memoryview(batch)[4 * (count + 1) :]
    wrong = dict(refused)
    for position, (begin, end) in enumerate(pairwise(ends)):
        if position not in wrong and _is_usual(data, begin, end):
            continue
        message = bytes(data[begin:end])
        if (fault := wrong.get(position) or _fault(message)) is not None:
            wrong[position] = f"{_name(message)}{fault}"
    return sorted(wrong.items())


def _is_usual(data: memoryview, begin: int, end: int) -> bool:
    """Return for one message the verdict of `are_usual` for a batch."""
    try:
        at = begin + _SUBJECT_AT + (data[begin + 17] << 8 | data[begin + 18])
        id_bytes = data[at + 1]
        if data[at] or not 0 < id_bytes <= ID_BYTES_MAX:
            return False
        at += id_bytes + 2
        if data[begin] & FLAG_TAGS:
            if data[at] > TAGS_MAX:
                return False
            tags_left, at = data[at], at + 1
            while tags_left:
                tags_left, at = tags_left - 1, at + 2 + (data[at] << 8 | data[at + 1])
        stated = data[at] << 24 | data[at + 1] << 16 | data[at + 2] << 8 | data[at + 3]
    except IndexError:
        return False
    at += 4 + stated
    return at <= begin + VALUE_BYTES_MAX and (at == end or (at < end and data[begin] & FLAG_BODY != 0))


def _fault(message: bytes) -> str | None:
    """Return a message's fault, or None."""
    try:
        envelope = decode_envelope(message)
        decode_properties(message)
    except InvalidMessage as error:
        return str(error)
    if not 0 < len(envelope.id.encode()) <= ID_BYTES_MAX:
        return f"its id has {len(envelope.id.encode())} bytes, not 1 to {ID_BYTES_MAX}"
    if len(envelope.tags) > TAGS_MAX:
        return f"{len(envelope.tags)} tags are more than {TAGS_MAX}"
    return _long_string(message, *properties_span(message))


def _long_string(message: bytes, at: int, end: int) -> str | None:
    """Return the fault of the first name or value longer than 32,767 bytes, or None."""
    name = ""
    is_name = True
    while at < end:
        length = message[at] << 8 | message[at + 1]
        if is_name:
            name = str(message[at + 2 : at + 2 + min(length, 50)], "utf-8", "replace")
        if length > VALUE_BYTES_MAX:
            place = "the name" if is_name else "the value"
            return f"{place} of property {name!r} has {length} bytes, more than {VALUE_BYTES_MAX}"
        at += 2 + length
        is_name = not is_name
    return None


def _name(message: bytes) -> str:
    try:
        return f"message {decode_envelope(message).id[:ID_BYTES_MAX]}: "
    except InvalidMessage:
        return ""


if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]
    Bytes = npt.NDArray[np.uint8]
else:
    try:
        import numpy as np
    except ImportError:  # the in-memory broker of qmq.testing, which does without
        np = None

AT_ONCE_MIN = 32
"""With fewer messages the calls of numpy, 45 µs, cost more than they save; with tags from 5 on."""
_SUBJECT_LENGTH_AT = _SUBJECT_AT - 2


def are_usual(batch: Buffer, count: int, message_bytes_max: int) -> bool:
    """Return whether all messages are valid; False: maybe not, or they are too few to check together.

    A usual message has its stated length, an id and tags within their limits, and is too small before its body for a
    string that is too long. Strings and properties are not parsed: they may be no UTF-8, and end anywhere.
    """
    data_at = 4 * (count + 1)
    if np is None or not AT_ONCE_MIN <= count <= BATCH_MESSAGES_MAX or len(batch) % 8 or len(batch) <= data_at:
        return False
    bounds = np.frombuffer(batch, "<u4", count + 1).astype(np.int64)
    data = np.frombuffer(batch, np.uint8, offset=data_at)
    begins, ends = bounds[:-1], bounds[1:]
    sizes = ends - begins
    if bounds[0] or not 0 <= len(data) - bounds[-1] < 8 or sizes.min() < MESSAGE_BYTES_MIN:
        return False
    if sizes.max() > message_bytes_max:
        return False
    at = _behind_string(data, begins + _SUBJECT_LENGTH_AT)
    if (at + 2 > ends).any():
        return False
    id_ends = _behind_string(data, at)
    id_bytes = id_ends - at - 2
    if id_bytes.min() < 1 or id_bytes.max() > ID_BYTES_MAX:
        return False
    return _pass_tags(data, begins, id_ends, ends) and _end_there(data, begins, id_ends, ends)


def _length(data: Bytes, at: Ints) -> Ints:
    return data[at].astype(np.int64) << 8 | data[at + 1]


def _behind_string(data: Bytes, at: Ints) -> Ints:
    return at + 2 + _length(data, at)


def _pass_tags(data: Bytes, begins: Ints, at: Ints, ends: Ints) -> bool:
    """Move `at` behind the tags of those that have some; return whether these are within their limits."""
    tagged = np.flatnonzero(data[begins] & FLAG_TAGS)
    if not tagged.size:
        return True
    place, end = at[tagged], ends[tagged]
    if (place >= end).any():
        return False
    counts = data[place]
    if counts.max() > TAGS_MAX:
        return False
    place += 1
    for number in range(int(counts.max())):
        more = counts > number
        if (place[more] + 2 > end[more]).any():
            return False
        place[more] = _behind_string(data, place[more])
    at[tagged] = place
    return True


def _end_there(data: Bytes, begins: Ints, at: Ints, ends: Ints) -> bool:
    """Return whether the properties of each message end with it, or before its body, as its four length bytes state,
    of which two are 0.
    """
    if (at + 4 > ends).any() or _length(data, at).any():
        return False
    stated = _behind_string(data, at + 2)
    if (stated > begins + VALUE_BYTES_MAX).any():
        return False
    other = np.flatnonzero(stated != ends)
    return bool((stated[other] < ends[other]).all() and (data[begins[other]] & FLAG_BODY).all())
