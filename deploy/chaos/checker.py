"""Core. Check of a run's history, and of both copies of each log, for broken promises.

Of consumers, in the manner of Jepsen's queue and log checkers:

    lost                a stored message was not handled to its end and is no dead letter
    duplicated          a message was delivered again, or became a dead letter, without a cause
    unexpected          a consumer got a message that was not sent, or other content, or one of another place or tag
    reordered           a consumer that handles one at a time got an older message after a newer one; of an order key, a
                        message was delivered before its predecessor was done, or stored in front of it
    offset went back    a consumer's acked position is lower than it was
    poll skipped        a sequence was never delivered although a later one was
    times do not grow   a message was delivered again with the same delivery attempt, or a smaller one

Causes of a second delivery: a nack; a consumer that vanished, left or stood still before its ack was confirmed; a fault
of the broker group in that time. After a confirmed ack the only cause is a lost copy of the log that was the only one
with that ack. The same excuse holds for order and positions. Messages that a leaving consumer had not begun go to
others as a first delivery, behind messages that these have.

Of the logs of stopped brokers:

    lost-copy           an acknowledged message is missing from a copy, has another place than its receipt names, or was
                        acknowledged while the slave was stopped
    copies-differ       the copies of a group are not equal, frame by frame and by the chain at the end
    sequence            sequences of a subject in a log are not dense
    duplicate           a message is in the logs more than once
    refused-stored      a message whose receipt says "not stored" is in a log
    unsent              a log holds a message that was not sent
    order               a producer's messages, sent one call after the other, have another order in the log
    readonly-leak       a group that was marked readonly acknowledged a message
    not-drained         at the end something is not consumed or not acked
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import inf
from typing import NamedTuple

from qmq.deploy.chaos.history import Delivery, History, Place, Track
from qmq.deploy.chaos.records import DEAD, DONE, MARKED, REFUSED, RETRY, STORED, Position, Sent
from qmq.deploy.control import Copy

SHOWN_MAX = 5
Logs = Mapping[str, Sequence[Copy]]
"""The copies of each broker group, as `qmq.deploy.control.read_copy` returns them."""


class Finding(NamedTuple):
    """Broken promise: the rule, and the evidence."""

    rule: str
    text: str


def check(history: History, logs: Logs | None = None) -> list[Finding]:
    """Return all findings, at most a few of each rule; none: every promise was kept."""
    found: dict[str, list[str]] = {
        name: [text for rule in rules for text in rule(history)] for name, rules in RULES.items()
    }
    for rule in LOG_RULES if logs is not None else ():
        for name, text in rule(history, logs or {}):
            found.setdefault(name, []).append(text)
    shown = []
    for name, texts in found.items():
        shown += [Finding(name, text) for text in texts[:SHOWN_MAX]]
        if len(texts) > SHOWN_MAX:
            shown.append(Finding(name, f"and {len(texts) - SHOWN_MAX} more"))
    return shown


def _lost(history: History) -> Iterator[str]:
    groups = history.groups
    for message in history.messages.values():
        if message.outcome != STORED:
            continue
        place = message.place
        if not any(subject == place.subject for subject, _ in groups):
            yield f"no group consumes its subject: {message}"
        for (subject, group), tags in groups.items():
            if subject != place.subject or (tags and not tags & set(message.sending.tags)):
                continue
            track = Track(subject, group, place.broker_group)
            deliveries = history.deliveries[track].get(place.sequence, [])
            if place.sequence not in history.dead[track] and not _is_handled(deliveries):
                yield f"for {group}: {message}; {_list(deliveries) or 'delivered to no consumer'}"


def _is_handled(deliveries: list[Delivery]) -> bool:
    """Return whether a consumer handled the message and no later consumer gave it up."""
    decisions = [delivery.decided.decision for delivery in deliveries if delivery.decided is not None]
    gave_up = deliveries and deliveries[-1].is_kept and decisions and decisions[-1] == DEAD
    return DONE in decisions and not gave_up


def _repeated(history: History) -> Iterator[str]:
    for track, places in history.deliveries.items():
        for deliveries in places.values():
            for before, after in pairwise(deliveries):
                if after.got.times > before.got.times and (why := _unexplained(history, before, after)):
                    yield f"for {track.group}, {why}: {before}; {after}"


def _unexplained(history: History, before: Delivery, after: Delivery) -> str | None:
    """Return the fault of a second delivery; None if it has a cause."""
    decision = before.decided.decision if before.decided else None
    if decision == RETRY:
        return None
    if before.kept_at is not None:
        if history.may_have_lost(before.got.broker_group, before.got.at, before.kept_at):
            return None
        return "again after its end was confirmed"
    if after.got.at < before.got.at or history.cause(before, after.got.at):
        return None  # `times do not grow` reports a wrong order
    return "again without a cause"


def _dead_again(history: History) -> Iterator[str]:
    for track, places in history.dead.items():
        for sequence, dead in places.items():
            if len(dead) > 1:
                yield f"{len(dead)} dead letters of one message: {dead}"
            for delivery in history.deliveries[track].get(sequence, []):
                is_done = (
                    delivery.kept_at is not None and delivery.decided is not None and delivery.decided.decision == DONE
                )
                if is_done and not history.may_have_lost(track.broker_group, delivery.got.at, delivery.kept_at or 0.0):
                    yield f"a dead letter although its ack was confirmed: {dead[0]}; {delivery}"


def _unexpected(history: History) -> Iterator[str]:
    groups, places = history.groups, _places(history)
    for track, sequences in history.deliveries.items():
        tags = groups.get((track.subject, track.group), frozenset())
        for sequence, deliveries in sequences.items():
            for delivery in deliveries:
                if why := _wrong(history, delivery, places[delivery.got.id], tags):
                    yield f"{why}: {delivery}; {history.messages.get(delivery.got.id, '')}"
            for dead in history.dead[track].get(sequence, []):
                if dead.id != deliveries[0].got.id:
                    yield f"a dead letter is of another message: {dead}; {deliveries[0]}"
    for id in history.sent_twice:
        yield f"the workload is wrong: {id} was sent twice"


def _places(history: History) -> dict[str, set[Place]]:
    """Return the places of each message id, from receipts and deliveries."""
    places: dict[str, set[Place]] = defaultdict(set)
    for id, message in history.messages.items():
        if message.outcome == STORED:
            places[id].add(message.place)
    for track, sequences in history.deliveries.items():
        for sequence, deliveries in sequences.items():
            for delivery in deliveries:
                places[delivery.got.id].add(Place(track.subject, track.broker_group, sequence))
    return places


def _wrong(history: History, delivery: Delivery, places: set[Place], tags: frozenset[str]) -> str | None:
    message = history.messages.get(delivery.got.id)
    if message is None:
        return "no producer sent it"
    if message.outcome == REFUSED:
        return "its producer's answer was that it is not stored"
    if delivery.got.subject != message.sending.subject:
        return "of another subject"
    if delivery.got.content != message.sending.content:
        return "its content differs from the sent one"
    if len(places) > 1:
        return f"it lies in more than one place, {sorted(places)}"
    if tags and not tags & set(message.sending.tags):
        return f"its group asks for {sorted(tags)} only"
    return None


def _one_by_one(history: History) -> Iterator[str]:
    """Check that new messages without an order key or a tag come in the order of their sequences."""
    keyed = {message.sending.subject for message in history.messages.values() if message.sending.order_key}
    plain = {
        (member.consumer, member.subject, member.group)
        for member in history.joined
        if member.concurrency == 1 and not member.tags and member.subject not in keyed
    }
    for consumer, numbers in history.by_consumer.items():
        newest: dict[Track, Delivery] = {}
        for number in numbers.values():
            got = number.got
            if got.times > 1 or (consumer, got.subject, got.group) not in plain:
                continue
            track = Track(got.subject, got.group, got.broker_group)
            before = newest.get(track)
            if before is not None and before.got.sequence > got.sequence:
                is_excused = history.was_left(got.subject, got.group, got.at)
                if not is_excused and not history.may_have_lost(got.broker_group, before.got.at, got.at):
                    yield f"{number} after {before}"
            newest[track] = number


def _by_key(history: History) -> Iterator[str]:
    for track, places in history.deliveries.items():
        newest: dict[str, list[Delivery]] = {}
        for _, deliveries in sorted(places.items()):
            message = history.messages.get(deliveries[0].got.id)
            if message is None or not (key := message.sending.order_key):
                continue
            before, newest[key] = newest.get(key), deliveries
            if before is None:
                continue
            end, begin = _end(history, track, before), min(delivery.got.at for delivery in deliveries)
            if begin < end and not history.may_have_lost(track.broker_group, before[0].got.at, min(end, begin)):
                yield f"for {track.group}, key {key}: {_list(deliveries)}; in front of it: {_list(before)}"


def _end(history: History, track: Track, deliveries: list[Delivery]) -> float:
    """Return when a message was done or given up; infinity if it was neither."""
    last = deliveries[-1]
    is_dead = last.got.sequence in history.dead[track]
    if last.decided is not None and (is_dead or last.decided.decision != RETRY):
        return last.decided.at
    return last.got.at if is_dead else inf


def _sent_by_key(history: History) -> Iterator[str]:
    newest: dict[tuple[str, str, str], Sent] = {}
    for message in history.messages.values():
        if message.sent is None or message.outcome != STORED or not message.sending.order_key:
            continue
        key = message.sending.sender, message.sending.subject, message.sending.order_key
        before, newest[key] = newest.get(key), message.sent
        if before is not None and (
            before.broker_group != message.sent.broker_group or before.sequence > message.sent.sequence
        ):
            yield f"{message} was sent after {before} of the same key"


def _went_back(history: History) -> Iterator[str]:
    newest: dict[tuple[str, Track], Position] = {}
    for position in history.positions:
        key = position.consumer, Track(position.subject, position.group, position.broker_group)
        before, newest[key] = newest.get(key), position
        if before is not None and position.acked_end < before.acked_end and not position.begins:
            if not history.may_have_lost(position.broker_group, before.at, position.at):
                yield f"{position} after {before}"


def _skipped(history: History) -> Iterator[str]:
    groups = history.groups
    for track, places in history.deliveries.items():
        if groups.get((track.subject, track.group)):
            continue  # others' tags lie in between
        next_sequence = 0
        for given in sorted(places.keys() | history.dead[track].keys()):
            if given > next_sequence:
                skipped = f"{next_sequence} to {given - 1}"
                after = _list(places.get(given, []))
                yield f"sequences {skipped} of {track} were delivered to no consumer, but {after}"
            next_sequence = given + 1


def _times(history: History) -> Iterator[str]:
    for places in history.deliveries.values():
        for deliveries in places.values():
            for smaller, larger in pairwise(deliveries):
                first, second = sorted((smaller, larger), key=lambda delivery: delivery.got.at)
                if larger.got.times > smaller.got.times and first is smaller:
                    continue
                if history.cause(smaller, larger.got.at):
                    continue  # a consumer that lost a message without noticing, or had not begun it
                if not history.may_have_lost(first.got.broker_group, first.got.at, second.got.at):
                    yield f"{second} after {first}"


def _list(deliveries: list[Delivery]) -> str:
    return "; ".join(map(str, deliveries))


# Logs.


def _readonly(history: History) -> Iterator[str]:
    for message, window in history.sent_within(MARKED):
        yield f"{message} in {window}"


def _by_one_copy(history: History) -> Iterator[str]:
    for message, window in history.acknowledged_by_one_copy():
        yield f"{message} was acknowledged while the slave was stopped: {window}"


def _copies(history: History, logs: Logs) -> Iterator[Finding]:
    for group, (first, *others) in logs.items():
        for other in others:
            begin = max(first.start, other.start)
            frames = ([frame for frame in copy.frames if frame.offset >= begin] for copy in (first, other))
            for left, right in zip(*frames, strict=False):
                if left != right:
                    yield Finding("copies-differ", f"{group}: at offset {left.offset}: {left} and {right}")
                    break
            if (first.end, first.chain) != (other.end, other.chain):
                yield Finding("copies-differ", f"{group}: one copy ends at {first.end}, another at {other.end}")


def _sequences(history: History, logs: Logs) -> Iterator[Finding]:
    for group, copies in logs.items():
        for copy in copies:
            following: dict[str, int] = {}
            for subject, sequence, id in copy.messages:
                expected = following.get(subject, sequence if copy.start else 0)
                if sequence != expected:
                    yield Finding("sequence", f"{group}: {subject}: {id} has sequence {sequence}, not {expected}")
                following[subject] = sequence + 1


def _stored(history: History, logs: Logs) -> Iterator[Finding]:
    """Compare receipts with logs; dead letters are copies of messages and have no receipts."""
    subjects = {message.sending.subject for message in history.messages.values()}
    places: dict[str, list[dict[Place, str]]] = {
        group: [{Place(subject, group, sequence): id for subject, sequence, id in copy.messages} for copy in copies]
        for group, copies in logs.items()
    }
    for message in history.messages.values():
        if message.outcome == STORED:
            for number, ids in enumerate(places[message.place.broker_group]):
                if (found := ids.get(message.place)) != message.sending.id:
                    yield Finding("lost-copy", f"copy {number} has {found} in the place of {message}")
    counts: Counter[str] = Counter()
    for place, id in ((place, id) for ids in places.values() for place, id in ids[0].items()):
        if id not in history.messages:
            if place.subject in subjects:
                yield Finding("unsent", f"{place}: {id}")
        elif place.subject in subjects:
            counts[id] += 1
            if history.messages[id].outcome == REFUSED:
                yield Finding("refused-stored", f"{place}: {history.messages[id]}")
    for id, count in counts.items():
        if count > 1:
            yield Finding("duplicate", f"{id} is {count} times in the logs: {history.messages[id]}")


def _order(history: History) -> Iterator[str]:
    """Check the order of each sender's messages in the log. Subjects with order keys are left to `_sent_by_key`: their
    messages travel in batches by key.
    """
    keyed = {message.sending.subject for message in history.messages.values() if message.sending.order_key}
    last: dict[tuple[str, str, str], int] = {}
    for message in history.messages.values():
        if message.outcome == STORED and message.sending.subject not in keyed:
            subject, group, sequence = message.place
            key = (message.sending.sender, subject, group)
            if sequence <= last.get(key, -1):
                yield f"{message} has a place before an earlier message of its sender, {last[key]}"
            last[key] = sequence


def _drained(history: History, logs: Logs) -> Iterator[Finding]:
    for broker_group, (first, *_) in logs.items():
        for (subject, group), progress in first.state.groups.items():
            if (subject, group) not in history.groups:
                continue
            unacked = sum(consumer.unacked_messages for consumer in progress.consumers.values())
            ahead = first.state.next_sequence.get(subject, 0) - progress.position
            if ahead or unacked or progress.requeued:
                left = f"{ahead} not delivered, {unacked} not acked, {progress.requeued}"
                yield Finding("not-drained", f"{broker_group}: {subject} {group}: {left}")


RULES: dict[str, list[Callable[[History], Iterator[str]]]] = {
    "lost": [_lost],
    "duplicated": [_repeated, _dead_again],
    "unexpected": [_unexpected],
    "reordered": [_one_by_one, _by_key, _sent_by_key],
    "offset went back": [_went_back],
    "poll skipped": [_skipped],
    "times do not grow": [_times],
    "order": [_order],
    "readonly-leak": [_readonly],
    "lost-copy": [_by_one_copy],
}
LOG_RULES: list[Callable[[History, Logs], Iterator[Finding]]] = [_copies, _sequences, _stored, _drained]
