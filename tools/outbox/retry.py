"""Shell. OutboxRetry: lets parked rows be sent again, after it showed how many there are."""

from __future__ import annotations

import json
import sys

from tools.answer import Exit
from tools.outbox.ask import Unanswered, ask_watchdog
from tools.outbox.shown import problems_of, retried_blocks, stuck_blocks
from tools.session import Session
from tools.terminal import complain, confirm, show


def run(session: Session) -> Exit:
    database, ids = session.values["database"], session.values["ids"]
    try:
        if session.dry_run or not session.yes:
            before = ask_watchdog(session, "/outbox/stuck", database=database, older="999999999", limit="20")
            if session.as_json and session.dry_run:
                print(json.dumps(before, ensure_ascii=False))
            else:
                show(stuck_blocks(before), sys.stdout if session.dry_run else sys.stderr)
            if session.dry_run:
                return Exit.DONE
            if not confirm("Send them again?"):
                complain("not confirmed; nothing was changed")
                return Exit.REFUSED
        answer = ask_watchdog(session, "/outbox/retry", method="POST", database=database, ids=ids)
    except Unanswered as why:
        complain(f"{why}. It may have been done: OutboxStuck shows what is parked" if why.sent else str(why))
        return Exit.UNKNOWN if why.sent else why.exit
    if session.as_json:
        print(json.dumps(answer, ensure_ascii=False))
    else:
        show(retried_blocks(answer))
    return Exit.UNREACHABLE if problems_of(answer) else Exit.DONE
