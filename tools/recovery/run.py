"""Shell. RecoverGroup: looks at every copy of a group, says which goes on and what is lost, and makes it the master."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from qmq.tools.answer import Exit
from qmq.tools.call import CallFailed, post
from qmq.tools.command import bad, good, warning
from qmq.tools.commands import COMMANDS
from qmq.tools.recovery.plan import Copy, Decision, WrongReport, decide, read_copies
from qmq.tools.session import Session
from qmq.tools.table import Block, Column, Table
from qmq.tools.terminal import complain, show


def run(session: Session) -> Exit:
    """Show the copies and the plan; change a role only by the command for that, with its own checks and questions."""
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
    remembered = row.get("acknowledged", 0)  # a metaserver of an older version does not say
    if remembered is None:
        complain(
            "the metaserver's database is away, and only that remembers what was acknowledged. Nothing was changed"
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
        complain("nothing was changed: what is lost has to be accepted, with --acceptLoss")
        return Exit.REFUSED
    command = COMMANDS[decision.command]
    typed = {option.name: option.default or "" for option in command.options}
    loss = {"acceptLoss": accepts} if "acceptLoss" in typed else {}
    values = {**typed, "brokerGroup": group, **loss, **decision.words}
    return replace(session, command=command, values=values).run()


def _ask(session: Session, words: dict[str, str]) -> Any:
    """Return what the metaserver answers; raises CallFailed, or WrongReport if it refuses."""
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
    yield good(f"{decision.keeps.who} goes on") if decision.keeps else warning("no copy goes on")
    if decision.lost_offsets:
        yield bad("LOST: acknowledged at offsets [{}, {}) of the log".format(*decision.lost_offsets))
    for lost in decision.lost:
        ids = f": {', '.join(lost.ids)}" if lost.ids else ""
        yield bad(f"LOST: {lost.subject}, sequences {lost.first} to {lost.last}{ids}")
    for lost in decision.maybe_lost:
        yield bad(
            f"MAYBE LOST: {lost.subject}, sequences {lost.first} to {lost.last} ({lost.last - lost.first + 1:,}): only "
            f"{lost.only_at} has them, and confirmed them. If a disk forgot what it had fsynced, they were acknowledged"
        )
    yield from (f"{number}. {step}" for number, step in enumerate(decision.steps, 1))
