"""Shell. OutboxStuck: lists rows of outboxes that are parked, or wait for too long."""

from __future__ import annotations

from qmq.tools.answer import Exit
from qmq.tools.outbox.looking import look
from qmq.tools.outbox.shown import stuck_blocks
from qmq.tools.session import Session


def run(session: Session) -> Exit:
    return look(session, "/outbox/stuck", stuck_blocks)
