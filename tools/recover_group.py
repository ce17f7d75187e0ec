"""Shell. RecoverGroup: reads the state of every copy of a group, chooses the copy that becomes the master, promotes it.

A copy runs, or its disk is at hand (`qmq inspect --json`), or the operator declares it gone for good. A copy that is
only silent blocks the decision, because it may hold every acknowledged message.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from qmq.tools.call import CallFailed, Exit, post
from qmq.tools.command import bad, good, warning
from qmq.tools.commands import COMMANDS
from qmq.tools.session import Session
from qmq.tools.table import Block, Column, Table
from qmq.tools.terminal import complain, show
from qmq.types import MASTERS, Role

RUNS, ON_DISK, GONE, SILENT, OTHER = "runs", "on disk", "gone", "silent", "other directory"
MISSED = frozenset({SILENT, OTHER})
"""States of a copy with unknown contents: its disk may be lost or not."""
SERIOUS = frozenset({"rolled_back", "file_damaged", "empty"})
"""Troubles that rule a copy out as master unless others confirm it."""
INCOMPLETE = "incomplete"
"""Trouble of a slave that was never filled and may be empty."""
PARTED = "diverged"
"""Trouble of a slave that confirmed frames that the master's log lacks. Either log may hold the acknowledged ones."""
REFILLED = frozenset({"rolled_back", "empty"})
"""Troubles of a master that end by themselves once it reaches another copy."""

ASIDE = "set aside the data directory of "
"""Beginning of the step for a slave with a different copy."""


class WrongReport(Exception):
    """The typed names or reports do not belong to this group."""


@dataclass(frozen=True, slots=True)
class Copy:
    """One member of the group's row, and the state of its copy."""

    role: Role
    hostname: str
    ip: str
    serve_port: int
    sync_port: int
    state: str
    end: int | None = None
    """End of its log, as reported last by its broker or read from its disk."""
    epoch: tuple[int, int] = (0, 0)
    """(term, boot) of the last frame in its log."""
    acknowledged: int = 0
    """Highest offset that this copy has seen acknowledged."""
    troubles: tuple[str, ...] = ()
    subjects: Mapping[str, int] | None = None
    """Next sequence of each subject; None without a report."""
    ids: tuple[tuple[str, int, str], ...] = ()
    """(subject, sequence, message id) in its report."""
    parted: Mapping[str, Any] | None = None
    """`offset`, `messages` and `subjects` that it confirmed and the master's log lacks, as it reports."""

    @property
    def label(self) -> str:
        return f"{self.hostname}:{self.serve_port}"

    @property
    def is_there(self) -> bool:
        return self.state in (RUNS, ON_DISK)

    @property
    def is_whole(self) -> bool:
        return self.is_there and not self.troubles

    @property
    def may_go_on(self) -> bool:
        """Whether the copy can become the master's: its only trouble may be frames that the former master lacks."""
        return self.is_there and set(self.troubles) <= {PARTED}

    @property
    def reach(self) -> tuple[tuple[int, int], int]:
        """Sort key of copies of one log; the greatest copy has most. A longer log of an older epoch has less."""
        return self.epoch, self.end or 0


@dataclass(frozen=True, slots=True)
class Lost:
    """Messages of a subject that another copy has and the chosen copy lacks; sequences are inclusive. `only_at`: that
    other copy, if it is unclear whether the messages were acknowledged.
    """

    subject: str
    first: int
    last: int
    ids: tuple[str, ...] = ()
    only_at: str = ""


@dataclass(frozen=True, slots=True)
class Decision:
    """Steps of a recovery, its command, and its losses."""

    steps: tuple[str, ...]
    """Steps in order; the last ones follow the command."""
    keeps: Copy | None = None
    command: str = ""
    """Command that changes a role; empty if no role changes."""
    words: Mapping[str, str] = field(default_factory=dict)
    """Options of the command."""
    lost: tuple[Lost, ...] = ()
    lost_offsets: tuple[int, int] | None = None
    """Half-open log offsets that were acknowledged and are in no remaining copy."""
    needs_acceptance: bool = False
    maybe_lost: tuple[Lost, ...] = ()
    """Messages of copies that differ; they were acknowledged only if a disk lost fsynced frames."""


def read_copies(
    brokers: Iterable[Mapping[str, Any]],
    replicas: Iterable[Mapping[str, Any]],
    reports: Iterable[Mapping[str, Any]],
    gone: Iterable[str],
) -> list[Copy]:
    """Return the copies of a group, from reports of metaserver, brokers and disks; the master's comes first.

    Args:
        brokers: rows of ListBrokers of one group.
        replicas: of ReplicaStatus.
        reports: of `qmq inspect --json`.
        gone: `hostname:servePort` of brokers with disks that never return.

    Raises:
        WrongReport: a report or a name belongs to no broker of this group.
    """
    status = {f"{row['hostname']}:{row['servePort']}": row for row in replicas}
    report_of = {f"{row['hostname']}:{row['servePort']}": row for row in reports}
    rows = {f"{row['hostname']}:{row['servePort']}": row for row in brokers}
    for name in (*report_of, *gone):
        if name not in rows:
            raise WrongReport(f"{name} is no broker of this group: {', '.join(rows) or 'it has none'}")
    copies = [_copy(row, status.get(name, {}), report_of.get(name), name in set(gone)) for name, row in rows.items()]
    return sorted(copies, key=lambda copy: copy.role not in MASTERS)


def _copy(row: Mapping[str, Any], status: Mapping[str, Any], report: Mapping[str, Any] | None, is_gone: bool) -> Copy:
    place = (Role[row["role"]], row["hostname"], row["ip"], row["servePort"], row["syncPort"])
    if status.get("reachable") and not is_gone:
        troubles = tuple(reason for reason in status["readonlyReasons"] or () if reason in SERIOUS)
        if status.get("incomplete") and place[0] not in MASTERS:  # absent in answers of older metaservers
            troubles += (INCOMPLETE,)
        if (
            PARTED in (status["readonlyReasons"] or ()) and place[0] not in MASTERS
        ):  # a master reports it about its slaves
            troubles += (PARTED,)
        epoch = _epoch(status["lastEpoch"])
        if status.get("otherDirectory") and report is None:
            return Copy(*place, OTHER)
        parted = status.get("parted")
        return Copy(*place, RUNS, status["logEnd"], epoch, status["highWatermark"] or 0, troubles, parted=parted)
    if report is None:
        acknowledged = status.get("highWatermark") or 0
        epoch = _epoch(status.get("lastEpoch"))
        return Copy(*place, GONE if is_gone else SILENT, status.get("logEnd"), epoch, acknowledged)
    if report["group"] != row["group"]:
        raise WrongReport(f"{report['directory']} is of {report['group'] or 'no group'}, not of {row['group']}")
    points = [report[name]["end"] for name in ("acknowledged", "lacks") if report[name]]
    return Copy(
        *place,
        GONE if is_gone else ON_DISK,
        report["log"]["end"],
        _epoch(report["log"]["epoch"]),
        max([report["log"]["highWatermark"], *points]),
        tuple(trouble["name"] for trouble in report["troubles"] if trouble["name"] in SERIOUS),
        report["subjects"],
        tuple((s, n, i) for s, n, i in report.get("above", {}).get("ids", ())),
    )


def _epoch(status: Sequence[int] | None) -> tuple[int, int]:
    return (status[0], status[1]) if status else (0, 0)


ABOUT_MISSED = (
    "{}: start it with the data directory that it had. If its disk is at hand, run `qmq inspect DIR --json` and "
    "name the output file in --reports; if the disk never returns, name the broker in --gone"
)


def decide(copies: Sequence[Copy], *, term: int = 0, min_copies: int = 2, remembered: int = 0) -> Decision:
    """Choose the copy that continues: the master's, unless it is gone or worse than a slave's.

    Of n copies, m acknowledge. Any n - m + 1 slaves that followed the master of the row's term hold every acknowledged
    frame among them, so the best of these lacks nothing. If more than that was acknowledged, one of their disks was
    restored from a backup.

    Args:
        term, min_copies: of the group's row.
        remembered: acknowledged point stored by the metaserver.
    """
    copies = [_with_rollback(copy, copies, remembered) for copy in copies]
    acknowledged = max(remembered, *(copy.acknowledged for copy in copies))
    master = next((copy for copy in copies if copy.role in MASTERS), None)
    if master is None:
        return Decision(("the group has no master; AddBroker, or the second call of ReplaceBroker, gives it one",))
    slaves = [copy for copy in copies if copy is not master and copy.is_whole]
    proof = slaves if len(copies) == 2 else [slave for slave in slaves if slave.epoch[0] == term]
    is_enough = len(proof) > max(len(copies) - max(min_copies, 2), 0)
    is_proven = is_enough and not _offsets(max(proof, key=lambda copy: copy.reach), acknowledged)
    is_missed = master.state in MISSED or len(copies) == 2 or not (master.is_whole or is_proven)
    if is_missed and (silent := [copy.label for copy in copies if copy.state in MISSED]):
        return Decision((ABOUT_MISSED.format(", ".join(silent)),))
    kept = _best(master, copies, is_proven)
    if kept is None:
        return _begin_anew(master, copies, acknowledged)
    if kept is master and not master.troubles:
        parted = [copy for copy in copies if PARTED in copy.troubles]
        others = [copy for copy in copies if copy not in parted]
        aside = _set_aside(parted, master, copies, term, min_copies) if parted else ()
        return Decision((*aside, *_all_start(others)), kept, maybe_lost=tuple(_maybe_lost(parted)))
    if is_proven and master.is_there and set(master.troubles) <= REFILLED:
        return Decision((*_all_start(copies), f"{master.label} is refilled by itself from {kept.label}"), kept)
    if is_proven and len(copies) > 2:
        return _choose_among(proof, master, kept, copies)
    return _put_in_the_masters_place(kept, master, copies, acknowledged)


def _with_rollback(copy: Copy, copies: Sequence[Copy], remembered: int) -> Copy:
    """Return the copy, with the trouble `rolled_back` if its disk ends below the acknowledged point: it was restored
    from a backup. One slave of several may just lag. Running brokers report this trouble themselves.
    """
    may_be_behind = copy.role not in MASTERS and len(copies) > 2
    if copy.state != ON_DISK or may_be_behind or (copy.end or 0) >= remembered or "rolled_back" in copy.troubles:
        return copy
    return replace(copy, troubles=(*copy.troubles, "rolled_back"))


def _best(master: Copy, copies: Sequence[Copy], is_proven: bool) -> Copy | None:
    """Return the copy to keep, or None if no copy is there.

    It is the master's if that is whole, else the eligible copy with most, else any copy with most. Eligible is a whole
    copy if slaves prove to lack nothing, otherwise each that `may_go_on`; the master's precedes other eligible ones.
    """
    if master.is_whole:
        return master

    def rank(copy: Copy) -> tuple[Any, ...]:
        return copy.is_whole if is_proven else copy.may_go_on, copy is master, copy.reach

    return max((copy for copy in copies if copy.is_there), key=rank, default=None)


def _set_aside(
    parted: Sequence[Copy], master: Copy, copies: Sequence[Copy], term: int, min_copies: int
) -> tuple[str, ...]:
    """Return the steps for slaves that confirmed frames that the master's log lacks.

    Their directories are set aside if these frames were never acknowledged: so many copies have the master's log in
    the row's term that too few others remain. A disk restored unnoticed could break this, so nothing is deleted.
    """
    names = ", ".join(copy.label for copy in parted)
    begun = [copy for copy in copies if copy.is_whole and copy.epoch[0] == term]
    if master not in begun or len(begun) <= len(copies) - min_copies:
        return (
            f"keep the data directory of {names}: too few copies have the log that {master.label} has in term {term} "
            "to show the acknowledged frames. Start the stopped ones; else compare the logs with the audit",
        )
    return tuple(
        f"{ASIDE}{copy.label}, stopped, and start it with an empty one: {master.label} fills it{_kept_apart(copy)}"
        for copy in parted
    )


def _kept_apart(copy: Copy) -> str:
    if not copy.parted or not copy.parted["messages"]:
        return ""
    return f". Delete nothing: `qmq inspect DIR --above={copy.parted['offset']}` names the messages that only it has"


def _maybe_lost(parted: Iterable[Copy]) -> Iterator[Lost]:
    for copy in parted:
        for subject, (first, last) in copy.parted["subjects"].items() if copy.parted else ():
            yield Lost(subject, first, last, only_at=copy.label)


def _put_in_the_masters_place(kept: Copy, master: Copy, copies: Sequence[Copy], acknowledged: int) -> Decision:
    lost, offsets = _lost(kept, copies), _offsets(kept, acknowledged)
    stopped = [copy for copy in copies if copy in (master, kept) and copy.state == RUNS]
    stop = (f"stop {', '.join(copy.label for copy in stopped)}",) if stopped else ()
    steps = (*stop, f"ReplaceBroker puts {kept.label} in the master's place", *_all_start(copies, stopped))
    is_loss = bool(kept.troubles or lost or offsets or len(copies) > 2)
    return Decision(steps, kept, "ReplaceBroker", _arguments(master, kept, copies), lost, offsets, is_loss)


def _choose_among(proof: Sequence[Copy], master: Copy, kept: Copy, copies: Sequence[Copy]) -> Decision:
    """Return the decision for several slaves: the metaserver chooses among running ones, which leave the old master."""
    if stopped := [copy.label for copy in proof if copy.state != RUNS]:
        return Decision((f"start {', '.join(stopped)} with the disk that was inspected, then repeat this",), kept)
    steps = (f"Failover makes {kept.label} the master, or another one that has as much", *_all_start(copies))
    if master.state != GONE:
        return Decision((f"stop {master.label} and name it in --gone: its disk is not to be used",), kept)
    return Decision(steps, kept, "Failover", {"masterGone": "true"})


def _begin_anew(master: Copy, copies: Sequence[Copy], acknowledged: int) -> Decision:
    end = max(acknowledged, *(copy.end or 0 for copy in copies))
    steps = (f"the group starts again with an empty disk at {master.label}", *_all_start(copies))
    return Decision(steps, None, "ReplaceBroker", _arguments(master, master, copies), (), (0, end), True)


def _arguments(master: Copy, kept: Copy, copies: Sequence[Copy]) -> dict[str, str]:
    """Return the options of ReplaceBroker. Only in a group of two does the old master get the new one's place."""
    swap = {"swap": "true"} if kept is not master and len(copies) == 2 else {}
    return {
        "role": str(int(master.role)),
        "hostname": kept.hostname,
        "ip": kept.ip,
        "servePort": str(kept.serve_port),
        "syncPort": str(kept.sync_port),
    } | swap


def _all_start(copies: Sequence[Copy], stopped: Sequence[Copy] = ()) -> tuple[str, ...]:
    def how(copy: Copy) -> str:
        if copy in stopped:
            return f"start {copy.label}"
        return {
            GONE: f"start {copy.label} with an empty data directory",
            RUNS: f"{copy.label} runs",
            SILENT: f"start {copy.label}",
            OTHER: f"start {copy.label} with the data directory that it had",
            ON_DISK: f"start {copy.label} with the disk that was inspected",
        }[copy.state]

    return tuple(map(how, copies))


def _offsets(kept: Copy, acknowledged: int) -> tuple[int, int] | None:
    return (kept.end or 0, acknowledged) if acknowledged > (kept.end or 0) else None


def _lost(kept: Copy, copies: Sequence[Copy]) -> tuple[Lost, ...]:
    """Return the messages that other reports have beyond the chosen copy; none if that copy has no report."""
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


def run(session: Session) -> Exit:
    """Show the copies and the plan, then run its command, which checks the change and asks for confirmation itself."""
    group = session.values["brokerGroup"]
    try:
        reports = [json.loads(Path(name).read_text()) for name in _list(session, "reports")]
        brokers = _ask(session, {"action": "ListBrokers", "brokerGroup": group, "details": "true"})
        status = _ask(session, {"action": "ReplicaStatus", "brokerGroup": group})
        (row,) = status
        copies = read_copies(brokers, row["replicas"], reports, _list(session, "gone"))
    except (WrongReport, OSError, ValueError, KeyError) as error:
        complain(f"{error}. Nothing was changed")
        return Exit.REFUSED
    except CallFailed as error:
        complain(f"{error}. Nothing was changed")
        return Exit.UNREACHABLE
    remembered = row.get("acknowledged", 0)  # absent in answers of older metaservers
    if remembered is None:
        complain(
            "the metaserver's database, which stores the acknowledged points, does not answer. Nothing was changed"
        )
        return Exit.UNREACHABLE
    decision = decide(copies, term=row["term"], min_copies=row["minCopies"], remembered=remembered)
    if session.as_json and session.dry_run:
        print(json.dumps({"copies": [asdict(copy) for copy in copies], "decision": asdict(decision)}))
    else:
        show(_shown(copies, decision), sys.stdout if session.dry_run else sys.stderr)
    return _carry_out(session, group, decision)


def _carry_out(session: Session, group: str, decision: Decision) -> Exit:
    if not decision.command or session.dry_run:
        return Exit.DONE
    accepts = session.values["acceptLoss"]
    if decision.needs_acceptance and not accepts:
        complain("nothing was changed: accept the loss with --acceptLoss")
        return Exit.REFUSED
    command = COMMANDS[decision.command]
    typed = {option.name: option.default or "" for option in command.options}
    loss = {"acceptLoss": accepts} if "acceptLoss" in typed else {}
    values = {**typed, "brokerGroup": group, **loss, **decision.words}
    return replace(session, command=command, values=values).run()


def _ask(session: Session, words: dict[str, str]) -> Any:
    """Return the metaserver's answer; raises CallFailed, or WrongReport if it refuses."""
    answer = post(session.metaserver, session.token, words, timeout_s=session.command.wait_s({}))
    if answer.exit is Exit.REFUSED:
        raise WrongReport(answer.message)
    if answer.exit is not Exit.DONE:
        raise CallFailed(answer.message, sent=False)
    return answer.data


def _list(session: Session, option: str) -> list[str]:
    return [name for name in session.values[option].split(",") if name]


def _shown(copies: Iterable[Copy], decision: Decision) -> Iterable[Block]:
    yield Table(
        (
            Column("PLACE", lambda row: row["role"].name),
            Column("BROKER", lambda row: f"{row['hostname']}:{row['serve_port']}"),
            Column("COPY", "state"),
            Column("LOG END", "end"),
            Column("ACKNOWLEDGED", "acknowledged"),
            Column("TROUBLES", "troubles", fold=12),
        ),
        [asdict(copy) for copy in copies],
    )
    yield good(f"{decision.keeps.label} is kept") if decision.keeps else warning("no copy remains")
    if decision.lost_offsets:
        yield bad("LOST: acknowledged at offsets [{}, {}) of the log".format(*decision.lost_offsets))
    for lost in decision.lost:
        ids = f": {', '.join(lost.ids)}" if lost.ids else ""
        yield bad(f"LOST: {lost.subject}, sequences {lost.first} to {lost.last}{ids}")
    for lost in decision.maybe_lost:
        yield bad(
            f"MAYBE LOST: {lost.subject}, sequences {lost.first} to {lost.last} ({lost.last - lost.first + 1:,}): only "
            f"{lost.only_at} has them, and confirmed them. If a disk lost fsynced frames, they were acknowledged"
        )
    yield from (f"{number}. {step}" for number, step in enumerate(decision.steps, 1))
