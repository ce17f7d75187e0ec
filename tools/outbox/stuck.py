"""Shell. OutboxStuck: lists rows of outboxes that are parked, or wait for too long."""

from __future__ import annotations

from tools.answer import Exit
from tools.outbox.looking import look
from tools.outbox.shown import stuck_blocks
from tools.session import Session


def run(session: Session) -> Exit:
    return look(session, "/outbox/stuck", stuck_blocks)
