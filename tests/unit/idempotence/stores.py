"""Shell. Every kind of store of keys, empty, opened twice as by two processes; and messages to handle."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import cache

import pytest
import redis
import redis.asyncio
from sqlalchemy import create_engine, make_url
from sqlalchemy.ext.asyncio import create_async_engine

from qmq.idempotence import KeyStore, MemoryKeys
from qmq.idempotence.redis import RedisKeys
from qmq.idempotence.sqlalchemy import SqlKeys
from qmq.idempotence.tables import CLAIMS, ClaimsTable
from tests.support.databases import DatabaseServer

COROUTINE_DRIVERS = {
    "sqlite": "sqlite+aiosqlite",
    "mariadb+pymysql": "mariadb+aiomysql",
    "postgresql+psycopg": "postgresql+psycopg",
}

Stores = Callable[[], AbstractAsyncContextManager[tuple[KeyStore, KeyStore]]]

Kind = tuple[str, bool]
"""A name, and whether its client blocks."""
SQL: list[Kind] = [(name, blocking) for name in ("sqlite", "mariadb", "postgresql") for blocking in (False, True)]
SHARED: list[Kind] = [*SQL, ("redis", False), ("redis", True)]
ALL: list[Kind] = [("memory", False), *SHARED]
SOME: list[Kind] = [("memory", False), ("sqlite", True), ("mariadb", False), ("redis", False)]


def kind_name(kind: Kind) -> str:
    return f"{kind[0]}{'-blocking' if kind[1] else ''}"


@dataclass
class Handed:
    """The part of a delivered message that filters use."""

    id: str
    subject: str = "order.paid"
    group: str = "stock"
    properties: dict[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> str:
        return self.properties[name]


def async_url(url: str) -> str:
    parts = make_url(url)
    return parts.set(drivername=COROUTINE_DRIVERS[parts.drivername]).render_as_string(hide_password=False)


@asynccontextmanager
async def memory_stores() -> AsyncIterator[tuple[KeyStore, KeyStore]]:
    keys = MemoryKeys()
    yield keys, keys


@asynccontextmanager
async def async_sql_stores(url: str) -> AsyncIterator[tuple[SqlKeys, SqlKeys]]:
    engines = [create_async_engine(async_url(url)) for _ in range(2)]
    try:
        first, second = (SqlKeys(engine) for engine in engines)
        await first.create_table()
        await second.create_table()
        yield first, second
    finally:
        for engine in engines:
            await engine.dispose()


@asynccontextmanager
async def blocking_sql_stores(url: str) -> AsyncIterator[tuple[SqlKeys, SqlKeys]]:
    engines = [create_engine(url) for _ in range(2)]
    try:
        first, second = (SqlKeys(engine) for engine in engines)
        await first.create_table()
        await second.create_table()
        yield first, second
    finally:
        for engine in engines:
            engine.dispose()


@asynccontextmanager
async def async_redis_stores(url: str) -> AsyncIterator[tuple[RedisKeys, RedisKeys]]:
    async with (
        redis.asyncio.Redis.from_url(url) as first,
        redis.asyncio.Redis.from_url(url, decode_responses=True) as second,
    ):
        yield RedisKeys(first), RedisKeys(second)


@asynccontextmanager
async def blocking_redis_stores(url: str) -> AsyncIterator[tuple[RedisKeys, RedisKeys]]:
    with redis.Redis.from_url(url) as first, redis.Redis.from_url(url, decode_responses=True) as second:
        yield RedisKeys(first), RedisKeys(second)


def stores_of(request: pytest.FixtureRequest, kind: str, blocking: bool) -> Stores:
    """Return a function that opens two clients of one store, within a running loop."""
    if kind == "memory":
        return memory_stores
    if kind == "redis":
        server = request.getfixturevalue("redis_server")
        with redis.Redis.from_url(server.url) as client:
            client.flushall()
        make = blocking_redis_stores if blocking else async_redis_stores
        return lambda: make(server.url)
    if kind == "sqlite":
        url = f"sqlite:///{request.getfixturevalue('tmp_path') / 'keys.db'}"
    else:
        url = _emptied_database(request.getfixturevalue(kind))
    return lambda: (blocking_sql_stores if blocking else async_sql_stores)(url)


def _emptied_database(server: DatabaseServer) -> str:
    """One database of each server serves all tests: creating one takes longer than a test."""
    url = _database(server)
    engine = create_engine(url)
    ClaimsTable(CLAIMS).table.drop(engine, checkfirst=True)
    engine.dispose()
    return url


@cache
def _database(server: DatabaseServer) -> str:
    return server.create_database()
