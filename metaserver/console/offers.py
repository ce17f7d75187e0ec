"""Core. Changes that a page offers: those of the table of commands that concern its subject and apply now.

A new action of the table appears by itself. A rule below only hides an action while it would be refused, or do nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from qmq.metaserver.actions import ACTIONS, Action, Kind
from qmq.metaserver.model import COPIES_MAX
from qmq.replication.readonly import Reason

NOT_HERE = frozenset({"AddToken", "AdoptDatabase"})
"""AddToken would show a secret on a page; AdoptDatabase belongs to the command line, where its effects are
explained.
"""

DOCUMENTS = frozenset({"ImportDefinitions"})
"""Their document is short enough for a form."""

Row = Mapping[str, Any]
"""A broker group, as ListBrokerGroups shows it."""


def offered(name: str) -> Action | None:
    """Return the change of this name if the console offers it: no secret to type, no long document."""
    action = ACTIONS.get(name)
    if action is None or not action.changes or name in NOT_HERE:
        return None
    is_typed = any(
        parameter.secret or (parameter.kind is Kind.JSON and name not in DOCUMENTS) for parameter in action.parameters
    )
    return None if is_typed else action


def _is_up(row: Row, role: str) -> bool:
    return any(copy["up"] for copy in row["copies"] if copy["role"].endswith(role))


def _has_waiting_slave(row: Row) -> bool:
    return any(Reason.UNFILLED in copy.get("readonlyReasons", ()) for copy in row["copies"])


_OF_GROUP: dict[str, Callable[[Row], bool]] = {
    "MarkReadonlyBrokerGroup": lambda row: "*" not in row["readonlySubjects"],
    "UnMarkReadonlyBrokerGroup": lambda row: bool(row["readonlySubjects"]),
    "DrainGroup": lambda row: not row.get("draining"),
    "UndrainGroup": lambda row: bool(row.get("draining")),
    "SwapRoles": lambda row: _is_up(row, "MASTER") and _is_up(row, "SLAVE"),
    "Failover": lambda row: not _is_up(row, "MASTER") and _is_up(row, "SLAVE"),
    "AcknowledgeLoss": lambda row: bool(row["lostTerm"]),
    "AddBroker": lambda row: len(row["copies"]) < COPIES_MAX,
    "ReplaceBroker": lambda row: bool(row.get("halfSwapped")) or any(not copy["up"] for copy in row["copies"]),
    "SyncReplica": _has_waiting_slave,
    "CancelSync": lambda row: any(copy.get("lagBytes") for copy in row["copies"]) and not _has_waiting_slave(row),
    "SetGroupTag": lambda row: row["kind"] != "DELAY",
    "AdoptRoles": lambda row: not row["writable"] and not row["readonlySubjects"] and not row.get("draining"),
    "ClearQuarantine": lambda row: False,  # its parts are named by ListQuarantine first
}
_FILLED_IN = frozenset({"brokerGroup", "role", "hostname", "ip", "servePort", "syncPort", "host", "failover"})
"""Parameters that a form about a broker group may require."""
_GROUP_NAMES = frozenset({"group", "consumerGroup"})
_NOT_OF_SUBJECT = frozenset({"AddNewSubject", "CancelDelayed"})
"""They concern a new subject, and single delayed messages."""


def of_broker_group(row: Row) -> list[str]:
    """Return the changes of a broker group that apply now."""
    return [
        name
        for name, (has, required) in _parameters().items()
        if "brokerGroup" in has and required <= _FILLED_IN and (name not in _OF_GROUP or _OF_GROUP[name](row))
    ]


def of_consumer_group() -> list[str]:
    """Return the changes of one consumer group of a subject."""
    return [name for name, (has, _) in _parameters().items() if "subject" in has and has & _GROUP_NAMES]


def of_subject() -> list[str]:
    """Return the changes of one subject."""
    return [
        name
        for name, (has, required) in _parameters().items()
        if "subject" in required and not required & _GROUP_NAMES and name not in _NOT_OF_SUBJECT
    ]


def _parameters() -> dict[str, tuple[set[str], set[str]]]:
    """Return the changes that the console offers, with their parameters and the required ones."""
    actions = [action for name in ACTIONS if (action := offered(name)) is not None]
    return {
        action.name: (
            {parameter.name for parameter in action.parameters},
            {parameter.name for parameter in action.parameters if parameter.required},
        )
        for action in actions
    }
