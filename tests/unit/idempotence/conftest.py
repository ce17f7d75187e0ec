"""Shell. Stores of keys for tests: each kind, with a coroutine client and with a blocking one."""

from __future__ import annotations

import pytest

from tests.support.redis import redis_server
from tests.unit.idempotence.stores import ALL, SHARED, SOME, SQL, Stores, kind_name, stores_of

__all__ = ["redis_server"]


@pytest.fixture(params=ALL, ids=kind_name)
def stores(request: pytest.FixtureRequest) -> Stores:
    """Every kind of store."""
    return stores_of(request, *request.param)


@pytest.fixture(params=SOME, ids=kind_name)
def some_stores(request: pytest.FixtureRequest) -> Stores:
    """One of each family, for tests of their users."""
    return stores_of(request, *request.param)


@pytest.fixture(params=SHARED, ids=kind_name)
def shared_stores(request: pytest.FixtureRequest) -> Stores:
    """Stores shared by processes: a claim outlives its process until its lease ends."""
    return stores_of(request, *request.param)


@pytest.fixture(params=SQL, ids=kind_name)
def sql_stores(request: pytest.FixtureRequest) -> Stores:
    """Stores in a database."""
    return stores_of(request, *request.param)
