"""Core. What is left of a group, which copy goes on, and what is lost with the others.

A copy runs, or its disk is at hand (`qmq inspect --json`), or an operator says that it is gone for good. Of one that is
only silent nothing is decided: it may be the one that has everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from qmq.types import Role

RUNS, ON_DISK, GONE, SILENT = "runs", "on disk", "gone", "silent"
SERIOUS = frozenset({"rolled_back", "file_damaged", "empty"})
"""Troubles with which a copy is no master on its own word."""
REFILLED = frozenset({"rolled_back", "empty"})
"""Of a master, those that end by themselves once the other copy is there."""
MASTERS = frozenset({Role.MASTER, Role.DELAY_MASTER})


class WrongReport(Exception):
    """What was typed fits nothing of this group."""


@dataclass(frozen=True, slots=True)
class Copy:
    """One place of the group's row, and what is known of the copy that belongs there."""

    role: Role
    hostname: str
    ip: str
    serve_port: int
    sync_port: int
    state: str
    end: int | None = None
    """Where its log ends, as its broker said last or its disk says."""
    acknowledged: int = 0
    """The highest offset that it knows to be acknowledged."""
    troubles: tuple[str, ...] = ()
    subjects: Mapping[str, int] | None = None
    """Next sequence of each subject; None: only a report says so."""
    ids: tuple[tuple[str, int, str], ...] = ()
    """(subject, sequence, message id) that its report names."""

    @property
    def who(self) -> str:
        return f"{self.hostname}:{self.serve_port}"

    @property
    def is_there(self) -> bool:
        return self.state in (RUNS, ON_DISK)


@dataclass(frozen=True, slots=True)
class Lost:
    """Messages of a subject that a copy has and the one that goes on has not; sequences are inclusive."""

    subject: str
    first: int
    last: int
    ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Decision:
    """What is to be done."""

    steps: tuple[str, ...]
    """In this order; the last ones come after the command."""
    keeps: Copy | None = None
    words: Mapping[str, str] = field(default_factory=dict)
    """Of ReplaceBroker; empty: no role changes."""
    lost: tuple[Lost, ...] = ()
    lost_offsets: tuple[int, int] | None = None
    """Acknowledged, and in no copy that goes on: half-open offsets of the log."""
    needs_acceptance: bool = False


def read_copies(
    brokers: Iterable[Mapping[str, Any]],
    replicas: Iterable[Mapping[str, Any]],
    reports: Iterable[Mapping[str, Any]],
    gone: Iterable[str],
) -> list[Copy]:
    """Put together what metaserver, brokers and disks say. The master comes first.

    Args:
        brokers: rows of ListBrokers of one group.
        replicas: of ReplicaStatus.
        reports: of `qmq inspect --json`.
        gone: `hostname:servePort` of brokers whose disks never return.

    Raises:
        WrongReport: a report, or a name, is of no broker of this group.
    """
    said = {f"{row['hostname']}:{row['servePort']}": row for row in replicas}
    held = {f"{row['hostname']}:{row['servePort']}": row for row in reports}
    rows = {f"{row['hostname']}:{row['servePort']}": row for row in brokers}
    for name in (*held, *gone):
        if name not in rows:
            raise WrongReport(f"{name} is no broker of this group: {', '.join(rows) or 'it has none'}")
    copies = [_copy(row, said.get(name, {}), held.get(name), name in set(gone)) for name, row in rows.items()]
    return sorted(copies, key=lambda copy: copy.role not in MASTERS)


def _copy(row: Mapping[str, Any], said: Mapping[str, Any], report: Mapping[str, Any] | None, is_gone: bool) -> Copy:
    place = (Role[row["role"]], row["hostname"], row["ip"], row["servePort"], row["syncPort"])
    if said.get("reachable") and not is_gone:
        troubles = tuple(reason for reason in said["readonlyReasons"] or () if reason in SERIOUS)
        return Copy(*place, RUNS, said["logEnd"], said["highWatermark"] or 0, troubles)
    if report is None:
        known = said.get("highWatermark") or 0
        return Copy(*place, GONE if is_gone else SILENT, said.get("logEnd"), known)
    if report["group"] != row["group"]:
        raise WrongReport(f"{report['directory']} is of {report['group'] or 'no group'}, not of {row['group']}")
    points = [report[name]["end"] for name in ("acknowledged", "lacks") if report[name]]
    return Copy(
        *place,
        GONE if is_gone else ON_DISK,
        report["log"]["end"],
        max([report["log"]["highWatermark"], *points]),
        tuple(trouble["name"] for trouble in report["troubles"] if trouble["name"] in SERIOUS),
        report["subjects"],
        tuple((s, n, i) for s, n, i in report.get("above", {}).get("ids", ())),
    )


MORE_THAN_TWO = (
    "this plans for two copies, and the group has more. While the master's disk is there, start the master: it goes on "
    "with whatever slaves it has, and RemoveBroker takes out who never returns. If its disk is lost, `qmq inspect DIR` "
    "says which copy has most: ReplaceBroker with that one, in the master's role and with --acceptLoss, makes it the "
    "master"
)


def decide(copies: Sequence[Copy]) -> Decision:
    """Choose the copy that goes on: the master's of the row, unless that is gone, or worse than the slave's."""
    if silent := [copy.who for copy in copies if copy.state == SILENT]:
        step = (
            f"{', '.join(silent)}: start it. If its disk is at hand, `qmq inspect DIR --json` and name the file in "
            f"--reports; if it never returns, name it in --gone"
        )
        return Decision((step,))
    if len(copies) > 2:
        return Decision((MORE_THAN_TWO,))
    master = next((copy for copy in copies if copy.role in MASTERS), None)
    if master is None:
        return Decision(("the group has no master; AddBroker, or the second call of ReplaceBroker, gives it one",))
    kept = _best(master, copies)
    if kept is None:
        return _begin_anew(master, copies)
    if kept is master and not master.troubles:
        return Decision(_all_start(copies), kept)
    if not kept.troubles and master.is_there and set(master.troubles) <= REFILLED:
        return Decision((*_all_start(copies), f"{master.who} is refilled by itself from {kept.who}"), kept)
    lost = _lost(kept, copies)
    words = _words(master, kept)
    steps = (f"stop {kept.who}", f"ReplaceBroker puts {kept.who} in the master's place", *_all_start(copies))
    return Decision(steps, kept, words, lost, _offsets(kept, copies), bool(kept.troubles or lost))


def _best(master: Copy, copies: Sequence[Copy]) -> Copy | None:
    """The master's copy if it is whole; else the whole one; else the longest that is there."""
    there = [copy for copy in copies if copy.is_there]
    return min(there, key=lambda copy: (bool(copy.troubles), copy is not master, -(copy.end or 0)), default=None)


def _begin_anew(master: Copy, copies: Sequence[Copy]) -> Decision:
    end = max((max(copy.end or 0, copy.acknowledged) for copy in copies), default=0)
    steps = (f"the group begins anew with an empty disk at {master.who}", *_all_start(copies))
    return Decision(steps, None, _words(master, master), (), (0, end), True)


def _words(master: Copy, kept: Copy) -> dict[str, str]:
    swap = {} if kept is master else {"swap": "true"}
    return {
        "role": str(int(master.role)),
        "hostname": kept.hostname,
        "ip": kept.ip,
        "servePort": str(kept.serve_port),
        "syncPort": str(kept.sync_port),
    } | swap


def _all_start(copies: Sequence[Copy]) -> tuple[str, ...]:
    def how(copy: Copy) -> str:
        return {GONE: f"start {copy.who} with an empty data directory", RUNS: f"{copy.who} runs"}.get(
            copy.state, f"start {copy.who} with the disk that was inspected"
        )

    return tuple(map(how, copies))


def _offsets(kept: Copy, copies: Sequence[Copy]) -> tuple[int, int] | None:
    known = max(copy.acknowledged for copy in copies)
    return (kept.end or 0, known) if known > (kept.end or 0) else None


def _lost(kept: Copy, copies: Sequence[Copy]) -> tuple[Lost, ...]:
    """What other reports have of each subject beyond the copy that goes on, if its own report says what that has."""
    if kept.subjects is None:
        return ()
    ends: dict[str, int] = {}
    for copy in copies:
        for subject, following in (copy.subjects or {}).items():
            ends[subject] = max(ends.get(subject, 0), following)
    ids = {(subject, sequence): id_ for copy in copies for subject, sequence, id_ in copy.ids}
    lost = []
    for subject, end in sorted(ends.items()):
        begin = kept.subjects.get(subject, 0)
        if begin < end:
            named = tuple(ids[subject, at] for at in range(begin, end) if (subject, at) in ids)
            lost.append(Lost(subject, begin, end - 1, named))
    return tuple(lost)
