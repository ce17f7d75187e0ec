"""Shell. Finds what kind of `session` a producer got, without importing what the application does not use."""

from __future__ import annotations

import inspect
import sys
from contextlib import suppress
from functools import partial
from importlib import import_module

from qmq.errors import InvalidRequest
from qmq.outbox import dbapi
from qmq.outbox.unit import AsyncTransaction, Database, Transaction

_FINDERS = {"sqlalchemy": "qmq.outbox.sqlalchemy", "django": "qmq.outbox.django"}
"""A library that is not imported yet cannot have made the session."""


def find_database(outbox: object) -> Database:
    """Return the database that the argument `outbox` of a producer names.

    Raises:
        InvalidRequest: it names none.
    """
    if isinstance(outbox, str):
        if "django" not in sys.modules:
            raise InvalidRequest(f"outbox={outbox!r}: a text is the alias of a Django database; give an engine instead")
        connections = import_module("django.db").connections
        if outbox not in connections:
            raise InvalidRequest(f"outbox={outbox!r}: Django's DATABASES has {', '.join(connections)}")
        return find_database(connections[outbox])
    if inspect.isfunction(outbox) or inspect.ismethod(outbox) or isinstance(outbox, partial):
        return dbapi.Database(outbox)
    try:
        if isinstance(found := find(outbox), Database):
            return found
    except InvalidRequest:
        pass
    raise InvalidRequest(
        "outbox= takes what outlives a transaction: an engine, the alias of a Django database, a "
        "qmq.outbox.dbapi.Database, or a function that opens a DB-API connection"
    )


def prepare() -> None:
    """Begin to watch SQLAlchemy's sessions for what they write, if the application has any."""
    if "sqlalchemy" in sys.modules:
        with suppress(ImportError):  # a version without an outbox, or none that has sessions
            import_module(_FINDERS["sqlalchemy"])


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
