"""Shell. How an action is carried out: by looking, by a plan that is stored, or by orders to brokers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from qmq.errors import OutcomeUnknown
from qmq.metaserver.actions.desk import Desk
from qmq.metaserver.actions.plan import Plan
from qmq.metaserver.actions.words import Words
from qmq.metaserver.model import AuditRow
from qmq.rights import Caller

Look = Callable[[Desk, Words], Awaitable[Any]]
"""Answers a question."""
LookAs = Callable[[Desk, Words, Caller], Awaitable[Any]]
"""Answers a question whose answer depends on who asks."""
MakePlan = Callable[[Desk, Words], Awaitable[Plan]]
"""Decides a change on what the registry knows now."""
Needs = Callable[[Words], tuple[tuple[str, str], ...]]
"""Rights with their subjects, as in `Plan.needs`."""
CarryOut = Callable[[Desk, Words, Plan, AuditRow], Awaitable[Any]]
"""Makes a change that is more than one transaction; returns the answer's data."""
Afterwards = Callable[[Desk, Words, Plan], Awaitable[Any]]
"""Completes the answer's data once the change is stored."""


@dataclass(frozen=True, slots=True)
class Handler:
    """What stands behind an action: `look` or `look_as`, or `plan` with what follows it."""

    look: Look | None = None
    look_as: LookAs | None = None
    plan: MakePlan | None = None
    needs: Needs | None = None
    """Rights that the caller has to have before a plan is made, as that asks brokers for what is his alone."""
    carry_out: CarryOut | None = None
    """None: the plan's changes and their audit row are stored in one transaction."""
    afterwards: Afterwards | None = None


class PartlyDone(OutcomeUnknown):
    """Some brokers did it, others did not, or did not say. `data` tells which."""

    def __init__(self, text: str, data: Any) -> None:
        super().__init__(text)
        self.data = data
