"""Shell. OutboxReconcile: says of stuck rows which are in the log of a broker group."""

from __future__ import annotations

from tools.answer import Exit
from tools.outbox.looking import look
from tools.outbox.shown import reconciled_blocks
from tools.session import Session


def run(session: Session) -> Exit:
    return look(session, "/outbox/reconcile", reconciled_blocks)
