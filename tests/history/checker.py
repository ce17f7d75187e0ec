"""Core. Judges a history of producers and consumers, as Jepsen does queues and logs, and names what breaks a promise.

    lost                a stored message was neither handled to its end nor became a dead letter
    duplicated          it was handed over again, or became a dead letter, although nothing explains that
    unexpected          a consumer was given what nobody sent, or other content, or what lies or belongs elsewhere
    reordered           a consumer that takes one by one got an older message after a newer one; of an order key, a
                        message was handed over before the one in front of it was done, or stored in front of it
    offset went back    a consumer's acked position is lower than it was
    poll skipped        a sequence was given to nobody although a later one was
    times do not grow   a message was handed over again under the same number, or a smaller one

What explains that a message comes again: a nack; that its consumer vanished, left or stood still before its ack was
confirmed; a fault of the broker group in that time. After a confirmed ack only one thing does: the copy of the log
that held it was the only one, and was given up. Order and positions have that one excuse, too. (And what a consumer
that left had not begun with comes to others as if for the first time, behind what they have.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise
from math import inf
from typing import NamedTuple

from tests.history.history import Handover, History, Place, Track
from tests.history.records import DEAD, DONE, REFUSED, RETRY, STORED, Position, Sent

SHOWN_MAX = 5


class Finding(NamedTuple):
    kind: str
    text: str


def check(history: History) -> list[Finding]:
    """Return all findings, at most a few of each kind; none: every promise was kept."""
    shown: list[Finding] = []
    for kind, rules in RULES.items():
        texts = [text for rule in rules for text in rule(history)]
        shown += [Finding(kind, text) for text in texts[:SHOWN_MAX]]
        if len(texts) > SHOWN_MAX:
            shown.append(Finding(kind, f"and {len(texts) - SHOWN_MAX} more"))
    return shown


def _lost(history: History) -> Iterator[str]:
    groups = history.groups
    for message in history.messages.values():
        if message.outcome != STORED:
            continue
        place = message.place
        if not any(subject == place.subject for subject, _ in groups):
            yield f"nobody consumes its subject: {message}"
        for (subject, group), tags in groups.items():
            if subject != place.subject or (tags and not tags & set(message.sending.tags)):
                continue
            track = Track(subject, group, place.broker_group)
            handovers = history.handovers[track].get(place.sequence, [])
            if place.sequence not in history.dead[track] and not _is_handled(handovers):
                yield f"for {group}: {message}; {_list(handovers) or 'given to nobody'}"


def _is_handled(handovers: list[Handover]) -> bool:
    """Whether somebody did it, and nobody gave it up later."""
    decisions = [one.decided.decision for one in handovers if one.decided is not None]
    gave_up = handovers and handovers[-1].is_kept and decisions and decisions[-1] == DEAD
    return DONE in decisions and not gave_up


def _repeated(history: History) -> Iterator[str]:
    for track, places in history.handovers.items():
        for handovers in places.values():
            for before, after in pairwise(handovers):
                if after.got.times > before.got.times and (why := _unexplained(history, before, after)):
                    yield f"for {track.group}, {why}: {before}; {after}"


def _unexplained(history: History, before: Handover, after: Handover) -> str | None:
    """Say what is wrong with a hand-over that follows another one; None if it is explained."""
    decision = before.decided.decision if before.decided else None
    if decision == RETRY:
        return None
    if before.kept_at is not None:
        if history.may_have_lost(before.got.broker_group, before.got.at, before.kept_at):
            return None
        return "again after its end was confirmed"
    if after.got.at < before.got.at or history.cause(before, after.got.at):
        return None  # in that order, it is a matter of times
    return "again without a cause"


def _dead_again(history: History) -> Iterator[str]:
    for track, places in history.dead.items():
        for sequence, dead in places.items():
            if len(dead) > 1:
                yield f"{len(dead)} dead letters of one message: {dead}"
            for one in history.handovers[track].get(sequence, []):
                is_done = one.kept_at is not None and one.decided is not None and one.decided.decision == DONE
                if is_done and not history.may_have_lost(track.broker_group, one.got.at, one.kept_at or 0.0):
                    yield f"a dead letter although its ack was confirmed: {dead[0]}; {one}"


def _unexpected(history: History) -> Iterator[str]:
    groups, places = history.groups, _places(history)
    for track, sequences in history.handovers.items():
        tags = groups.get((track.subject, track.group), frozenset())
        for sequence, handovers in sequences.items():
            for one in handovers:
                if why := _wrong(history, one, places[one.got.id], tags):
                    yield f"{why}: {one}; {history.messages.get(one.got.id, '')}"
            for dead in history.dead[track].get(sequence, []):
                if dead.id != handovers[0].got.id:
                    yield f"a dead letter is of another message: {dead}; {handovers[0]}"
    for id in history.sent_twice:
        yield f"the workload is wrong: {id} was sent twice"


def _places(history: History) -> dict[str, set[Place]]:
    """Of each id, where its message was said or seen to lie."""
    places: dict[str, set[Place]] = defaultdict(set)
    for id, message in history.messages.items():
        if message.outcome == STORED:
            places[id].add(message.place)
    for track, sequences in history.handovers.items():
        for sequence, handovers in sequences.items():
            for one in handovers:
                places[one.got.id].add(Place(track.subject, track.broker_group, sequence))
    return places


def _wrong(history: History, handover: Handover, places: set[Place], tags: frozenset[str]) -> str | None:
    message = history.messages.get(handover.got.id)
    if message is None:
        return "nobody sent it"
    if message.outcome == REFUSED:
        return "its producer was told that it is not stored"
    if handover.got.subject != message.sending.subject:
        return "of another subject"
    if handover.got.content != message.sending.content:
        return "its content is not what was sent"
    if len(places) > 1:
        return f"it lies in more than one place, {sorted(places)}"
    if tags and not tags & set(message.sending.tags):
        return f"its group asks for {sorted(tags)} only"
    return None


def _one_by_one(history: History) -> Iterator[str]:
    """New messages, of which nothing depends on an order key or a tag, come in the order of their sequences."""
    keyed = {one.sending.subject for one in history.messages.values() if one.sending.order_key}
    plain = {
        (one.consumer, one.subject, one.group)
        for one in history.joined
        if one.concurrency == 1 and not one.tags and one.subject not in keyed
    }
    for consumer, numbers in history.by_consumer.items():
        newest: dict[Track, Handover] = {}
        for one in numbers.values():
            got = one.got
            if got.times > 1 or (consumer, got.subject, got.group) not in plain:
                continue
            track = Track(got.subject, got.group, got.broker_group)
            before = newest.get(track)
            if before is not None and before.got.sequence > got.sequence:
                is_excused = history.was_left(got.subject, got.group, got.at)
                if not is_excused and not history.may_have_lost(got.broker_group, before.got.at, got.at):
                    yield f"{one} after {before}"
            newest[track] = one


def _by_key(history: History) -> Iterator[str]:
    for track, places in history.handovers.items():
        newest: dict[str, list[Handover]] = {}
        for _, handovers in sorted(places.items()):
            message = history.messages.get(handovers[0].got.id)
            if message is None or not (key := message.sending.order_key):
                continue
            before, newest[key] = newest.get(key), handovers
            if before is None:
                continue
            end, begin = _end(history, track, before), min(one.got.at for one in handovers)
            if begin < end and not history.may_have_lost(track.broker_group, before[0].got.at, min(end, begin)):
                yield f"for {track.group}, key {key}: {_list(handovers)}; in front of it: {_list(before)}"


def _end(history: History, track: Track, handovers: list[Handover]) -> float:
    """When a message was done or given up; never: infinity."""
    last = handovers[-1]
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
    for track, places in history.handovers.items():
        if groups.get((track.subject, track.group)):
            continue  # others' tags lie in between
        next_sequence = 0
        for given in sorted(places.keys() | history.dead[track].keys()):
            if given > next_sequence:
                skipped = f"{next_sequence} to {given - 1}"
                yield f"sequences {skipped} of {track} were given to nobody, but {_list(places.get(given, []))}"
            next_sequence = given + 1


def _times(history: History) -> Iterator[str]:
    for places in history.handovers.values():
        for handovers in places.values():
            for smaller, larger in pairwise(handovers):
                first, second = sorted((smaller, larger), key=lambda one: one.got.at)
                if larger.got.times > smaller.got.times and first is smaller:
                    continue
                if history.cause(smaller, larger.got.at):
                    continue  # it lost the message, and did not know, or had not begun with it
                if not history.may_have_lost(first.got.broker_group, first.got.at, second.got.at):
                    yield f"{second} after {first}"


def _list(handovers: list[Handover]) -> str:
    return "; ".join(map(str, handovers))


RULES: dict[str, list[Callable[[History], Iterator[str]]]] = {
    "lost": [_lost],
    "duplicated": [_repeated, _dead_again],
    "unexpected": [_unexpected],
    "reordered": [_one_by_one, _by_key, _sent_by_key],
    "offset went back": [_went_back],
    "poll skipped": [_skipped],
    "times do not grow": [_times],
}
