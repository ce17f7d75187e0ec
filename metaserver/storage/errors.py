"""Core. Errors of the database, by the caller's next step.

Errors of the driver during reads, or before a commit, pass as SQLAlchemy's: nothing was changed.
"""

from __future__ import annotations

from qmq.errors import OperatorError, OutcomeUnknown


class DatabaseUnusable(Exception):
    """This database must not be used as it is. The text holds the reason and the remedy."""


class CommitUnknown(OutcomeUnknown):
    """The connection broke during a commit: the change is stored as a whole or not at all. Read, then decide."""


class Withdrawn(OperatorError):
    """The change was withdrawn before its commit, and not stored."""


class StaleTerm(OperatorError):
    """The group changed since it was read. Nothing was stored; read, then decide again."""

    def __init__(self, group: str) -> None:
        super().__init__(f"another change of {group} came first; look at its brokers, then repeat")


class StaleVersion(OperatorError):
    """The route changed since it was read. Nothing was stored; read, then decide again."""

    def __init__(self, subject: str) -> None:
        super().__init__(f"another change of the route of {subject} came first; look at it, then repeat")


class StaleDirectory(OperatorError):
    """Groups, marks or routes changed since they were read. Nothing was stored; decide again."""

    def __init__(self) -> None:
        super().__init__("another change of groups, marks or routes came first; look at them, then repeat")


class ValueRefused(OperatorError):
    """A value does not fit its column: too long, too large, or text that databases would alter. It is never cut."""


class UnknownGroup(OperatorError):
    """A route or a mark names a broker group that does not exist."""

    def __init__(self, group: str) -> None:
        super().__init__(f"there is no broker group {group}; ListBrokerGroups names them")


class GroupInUse(OperatorError):
    """A broker group that has brokers, or that routes name, cannot be removed."""


class AlreadyThere(OperatorError):
    """The row to add exists. The text shows it."""


class NotThere(OperatorError):
    """The row to change or remove does not exist."""
