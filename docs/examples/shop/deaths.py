"""Shell. Kills this process at a chosen step of a transaction, which no button press could hit."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from enum import StrEnum
from typing import Any

from sqlalchemy import Engine, event


class Step(StrEnum):
    """Steps at which the process may be killed."""

    BEFORE_COMMIT = "before-commit"
    """The order and the message's row are written but not committed."""
    AFTER_COMMIT = "after-commit"
    """They are committed, and the message is not sent."""
    BEFORE_DELETE = "before-delete"
    """The brokers have stored the message, and its row still exists."""


class Deaths:
    """Hook on an engine that kills the process at the step `next`."""

    def __init__(self, engine: Engine) -> None:
        self.next: Step | None = None
        self._commit: Callable[[Any], None] = engine.dialect.do_commit
        engine.dialect.do_commit = self._do_commit  # type: ignore[assignment,method-assign]
        event.listen(engine, "before_cursor_execute", self._before_statement)

    def _do_commit(self, connection: Any) -> None:
        self._at(Step.BEFORE_COMMIT)
        self._commit(connection)
        self._at(Step.AFTER_COMMIT)

    def _before_statement(self, _connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith("DELETE FROM qmq_msg_queue"):
            self._at(Step.BEFORE_DELETE)

    def _at(self, step: Step) -> None:
        if self.next is step:
            os.kill(os.getpid(), signal.SIGKILL)
