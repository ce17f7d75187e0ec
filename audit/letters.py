"""Core. Dead letters as the log has them: which message each is the copy of, and whether its group gave that one up.

A broker stores the copy while the group holds the original, and then acks that with `DEAD`. A process that ends between
the two leaves a copy whose original is delivered again: the next one acks it, or the group handles it after all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

from qmq.audit.kinds import Kind
from qmq.codec import decode_envelope, decode_properties
from qmq.dead_letters import GROUP, PRUNER, SUBJECT, fingerprint, original_subject
from qmq.errors import InvalidMessage
from qmq.log.frame import FLAG_DEAD, Frame, FrameKind
from qmq.log.group import Group, UnackedRange
from qmq.log.progress import DEAD, Progress
from qmq.message import TIMES
from qmq.subjects import parse_derived


class Letter(NamedTuple):
    """A dead letter, at `[offset, end)`. Plain values: it is shuffled."""

    offset: int
    end: int
    subject: str
    number: int
    """Its own sequence."""
    id: str | None
    source: str
    """Where the original lies, under this sequence."""
    sequence: int
    group: str
    times: str | None
    """How often the group was delivered the original, as it says; None if no property could be added to it."""
    fingerprint: bytes

    def finding(self, what: Kind, text: str) -> dict[str, Any]:
        fields = {"offset": self.offset, "end": self.end, "subject": self.subject, "sequence": self.number}
        return {"what": what, "id": self.id, "text": f"dead letter of {self.source} {self.sequence}: {text}"} | fields

    def unfounded(self) -> dict[str, Any]:
        """Whoever finds that says the same, and so it is one finding."""
        return self.finding(Kind.DEAD_UNFOUNDED, f"group {self.group} held no such message before it")


def letter_of(frame: Frame, message: bytes) -> Letter | None:
    """Return the dead letter that a frame of its own or of a chosen subject holds; None: no broker made it."""
    derived, properties, identity = parse_derived(frame.subject), dict[str, str](), None
    try:
        envelope = decode_envelope(message)
        identity, properties = envelope.id, decode_properties(message, envelope.body_begin)
    except InvalidMessage:
        pass  # the original was none
    if frame.flags & FLAG_DEAD:
        whose = properties.get(SUBJECT, ""), properties.get(GROUP, "")
    elif derived is not None:
        whose = derived.real, derived.group
    else:
        return None
    if (source := original_subject(whose, frame.producer)) is None:
        return None
    about = frame.offset, frame.end, frame.subject, frame.first_sequence, identity
    return Letter(*about, source, frame.batch, whose[1], properties.get(TIMES), fingerprint(message))


class Letters:
    """Holds the dead letters of one subject's messages against what their groups were delivered. Made per copy."""

    def __init__(self) -> None:
        self._made: defaultdict[str, set[int]] = defaultdict(set)
        """Consumer group -> the originals of its dead letters since it began, or was moved."""

    def take(self, letter: Letter, group: Group | None, *, may_be_older: bool) -> Iterator[dict[str, Any]]:
        """Take a dead letter, with what the group has before it. `may_be_older`: the log need not have the pull."""
        made = self._made[letter.group]
        if letter.sequence in made:
            yield letter.finding(Kind.DEAD_TWICE, f"group {letter.group} has one since it began")
        made.add(letter.sequence)
        consumer, held = _holder(group, letter.sequence)
        if held is None:
            if not may_be_older:
                yield letter.unfounded()
        elif (
            not may_be_older
            and letter.times is not None
            and letter.times != str(due := held.deliveries - (consumer == PRUNER))
        ):
            text = f"it says that it was delivered {letter.times} times, and it was {due} times"
            yield letter.finding(Kind.DEAD_ALTERED, text)

    def progress(self, frame: Frame, said: Progress, group: Group | None) -> Iterator[tuple[int, str]]:
        """Take a progress frame, before the fold does. Yields (sequence, why) of messages that have no dead letter."""
        if frame.kind == FrameKind.POSITION and not said.consumer:
            self._made.pop(said.group, None)
        consumer = group.consumers.get(said.consumer) if group is not None else None
        if frame.kind != FrameKind.ACK or consumer is None:
            return
        made = self._made.get(said.group, ())
        for begin, end, settled in said.entries:
            for held in consumer.overlapping(begin, end) if settled == DEAD else ():
                part = held.part(begin, end)
                for sequence in range(max(part.first, 0), part.end):  # what the log does not name is below 0
                    if sequence not in made:
                        yield sequence, f"group {said.group}: acked as dead, and there is no dead letter of it"


def _holder(group: Group | None, sequence: int) -> tuple[str, UnackedRange | None]:
    for name, consumer in group.consumers.items() if group is not None else ():
        for one in consumer.unacked:
            if one.first <= sequence < one.end:
                return name, one
    return "", None
