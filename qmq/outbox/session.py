"""Shell. Finds out what a producer was given as `session`, without loading what the application does not use."""

from __future__ import annotations

import sys
from importlib import import_module

from qmq.errors import InvalidRequest
from qmq.outbox import dbapi
from qmq.outbox.unit import AsyncTransaction, Database, Transaction

_FINDERS = {"sqlalchemy": "qmq.outbox.sqlalchemy", "django": "qmq.outbox.django"}
"""Who has loaded neither cannot have a session of it."""


def find(session: object) -> Transaction | AsyncTransaction | Database:
    """Return the transaction or database that `session` stands for.

    Raises:
        InvalidRequest: nobody knows it.
    """
    if isinstance(session, dbapi.Transaction | dbapi.Database):
        return session
    for library, module in _FINDERS.items():
        if library in sys.modules and (found := import_module(module).find(session)) is not None:
            return found  # type: ignore[no-any-return]
    raise InvalidRequest(
        f"{type(session).__name__} is no session: give SQLAlchemy's, Django's connection, or a transaction of dbapi"
    )
