"""Shell. The range in which the copies of a broker group must agree: described, held, and checked to have stayed."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from itertools import pairwise

from qmq.audit.copies import CannotRead, Copy, open_copy
from qmq.audit.findings import BOTH, FindingKind, Row
from qmq.audit.history import History, find_verified
from qmq.audit.places import places_now
from qmq.audit.results import Group, Result
from qmq.ledger import Ledger, known_from, lies_in

AGAIN_WAIT_S, POLL_S = 120.0, 0.5
"""Longest wait for brokers that recover: time for a restart, or for seeding a slave with some GB of log."""


def wait_until_well(groups: Mapping[int, Group]) -> dict[int, Group]:
    """Return the groups, under their numbers, that recover within `AGAIN_WAIT_S`, with their roles then.

    A slave still being seeded has not recovered: its missing frames are no finding.
    """
    waiting, well = dict(groups), dict[int, Group]()
    deadline = time.monotonic() + AGAIN_WAIT_S
    while waiting:
        for number, group in [*waiting.items()]:
            try:
                places = places_now(group.places)
            except CannotRead:
                del waiting[number]
                continue
            if places is not None:
                well[number] = replace(waiting.pop(number), places=places)
        if not waiting or time.monotonic() > deadline:
            break
        time.sleep(POLL_S)
    return dict(sorted(well.items()))


def freeze(group: Group, result: Result) -> None:
    """Describe both copies, and freeze the high watermark before the ends are read.

    A stated high watermark held for both disks. So both copies must reach the higher one, and a copy that ends below it
    has lost frames. The lower end instead would hide exactly that.
    """
    copies: dict[str, Copy] = {}
    try:
        for name in group.places:
            copies[name] = open_copy(group.places[name])
        result.watermark = max(copy.describe().high_watermark for copy in copies.values())
        for name in group.places:
            copies[name].close()
            copies[name] = open_copy(group.places[name])
        result.incarnations = {name: copy.owner().incarnation for name, copy in copies.items()}
        result.logs = {name: copy.describe() for name, copy in copies.items()}
    finally:
        for copy in copies.values():
            copy.close()
    logs = result.logs
    result.start = max(log.start for log in logs.values())
    for name, log in logs.items():
        for begin, end, why in log.damaged if "path" in group.places[name] else ():
            if begin >= log.end:  # missing segments before it are found by reading
                result.add(FindingKind.DAMAGED, copy=name, offset=begin, end=max(end, result.watermark), text=why)
        if log.start < result.start:
            kept = f"[{log.start}, {result.start})"
            result.notes.append(f"the {name} keeps {kept}, which the other's retention removed: not compared")
        if log.torn_bytes:
            result.notes.append(f"{log.torn_bytes} bytes behind the {name}'s end at {log.end} are no frame (torn tail)")
        if result.is_behind(name):
            behind = result.watermark - log.end
            result.notes.append(f"the {name} ends at {log.end}, {behind} bytes before the end that others acknowledged")
        if log.end > result.watermark:
            past = log.end - result.watermark
            result.notes.append(f"the {name} continues to {log.end}, {past} bytes past the high watermark")


def look_back(group: Group, result: Result, ledger: Ledger | None, share: int) -> History:
    """Choose the ranges to read: all, or the bytes after a verified point that both copies still have, and a part of
    the old ones.
    """
    history = History(known_from([]), result.start)
    if ledger is not None:
        history = find_verified(ledger.known(group.name), group.places, result.logs, share=share)
    if history.broken is not None:
        for copy in history.broken.copies:
            result.add(history.broken.what, copy=copy, text=history.broken.text, offset=history.broken.offset)
    verified = history.known.anchor.verified if history.known.anchor else result.start
    if history.broken is None and verified < result.start:
        result.unverified = result.start - verified
        result.notes.append(f"retention has removed [{verified}, {result.start}), which no run had verified")
    if history.anchor is not None:  # the verified range was acknowledged, though an idle log does not state it
        result.watermark = max(result.watermark, history.anchor.verified)
    ends = [log.end for name, log in result.logs.items() if log.end < history.begin and not result.is_behind(name)]
    if ends:
        # A copy lost verified bytes: read everything from there on, starting at an earlier piece's border.
        begin = max((cut for cut in history.cuts() if result.start <= cut <= min(ends)), default=result.start)
        again = [piece for piece in history.again if piece.end <= begin]
        history = replace(history, begin=begin, again=again, before=None)
    result.begin, result.again, result.cuts = history.begin, history.again, history.cuts()
    again = sorted(result.again)
    result.wrong_before = [
        row
        for row in history.known.wrong
        if result.start <= row["offset"] < result.begin and not lies_in(again, row["offset"])
    ]
    if result.watermark <= result.start and not result.found:
        raise CannotRead(f"nothing lies below the high watermark {result.watermark}: nothing is proven")
    return history


def segments_to_check(result: Result, bases: Mapping[str, Sequence[int]]) -> list[int]:
    """Return the closed segments within the ranges to read; index and snapshot lie beside them."""
    reads = result.reads()
    closed = {pair for places in bases.values() for pair in pairwise(places)}
    return sorted({base for base, end in closed if any(begin < end <= until for begin, until in reads)})


def hold_copies(group: Group, held: ExitStack) -> None:
    """Keep both copies from deleting segments until `held` is closed.

    The copies are read one after the other, piece by piece. A segment deleted by retention meanwhile would look lost.
    """
    for place in group.places.values():
        held.enter_context(closing(open_copy(place))).hold()


def check_kept(group: Group, result: Result) -> None:
    """Raise CannotRead if a copy has lost frames while it was read: findings may come from just that.

    A restarted broker forgets holds on its log, and a directory in use has none.
    """
    for name, place in group.places.items():
        with closing(open_copy(place)) as copy:
            now, incarnation = copy.describe(), copy.owner().incarnation
        if incarnation != result.incarnations[name]:
            raise CannotRead(f"the {name} was emptied or replaced while it was read: audit it again")
        if now.start > result.start:
            raise CannotRead(f"the {name} let go of [{result.start}, {now.start}) while it was read: audit it again")
        if now.end < result.logs[name].end:
            span = f"[{now.end}, {result.logs[name].end})"
            raise CannotRead(f"the {name} cut off {span} while it was read, as after a failover: audit it again")


def add_reported_damage(group: Group, result: Result) -> None:
    """Add damage that a running broker has reported since the audit began and that no reader met.

    Bytes read twice may be repaired before the reader that would report them.
    """
    for name, place in group.places.items():
        met: Counter[tuple[int, int, str]] = Counter()
        if "broker" in place:
            with suppress(CannotRead), closing(open_copy(place)) as copy:  # an absent broker reports nothing
                met = Counter(copy.describe().damaged) - Counter(result.logs[name].damaged)
        for begin, end, reason in met:
            if not any(_is_about(row, name, begin, end) for row in result.findings):
                result.add(FindingKind.DAMAGED, copy=name, offset=begin, end=end, text=reason)


def _is_about(row: Row, copy: str, begin: int, end: int) -> bool:
    at = row["offset"]
    return row["copy"] in (copy, BOTH) and at is not None and at < end and (row["end"] or at + 1) > begin
