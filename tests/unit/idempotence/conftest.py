"""Shell. Stores of keys for tests: each kind, with a coroutine client and with a blocking one."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.redis import redis_server
from tests.unit.idempotence.stores import ALL, SHARED, SOME, SQL, Kind, Stores, kind_name, stores_of

__all__ = ["redis_server"]


def fixture_of(kinds: list[Kind]) -> Any:
    @pytest.fixture(params=kinds, ids=kind_name)
    def stores(request: pytest.FixtureRequest) -> Stores:
        return stores_of(request, *request.param)

    return stores


stores = fixture_of(ALL)
some_stores = fixture_of(SOME)
"""One of each family, for tests of their users."""
shared_stores = fixture_of(SHARED)
"""Stores shared by processes: a claim outlives its process until its lease ends."""
sql_stores = fixture_of(SQL)
"""Stores in a database."""
