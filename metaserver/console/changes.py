"""Shell. Changes through the console: a form, the plan that it would be, and the change once that was confirmed.

Plan and change are the operator's action itself, with `dryRun` and without, as the tools ask for it: the same reasons
against it, the same rights, the same row in the audit trail.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qmq.differences import differences
from qmq.metaserver.actions import ACTIONS, Action, Answer, Kind
from qmq.metaserver.actions.action import DETAILS, DRY_RUN, IF_PLAN
from qmq.metaserver.console.asking import Asking

NOT_HERE = frozenset({"AddToken", "AdoptDatabase"})
"""A token's text would stand on a page; a database that lost groups is decided about where its commands are typed."""


def offered(name: str) -> Action | None:
    """The change of this name, if the console makes it: it has no secret to type and no document to load."""
    action = ACTIONS.get(name)
    if action is None or not action.changes or name in NOT_HERE:
        return None
    return None if any(one.secret or one.kind is Kind.JSON for one in action.parameters) else action


def words_of(action: Action, given: Mapping[str, str]) -> dict[str, str]:
    """What a form says of the action's parameters; an empty field says nothing."""
    names = {one.name for one in action.parameters}
    return {name: text.strip() for name, text in given.items() if name in names and text.strip()}


async def plan(asking: Asking, action: Action, words: Mapping[str, str]) -> dict[str, Any]:
    """Ask what the change would do."""
    answer = await asking.ask(action.name, {**words, DRY_RUN: "true"})
    shown = answer.data if isinstance(answer.data, dict) and DRY_RUN in answer.data else None
    changed = differences(shown["before"], shown["after"]) if shown else []
    return {"answer": answer, "plan": shown, "differences": changed}


async def carry_out(asking: Asking, action: Action, words: Mapping[str, str], shown: str) -> Answer:
    """Make the change, unless it is another one by now than the plan that was `shown`."""
    has_details = action.parameter(DETAILS) is not None
    return await asking.ask(action.name, {**words, IF_PLAN: shown, **({DETAILS: "true"} if has_details else {})})
