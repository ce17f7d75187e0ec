"""Core. Operators' actions, and the answer that each returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from qmq.commands.action import Action, Kind, Parameter, Status, Style
from qmq.commands.catalog import ACTIONS

__all__ = ["ACTIONS", "Action", "Answer", "Kind", "Parameter", "Status", "Style"]


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer of an action."""

    status: Status
    message: str = ""
    data: Any = None
    """JSON values."""
    details: dict[str, Any] = field(default_factory=dict)
    """Shown beside `error` in a MAP answer."""
    code: str = ""
    """Class of the error, for programs."""

    @property
    def done(self) -> bool:
        return self.status == Status.DONE
