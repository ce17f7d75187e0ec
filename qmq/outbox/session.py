"""Shell. Finds what kind of `session` a producer got, without importing what the application does not use."""

from __future__ import annotations

import sys
from importlib import import_module

from qmq.errors import InvalidRequest
from qmq.outbox import dbapi
from qmq.outbox.unit import AsyncTransaction, Database, Transaction

_FINDERS = {"sqlalchemy": "qmq.outbox.sqlalchemy", "django": "qmq.outbox.django"}
"""A library that is not imported yet cannot have made the session."""


def find(session: object) -> Transaction | AsyncTransaction | Database:
    """Return the transaction or database that `session` stands for.

    Raises:
        InvalidRequest: it is something else.
    """
    if isinstance(session, dbapi.Transaction | dbapi.Database):
        return session
    for library, module in _FINDERS.items():
        if library in sys.modules and (found := import_module(module).find(session)) is not None:
            return found  # type: ignore[no-any-return]
    got = f"{type(session).__module__}.{type(session).__qualname__}"
    if hasattr(session, "cursor") and hasattr(session, "commit"):
        raise InvalidRequest(f"{got} does not say when it commits: use qmq.outbox.dbapi.Database(…).transaction()")
    raise InvalidRequest(f"expected a SQLAlchemy session, a Django connection or a DB-API transaction, got {got}")
