"""Core. What can go wrong with the database, by what to do next.

Errors of the driver while it reads, or before it commits, pass as SQLAlchemy's: nothing was changed.
"""

from __future__ import annotations

from qmq.errors import OperatorError, OutcomeUnknown


class DatabaseUnusable(Exception):
    """This database must not be used as it is. Its text says why, and what the operator should do."""


class CommitUnknown(OutcomeUnknown):
    """The connection broke while a change was committed: it is stored as a whole, or not at all. Read, then decide."""


class Withdrawn(OperatorError):
    """Whoever ordered this change has been told since that it may not be stored. It was not."""


class StaleTerm(OperatorError):
    """Somebody else changed the group since it was read. Nothing was changed now; look, then decide again."""

    def __init__(self, group: str) -> None:
        super().__init__(f"somebody else changed {group} at this moment; look at its brokers, then repeat")


class StaleVersion(OperatorError):
    """Somebody else changed the route since it was read. Nothing was changed now; look, then decide again."""

    def __init__(self, subject: str) -> None:
        super().__init__(f"somebody else changed the route of {subject} at this moment; look at it, then repeat")


class StaleDirectory(OperatorError):
    """Somebody else changed groups, marks or routes since they were read. Nothing was changed now; decide again."""

    def __init__(self) -> None:
        super().__init__("somebody else changed groups, marks or routes at this moment; look at them, then repeat")


class ValueRefused(OperatorError):
    """A value does not fit its column: too long, too large, or text that databases would alter. Nothing is cut."""


class UnknownGroup(OperatorError):
    """A route or a mark names a broker group that does not exist."""

    def __init__(self, group: str) -> None:
        super().__init__(f"there is no broker group {group}; ListBrokerGroups names them")


class GroupInUse(OperatorError):
    """A broker group that has brokers, or that routes name, cannot be removed."""


class AlreadyThere(OperatorError):
    """What should be added exists. Its text shows the row."""


class NotThere(OperatorError):
    """What should be changed or removed does not exist."""
