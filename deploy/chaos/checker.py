"""Core. Reads a history beside both copies of each group's log and names whatever breaks a promise.

lost-copy            an acknowledged message is missing from a copy, stands elsewhere than its receipt says, or was
                     acknowledged while the slave was stopped and could store nothing
copies-differ        the two copies of a group are not equal, frame by frame and by the chain at the end
sequence             sequences of a subject in a log are not dense
duplicate            a message is in the logs more than once
refused-stored       a message whose producer was told "not stored" is in a log
unsent               a log holds a message that nobody sent
order                a producer's messages, sent one call after the other, stand in another order
readonly-leak        a group that was marked readonly acknowledged a message
never-consumed       an acknowledged message was delivered to nobody
consumed-unsent      a consumer got a message that is not in the log at that place
ack-went-back        a message came again although its ack had been answered
duplicate-no-cause   a message was delivered twice without any fault in between
not-drained          at the end something is not consumed or not acked
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from qmq.deploy.chaos.history import REFUSED, STORED, Delivered, History
from qmq.deploy.copies import Copy

HELD_S = 15.0
"""A consumer that lives on may hold a message this long before its application takes it."""
CAUSE_S = 3.0
"""A fault can cause a second delivery for a lease and this long after its end: reconnects."""
SHOWN_MAX = 5


class Finding(NamedTuple):
    rule: str
    text: str


@dataclass
class Logs:
    """Both copies of each group: what `qmq.deploy.copies.read_copy` returned."""

    copies: dict[str, tuple[Copy, Copy]]


def check(history: History, logs: Logs) -> list[Finding]:
    """Return all findings, at most a few of each rule; none: every promise was kept."""
    rules = (_alone, _copies, _sequences, _stored, _order, _readonly, _consumed, _repeated, _drained)
    found: dict[str, list[Finding]] = defaultdict(list)
    for rule in rules:
        for finding in rule(history, logs):
            found[finding.rule].append(finding)
    shown = []
    for name, findings in found.items():
        shown += findings[:SHOWN_MAX]
        if len(findings) > SHOWN_MAX:
            shown.append(Finding(name, f"and {len(findings) - SHOWN_MAX} more"))
    return shown


def _alone(history: History, logs: Logs) -> Iterator[Finding]:
    for message, stop in history.acknowledged_alone():
        yield Finding("lost-copy", f"{message} was acknowledged while the slave was stopped: {stop}")


def _copies(history: History, logs: Logs) -> Iterator[Finding]:
    for group, (master, slave) in logs.copies.items():
        begin = max(master.start, slave.start)
        ours, theirs = ([frame for frame in copy.frames if frame.offset >= begin] for copy in (master, slave))
        for mine, other in zip(ours, theirs, strict=False):
            if mine != other:
                yield Finding("copies-differ", f"{group}: at offset {mine.offset}: {mine} and {other}")
                break
        if (master.end, master.chain) != (slave.end, slave.chain):
            yield Finding("copies-differ", f"{group}: one copy ends at {master.end}, the other at {slave.end}")


def _sequences(history: History, logs: Logs) -> Iterator[Finding]:
    for group, copies in logs.copies.items():
        for copy in copies:
            following: dict[str, int] = {}
            for subject, sequence, id in copy.messages:
                expected = following.get(subject, sequence if copy.start else 0)
                if sequence != expected:
                    yield Finding("sequence", f"{group}: {subject}: {id} has sequence {sequence}, not {expected}")
                following[subject] = sequence + 1


def _stored(history: History, logs: Logs) -> Iterator[Finding]:
    places = [
        {
            (group, subject, sequence): id
            for group, copies in logs.copies.items()
            for subject, sequence, id in copies[side].messages
        }
        for side in (0, 1)
    ]
    sent = {one.id: one for one in history.sent}
    for one in history.sent:
        if one.outcome == STORED:
            for side in (0, 1):
                found = places[side].get((one.group, one.subject, one.sequence))
                if found != one.id:
                    yield Finding("lost-copy", f"{one} is not there in copy {side}, but {found}")
    for (group, subject, sequence), id in places[0].items():
        if id not in sent:
            yield Finding("unsent", f"{group}: {subject} {sequence}: {id}")
        elif sent[id].outcome == REFUSED:
            yield Finding("refused-stored", f"{group}: {subject} {sequence}: {sent[id]}")
    for id, count in Counter(places[0].values()).items():
        if count > 1:
            yield Finding("duplicate", f"{id} is {count} times in the logs: {sent.get(id)}")


def _order(history: History, logs: Logs) -> Iterator[Finding]:
    last: dict[tuple[str, str, str], int] = {}
    for one in history.sent:
        if one.outcome == STORED:
            key = (one.sender, one.subject, one.group)
            if one.sequence <= last.get(key, -1):
                yield Finding("order", f"{one} stands before what this sender sent earlier, at {last[key]}")
            last[key] = one.sequence


def _readonly(history: History, logs: Logs) -> Iterator[Finding]:
    for mark in history.marked:
        for one in history.sent:
            if one.outcome == STORED and one.group == mark.group and mark.begin < one.begun < one.done < mark.end:
                yield Finding("readonly-leak", f"{one} in {mark}")


def _consumed(history: History, logs: Logs) -> Iterator[Finding]:
    there = {
        (id, subject, group, sequence)
        for group, (master, _) in logs.copies.items()
        for subject, sequence, id in master.messages
    }
    delivered = {one[:4] for one in history.delivered}
    for one in history.sent:
        if one.outcome == STORED and (one.id, one.subject, one.group, one.sequence) not in delivered:
            yield Finding("never-consumed", str(one))
    for place in delivered - there:
        yield Finding("consumed-unsent", f"{place} is not in the log")


def _repeated(history: History, logs: Logs) -> Iterator[Finding]:
    by_id: dict[str, list[Delivered]] = defaultdict(list)
    for one in history.delivered:
        by_id[one.id].append(one)
    acked: dict[str, float] = {}
    for ack in history.acked:
        acked[ack.id] = min(ack.at, acked.get(ack.id, ack.at))
    for id, deliveries in by_id.items():
        deliveries.sort(key=lambda one: one.at)
        if id in acked:
            last = deliveries[-1]
            if last.started > acked[id] or last.at > acked[id] + HELD_S:
                yield Finding("ack-went-back", f"{last}, acked at {acked[id]}")
        for before, after in zip(deliveries, deliveries[1:], strict=False):
            if not any(
                fault.begin <= after.at
                and fault.end + history.lease_s + CAUSE_S >= before.at
                and fault.group in ("", after.group)
                for fault in history.faults
            ):
                yield Finding("duplicate-no-cause", f"{before} and {after}")


def _drained(history: History, logs: Logs) -> Iterator[Finding]:
    for group, (master, _) in logs.copies.items():
        state = master.state
        for (subject, name), progress in state.groups.items():
            unacked = sum(consumer.unacked_messages for consumer in progress.consumers.values())
            ahead = state.next_sequence.get(subject, 0) - progress.position
            if ahead or unacked or progress.requeued:
                text = f"{group}: {subject} {name}: {ahead} not delivered, {unacked} not acked, {progress.requeued}"
                yield Finding("not-drained", text)
