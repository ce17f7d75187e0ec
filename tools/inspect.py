"""Shell. `qmq inspect DIR`: contents of the data directory of a stopped broker or delay server.

It only reads, so it is safe on any directory: a rescued disk, a backup, a readonly mount.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from qmq.errors import DiskFailed
from qmq.log.overlay_disk import OverlayDisk
from qmq.replication.copy_report import NoCopy, report
from qmq.tools.call import Exit
from qmq.tools.table import Block, Column, Table, plain, utc

_SUBJECTS_SHOWN = 20


class _InUse(Exception):
    """A process uses this data directory."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a report. Exit status: 0, or 1 without a report, 2 for wrong usage."""
    options = _parser().parse_args(arguments)
    logging.disable(logging.CRITICAL)  # The report repeats what recovery logs.
    try:
        facts = inspect(options.directory, verify=options.verify, above=options.above)
    except (NoCopy, _InUse, DiskFailed, OSError) as error:
        print(f"qmq inspect: {options.directory}: {error}", file=sys.stderr)
        return Exit.REFUSED
    finally:
        logging.disable(logging.NOTSET)
    print(json.dumps(facts, indent=1) if options.json else plain(_shown(facts, options.subjects)))
    return Exit.DONE


def inspect(directory: Path, *, verify: bool = False, above: int | None = None) -> dict[str, Any]:
    """Return the report of a data directory (`qmq.replication.copy_report`) that no process uses."""
    if not directory.is_dir():
        raise NoCopy("there is no such directory" if not directory.exists() else "this is no directory")
    with _unused(directory):
        return {"directory": str(directory.absolute())} | report(OverlayDisk(directory), verify=verify, above=above)


@contextmanager
def _unused(directory: Path) -> Iterator[None]:
    """Lock the directory: a log written meanwhile would look damaged."""
    try:
        file = open(directory / "lock", "rb")
    except FileNotFoundError:
        yield
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _InUse(
                "a process runs on it. Use ReplicaStatus for a running broker, or stop the process first"
            ) from None
        yield


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="qmq inspect",
        description="Show the contents of a stopped broker's or delay server's data directory; never writes.",
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="the setting data of that broker")
    parser.add_argument("--json", action="store_true", help="print JSON, which RecoverGroup --reports reads")
    parser.add_argument("--verify", action="store_true", help="read all segments, as a start does the newest ones")
    parser.add_argument(
        "--subjects", type=int, default=_SUBJECTS_SHOWN, metavar="N", help="how many subjects are shown (default: 20)"
    )
    parser.add_argument(
        "--above", type=int, metavar="OFFSET", help="also name the messages from this offset of the log on, by id"
    )
    return parser


def _shown(facts: Mapping[str, Any], subjects_max: int) -> Iterator[Block]:
    yield from (f"{name:14}{text}" for name, text in _lines(facts))
    yield Table(
        (
            Column("EPOCH", lambda row: f"{row['term']}.{row['boot']}"),
            Column("FROM", "offset"),
            Column("MASTER'S INCARNATION", "incarnation"),
            Column("WHY", "why"),
        ),
        facts["epochs"],
        empty="no mastership",
        title=f"\nmasterships ({len(facts['epochs'])} of {facts['epochCount']})",
    )
    subjects = [{"subject": name, "last": next_ - 1} for name, next_ in facts["subjects"].items()]
    shown = subjects[: max(subjects_max, 0)]
    title = f"\nsubjects ({len(shown)} of {len(subjects)}), with the sequence of the last message"
    yield Table((Column("SUBJECT", "subject"), Column("LAST", "last")), shown, title=title)
    if above := facts.get("above"):
        yield from _above(above)


def _lines(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    log, owner = facts["log"], f"{facts['hostname']}:{facts['servePort']}" if facts["hostname"] else "never had a part"
    yield "directory", facts["directory"]
    yield "broker", f"{owner}, {facts['role'] or 'no role'} of {facts['group'] or 'no group'}"
    yield "incarnation", facts["incarnation"] or "-"
    yield "newest epoch", f"{facts['term']}.{facts['boot']}"
    yield "log", f"[{log['begin']}, {log['end']}) in {log['segments']} segments, chain {log['chain']}"
    yield "last frame", f"{utc(log['lastFrameMs']) or '-'}, epoch {'.'.join(map(str, log['epoch']))}"
    yield "acknowledged", _acknowledged(facts)
    listed = facts["manifest"]
    agrees = "agrees with the files" if listed["agrees"] else "differs from the files"
    yield "manifest", agrees if listed["listed"] else "there is none"
    if log["tornBytes"]:
        yield "torn tail", f"{log['tornBytes']} bytes behind the end are no frames"
    for trouble in facts["troubles"]:
        yield trouble["name"], trouble["found"]
    if not facts["troubles"]:
        yield "troubles", "none"


def _acknowledged(facts: Mapping[str, Any]) -> str:
    own, high = facts["acknowledged"], facts["log"]["highWatermark"]
    remembered = f"up to {own['end']} in epoch {own['term']}.{own['boot']}" if own else "nothing is remembered"
    return f"{remembered}; its frames state {high}; it confirmed up to {facts['confirmedEnd']}"


def _above(above: Mapping[str, Any]) -> Iterator[Block]:
    rows = [{"subject": name, "first": first, "last": last} for name, (first, last) in above["subjects"].items()]
    columns = (Column("SUBJECT", "subject"), Column("FIRST", "first"), Column("LAST", "last"))
    yield Table(columns, rows, title=f"\nmessages from offset {above['offset']} on")
    ids = [{"subject": subject, "sequence": sequence, "id": id_} for subject, sequence, id_ in above["ids"]]
    yield Table((Column("SUBJECT", "subject"), Column("SEQUENCE", "sequence"), Column("ID", "id")), ids, title="\nids")
    if above["stopped"]:
        yield f"it cannot be read further: {above['stopped']}"


if __name__ == "__main__":
    sys.exit(main())
