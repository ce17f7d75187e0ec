"""Shell. OutboxRetry: lets parked rows be sent again, after it showed how many there are."""

from __future__ import annotations

import json
import sys

from qmq.tools.answer import Exit
from qmq.tools.outbox.ask import Unanswered, ask_watchdog
from qmq.tools.outbox.shown import problems_of, retried_blocks, stuck_blocks
from qmq.tools.session import Session
from qmq.tools.terminal import complain, confirm, show


def run(session: Session) -> Exit:
    try:
        if (ended := _plan(session)) is not None:
            return ended
    except Unanswered as why:
        complain(str(why))
        return why.exit
    return _retry(session)


def _plan(session: Session) -> Exit | None:
    """Show what is parked and ask; return how the command ends here, None if it goes on. Raises Unanswered."""
    if session.yes and not session.dry_run:
        return None
    parked = ask_watchdog(session, "/outbox/stuck", database=session.values["database"], older="999999999", limit="20")
    if session.as_json and session.dry_run:
        print(json.dumps(parked, ensure_ascii=False))
    else:
        show(stuck_blocks(parked), sys.stdout if session.dry_run else sys.stderr)
    if session.dry_run:
        return Exit.DONE
    if confirm("Send them again?"):
        return None
    complain("not confirmed; nothing was changed")
    return Exit.REFUSED


def _retry(session: Session) -> Exit:
    database, ids = session.values["database"], session.values["ids"]
    try:
        answer = ask_watchdog(session, "/outbox/retry", method="POST", database=database, ids=ids)
    except Unanswered as why:
        if why.sent:
            return _unknown(session, str(why))
        complain(str(why))
        return why.exit
    except KeyboardInterrupt:
        return _unknown(session, "interrupted")
    if session.as_json:
        print(json.dumps(answer, ensure_ascii=False))
    else:
        show(retried_blocks(answer))
    if problems := problems_of(answer):  # others are done; and of a database that was too slow, it is unknown
        return _unknown(session, "; ".join(problems))
    return Exit.DONE


def _unknown(session: Session, why: str) -> Exit:
    complain(f"{why}. It may have been done: what is parked still, tells\n  {session.look()}")
    return Exit.UNKNOWN
