"""Shell. OutboxReconcile: says of stuck rows which are in the log of a broker group."""

from __future__ import annotations

from qmq.tools.answer import Exit
from qmq.tools.outbox.looking import look
from qmq.tools.outbox.shown import reconciled_blocks
from qmq.tools.session import Session


def run(session: Session) -> Exit:
    return look(session, "/outbox/reconcile", reconciled_blocks)
