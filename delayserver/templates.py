"""Core. Templates: how a recurring schedule is a delayed message, and what it sends each time.

A template is a message of its subject that pends, due at its next occurrence: nothing about it is stored elsewhere. Its
reserved properties (qmq.message: RECUR_…) say its name, owner, cron expression and time zone; its label, `LABEL`, tells
the master what it is, without a look into it: no other message has it, for 10 tags set 10 bits of 32 at most.

An occurrence is the same message with an id of its own, created and due at that time, and no longer with the label of a
template but with that of its tags and order key. Its id is made of subject, name and time: whoever handles
each id once handles each occurrence once, also if two delay groups know the same schedule.
"""

from __future__ import annotations

import struct
from datetime import UTC, datetime, timedelta
from hashlib import blake2b
from typing import NamedTuple

from qmq.codec import FLAG_DELAYED, decode_envelope, decode_properties, join_batch, label_of, with_properties
from qmq.delayserver.cron import SKIPPED_MAX, Cron
from qmq.errors import InvalidMessage, InvalidRequest, MessageTooLarge
from qmq.log.frame import FRAME_BYTES_MAX
from qmq.message import DELAY_KEY, ORDER_KEY, RECUR_CRON, RECUR_NAME, RECUR_OWNER, RECUR_SKIPPED, RECUR_ZONE
from qmq.remoting.commands import RECUR_NAME_BYTES_MAX, Recur, RecurringSchedule
from qmq.server.batch_check import check_messages
from qmq.subjects import NAME_BYTES_MAX, check_name

LABEL = (1 << 32) - 1
"""Of templates: the bits of all tags, and no order key."""
ID_PREFIX = "recurring:"
"""A template's id is this and its name, so that whoever cancels messages by id can delete it."""
_OVERHEAD_BYTES = 1024
"""What a frame takes besides a template and its occurrence, and the two differ by: they are written together."""
_TIMES = struct.Struct(">qq")
_LENGTH = struct.Struct(">H")
_SUBJECT_AT = 17
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Template(NamedTuple):
    """A recurring schedule, as its message says it."""

    subject: str
    name: str
    owner: str
    expression: str
    timezone: str
    message: bytes

    def cron(self) -> Cron:
        """Raises InvalidRequest: this machine does not know its time zone, or cannot read its expression."""
        return Cron(self.expression, self.timezone)

    def due(self, due_ms: int) -> RecurringSchedule:
        return RecurringSchedule(self.subject, self.name, self.owner, self.expression, self.timezone, due_ms)

    def is_same_as(self, other: Template) -> bool:
        """Return whether both send the same at the same times; when they were made does not count."""
        return self.message[_SUBJECT_AT:] == other.message[_SUBJECT_AT:]

    def occurrence(self, at_ms: int, skipped: int) -> bytes:
        """Return the message that is sent for the occurrence at `at_ms`; `skipped` before it are not."""
        message = _with_id(self.message, occurrence_id(self.subject, self.name, at_ms))
        message = message[:1] + _TIMES.pack(at_ms, at_ms) + message[_SUBJECT_AT:]
        return with_properties(message, {RECUR_SKIPPED: str(skipped)}) if skipped else message

    def occurrence_label(self) -> int:
        envelope = decode_envelope(self.message)
        return label_of(envelope.tags, decode_properties(self.message, envelope.body_begin).get(ORDER_KEY))


def new_template(recur: Recur, *, message_bytes_max: int) -> Template:
    """Make a template of what somebody asks for.

    Raises:
        InvalidName, InvalidRequest, InvalidMessage: says what is wrong, and what to write instead.
    """
    check_name("name of a recurring schedule", recur.name)
    _check_length("name of a recurring schedule", recur.name, RECUR_NAME_BYTES_MAX)
    check_name("owner of a recurring schedule", recur.owner)
    _check_length("owner of a recurring schedule", recur.owner, NAME_BYTES_MAX)
    Cron(recur.cron, recur.timezone)
    if (envelope := decode_envelope(recur.message)).subject != recur.subject:
        raise InvalidMessage(f"the message is of subject {envelope.subject!r}, not {recur.subject!r}")
    if DELAY_KEY in decode_properties(recur.message, envelope.body_begin):
        raise InvalidMessage("the message of a recurring schedule has no key for cancelling: delete it by its name")
    own = {RECUR_NAME: recur.name, RECUR_OWNER: recur.owner, RECUR_CRON: recur.cron, RECUR_ZONE: recur.timezone}
    message = with_properties(_with_id(recur.message, ID_PREFIX + recur.name), own)
    message = bytes((message[0] | FLAG_DELAYED,)) + message[1:]
    template = Template(recur.subject, recur.name, recur.owner, recur.cron, recur.timezone, message)
    occurrence = template.occurrence(0, SKIPPED_MAX)
    most = min(message_bytes_max, FRAME_BYTES_MAX // 2 - _OVERHEAD_BYTES)
    if (size := len(occurrence)) > most:
        raise MessageTooLarge(f"an occurrence has {size} bytes, more than {most}")
    for _, fault in check_messages(join_batch([occurrence]), 1, message_bytes_max):
        raise InvalidMessage(f"no broker takes an occurrence of it: {fault}")  # and many tags would have our label
    return template


def read_template(message: bytes, subject: str) -> Template:
    """Read a template as it stands in the log among messages of `subject`; raises InvalidMessage if it is none.

    Who may produce to one subject could name any other in the message, to which its occurrences would be sent.
    """
    envelope = decode_envelope(message)
    if envelope.subject != subject:
        raise InvalidMessage(f"the message is of subject {envelope.subject[:50]!r}, not {subject!r}")
    found = decode_properties(message, envelope.body_begin)
    name, owner, expression, zone = (found.get(one, "") for one in (RECUR_NAME, RECUR_OWNER, RECUR_CRON, RECUR_ZONE))
    if not (name and owner and expression and zone):
        raise InvalidMessage("the message is no recurring schedule")
    return Template(envelope.subject, name, owner, expression, zone, message)


def occurrence_id(subject: str, name: str, at_ms: int) -> str:
    """Name an occurrence: readable, and at most 98 bytes."""
    at = (_EPOCH + timedelta(milliseconds=at_ms)).isoformat(timespec="milliseconds").removesuffix("+00:00")
    return f"{name}@{at}Z.{blake2b(subject.encode(), digest_size=6).hexdigest()}"


def _check_length(what: str, text: str, most: int) -> None:
    if len(text.encode()) > most:
        raise InvalidRequest(f"{what} {text[:20]!r}… is longer than {most} bytes")


def _with_id(message: bytes, id: str) -> bytes:
    """Return the same message with another id."""
    (length,) = _LENGTH.unpack_from(message, _SUBJECT_AT)
    at = _SUBJECT_AT + 2 + length
    (length,) = _LENGTH.unpack_from(message, at)
    data = id.encode()
    return message[:at] + _LENGTH.pack(len(data)) + data + message[at + 2 + length :]
