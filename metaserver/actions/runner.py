"""Shell. Runs actions: checks arguments and rights, plans, shows or stores the plan, settles unknown outcomes."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Iterable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

from qmq.commands.action import DRY_RUN, IF_PLAN, Action, Status
from qmq.commands.catalog import ACTIONS
from qmq.errors import MissingRight, NotServed, OperatorError, OutcomeUnknown, QmqError
from qmq.metaserver.actions import (
    Answer,
    brokers,
    consumers,
    databases,
    definitions,
    delays,
    doctor,
    groups,
    installation,
    messages,
    routes,
)
from qmq.metaserver.actions.arguments import Arguments, read_arguments, recorded, unknown_word
from qmq.metaserver.actions.context import ActionContext, Handler, PartlyDone
from qmq.metaserver.actions.plan import Plan, one_text, preview
from qmq.metaserver.model import AuditRow
from qmq.metaserver.observability.metrics import Metrics
from qmq.metaserver.storage.changes import StaleDirectory, StaleTerm, StaleVersion
from qmq.metaserver.storage.database import DatabaseSetAside, deciding
from qmq.rights import CONSUME, PRODUCE, Caller

log = logging.getLogger("qmq.metaserver")

HANDLERS: Mapping[str, Handler] = {
    **brokers.HANDLERS,
    **routes.HANDLERS,
    **groups.HANDLERS,
    **consumers.HANDLERS,
    **messages.HANDLERS,
    **delays.HANDLERS,
    **databases.HANDLERS,
    **installation.HANDLERS,
    **definitions.HANDLERS,
    **doctor.HANDLERS,
}

TRIES_MAX = 5
"""Number of new plans after lost races."""
SETTLE_TRIES, SETTLE_PAUSE_S = 10, 0.5
"""Number of searches for a change of unknown outcome: a database that restarts is back within seconds."""
REQUEST = "request"
"""Recorded parameter with the number that identifies a row of the audit trail."""


class Actions:
    """All actions. Made by main; called from the loop, any number at once."""

    def __init__(self, context: ActionContext, metrics: Metrics, handlers: Mapping[str, Handler] = HANDLERS) -> None:
        self._context = context
        self._metrics = metrics
        self._handlers = handlers

    async def run(self, name: str, given: Mapping[str, str], caller: Caller) -> Answer:
        """Carry out an action. Refusals and failures are answers, not exceptions."""
        action = ACTIONS.get(name)
        if action is None:
            return Answer(Status.REFUSED, unknown_word("action", name, ACTIONS), code="UnknownAction")
        try:
            arguments = read_arguments(action, given)
            caller.require_role(action.role)
            with deciding() if action.decides_database else nullcontext():
                answer = await self._run(action, arguments, caller)
        except PartlyDone as error:
            answer = _failed(Status.UNKNOWN, error, data=error.data)
        except OutcomeUnknown as error:
            answer = _failed(Status.UNKNOWN, error)
        except NotServed as error:
            answer = _failed(Status.WAIT, error)
        except QmqError as error:
            answer = _failed(Status.REFUSED, error)
        self._note(action, answer, caller)
        return answer

    async def _run(self, action: Action, arguments: Arguments, caller: Caller) -> Answer:
        handler = self._handlers[action.name]
        if handler.look or handler.look_as:
            if action.installation:
                _require_everything(caller)
            with suppress(NotServed):  # with the latest changes of other metaservers, if the database answers
                await self._context.registry.mirror.catch_up()
            return Answer(Status.DONE, data=await self._look(handler, arguments, caller))
        if arguments.flag(DRY_RUN):
            plan = await self._plan(action, handler, arguments, caller)
            shown = preview(plan, await self._context.blast(plan))
            if plan.reasons:
                return Answer(Status.REFUSED, one_text(plan.reasons), shown, code=OperatorError.__name__)
            return Answer(Status.DONE, data=shown)
        return await self._change(action, handler, arguments, caller)

    async def _look(self, handler: Handler, arguments: Arguments, caller: Caller) -> Any:
        if handler.look_as:
            return await handler.look_as(self._context, arguments, caller)
        assert handler.look is not None, "an action looks or plans"
        return await handler.look(self._context, arguments)

    async def _change(self, action: Action, handler: Handler, arguments: Arguments, caller: Caller) -> Answer:
        for attempt in range(1, TRIES_MAX + 1):
            plan = await self._plan(action, handler, arguments, caller)
            if plan.reasons:
                details = dict(plan.details)
                data = details.pop("data", None)
                return Answer(Status.REFUSED, one_text(plan.reasons), data, details, OperatorError.__name__)
            if plan.changes and (shown := arguments[IF_PLAN]) and shown != plan.digest:
                raise OperatorError("the plan has changed since it was shown: read it again")
            audit = _audit(action, arguments, caller, plan)
            try:
                data = await self._carry_out(handler, arguments, plan, audit)
                break
            except (StaleTerm, StaleVersion, StaleDirectory):  # another change was first: decide again
                if attempt == TRIES_MAX or handler.carry_out:
                    raise
        if handler.afterwards:
            data = await handler.afterwards(self._context, arguments, plan)
        log.info("action done action=%s caller=%s peer=%s %s", action.name, caller.name, caller.peer, audit.parameters)
        return Answer(Status.DONE, data=data)

    async def _plan(self, action: Action, handler: Handler, arguments: Arguments, caller: Caller) -> Plan:
        with suppress(DatabaseSetAside) if action.decides_database else nullcontext():
            await self._context.registry.mirror.catch_up()
        assert handler.plan is not None, "an action looks or plans"
        _require_rights(caller, handler.needs(arguments) if handler.needs else ())
        plan = await handler.plan(self._context, arguments)
        if plan.whole_groups:
            plan = replace(plan, subjects=plan.subjects | self._context.registry.routes_of(plan.groups).keys())
        _require_scope(caller, plan)
        return plan

    async def _carry_out(self, handler: Handler, arguments: Arguments, plan: Plan, audit: AuditRow) -> Any:
        if handler.carry_out:
            return await handler.carry_out(self._context, arguments, plan, audit)
        if plan.changes:
            try:
                await self._context.registry.change(plan.changes, audit)
            except OutcomeUnknown as error:
                await self._settle(audit, error)
        return plan.data

    async def _settle(self, audit: AuditRow, error: OutcomeUnknown) -> None:
        """Look up the outcome of a change: it is stored exactly if its audit row is.

        Raises:
            OperatorError: it is not stored. OutcomeUnknown: the database does not answer.
        """
        request = str(audit.parameters[REQUEST])
        for _ in range(SETTLE_TRIES):
            try:
                await self._context.registry.mirror.catch_up()
                await self._context.database.write(lambda repository: repository.settle())
                rows = await self._context.database.read(lambda repository: repository.audit_trail(about=[request]))
            except (NotServed, OutcomeUnknown):
                await asyncio.sleep(SETTLE_PAUSE_S)
                continue
            if not rows:
                raise OperatorError("the database failed, and nothing was changed; repeat it") from error
            await self._context.registry.mirror.catch_up()
            return
        raise OutcomeUnknown(
            f"the change is stored as a whole or not at all ({error}). Once the database is back, AuditTrail with "
            f"request={request} shows it: the row is there exactly if the change is"
        ) from error

    def _note(self, action: Action, answer: Answer, caller: Caller) -> None:
        self._metrics.actions.labels(action.name, answer.status.name.lower()).inc()
        if not answer.done:
            log.warning(
                "action not done action=%s status=%s caller=%s peer=%s: %s",
                action.name,
                answer.status.name.lower(),
                caller.name,
                caller.peer,
                answer.message,
            )


def _failed(status: Status, error: QmqError, data: Any = None) -> Answer:
    return Answer(status, str(error), data, code=type(error).__name__)


def _audit(action: Action, arguments: Arguments, caller: Caller, plan: Plan) -> AuditRow:
    parameters = {**recorded(action, arguments), REQUEST: secrets.token_hex(8)}
    return AuditRow(caller.name, caller.peer, action.name, parameters, plan.before, plan.after, result="done")


def _require_scope(caller: Caller, plan: Plan) -> None:
    """Raise MissingRight unless the plan stays within the scope of the caller's token."""
    if plan.everything:
        _require_everything(caller)
    for group in plan.groups:
        caller.require_group(group)
    if caller.scope.subjects and plan.groups and not plan.subjects:
        raise MissingRight(f"token {caller.name!r} is limited to some subjects; this concerns whole broker groups")
    _require_rights(caller, plan.needs)
    for subject in plan.subjects if caller.scope.subjects and not plan.needs else ():
        if not any(caller.scope.may(right, subject) for right in (PRODUCE, CONSUME)):
            raise MissingRight(f"token {caller.name!r} may not change {subject!r}: it is limited to other subjects")


def _require_rights(caller: Caller, needs: Iterable[tuple[str, str]]) -> None:
    for right, subject in needs:
        caller.require_subject(right, subject)


def _require_everything(caller: Caller) -> None:
    if caller.scope.subjects or caller.scope.groups:
        raise MissingRight(f"token {caller.name!r} is limited to some subjects or groups; this concerns all")
