"""Shell. What OutboxStuck and OutboxReconcile have in common: ask the watchdog about rows, show what it says."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from qmq.tools.answer import Exit
from qmq.tools.outbox.ask import Unanswered, ask_watchdog
from qmq.tools.outbox.shown import problems_of
from qmq.tools.session import Session
from qmq.tools.terminal import complain, show


def look(session: Session, path: str, blocks: Callable[[Any], Iterable[Any]]) -> Exit:
    """Ask for the rows that the options mean; `blocks` makes of the answer what a terminal shows."""
    words = {name: session.values[name] for name in ("database", "older", "limit")}
    try:
        answer = ask_watchdog(session, path, **words)
    except Unanswered as why:
        complain(str(why))
        return why.exit
    if session.as_json:
        print(json.dumps(answer, ensure_ascii=False))
    else:
        show(blocks(answer))
    return Exit.UNREACHABLE if problems_of(answer) else Exit.DONE
