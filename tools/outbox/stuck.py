"""Shell. OutboxStuck: lists rows of outboxes that are parked, or wait for too long."""

from __future__ import annotations

import json

from tools.answer import Exit
from tools.outbox.ask import Unanswered, ask_watchdog
from tools.outbox.shown import problems_of, stuck_blocks
from tools.session import Session
from tools.terminal import complain, show


def run(session: Session) -> Exit:
    words = {name: session.values[name] for name in ("database", "older", "limit")}
    try:
        answer = ask_watchdog(session, "/outbox/stuck", **words)
    except Unanswered as why:
        complain(str(why))
        return why.exit
    if session.as_json:
        print(json.dumps(answer, ensure_ascii=False))
    else:
        show(stuck_blocks(answer))
    return Exit.UNREACHABLE if problems_of(answer) else Exit.DONE
