"""Shell. The contract of all stores of keys, with two clients of one store: coroutine and blocking drivers."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest
import redis.asyncio

import qmq
from qmq.idempotence import Claim, MemoryKeys
from qmq.idempotence.keys import State
from qmq.idempotence.redis import RedisKeys
from tests.support.redis import RedisServer
from tests.unit.idempotence.stores import async_sql_stores, blocking_sql_stores

CLAIMED, HANDLED = Claim(State.CLAIMED), Claim(State.HANDLED)
LONG_S, SHORT_S = 3600.0, 0.05


async def claim_in_the_end(store, key, owner, lease_s=LONG_S):
    """Claim repeatedly until a lease has ended."""
    async with asyncio.timeout(30):
        while (claim := await store.claim(key, owner, lease_s)) != CLAIMED:
            assert claim.state is State.BUSY and claim.left_s <= LONG_S
            await asyncio.sleep(claim.left_s)


async def test_a_key_is_claimed_once_then_handled_for_ever(stores):
    async with stores() as (first, second):
        assert await first.claim("k", "a", LONG_S) == CLAIMED
        busy = await second.claim("k", "b", LONG_S)
        assert busy.state is State.BUSY and LONG_S - 60 < busy.left_s <= LONG_S
        assert await first.finish("k", "a")
        assert [await store.claim("k", "c", LONG_S) for store in (first, second)] == [HANDLED, HANDLED]


async def test_of_many_that_claim_at_once_one_gets_it(stores):
    async with stores() as (first, second):
        for key in "abcde":
            owners = [f"owner-{at}" for at in range(8)]
            claims = await asyncio.gather(
                *((first, second)[at % 2].claim(key, owner, LONG_S) for at, owner in enumerate(owners))
            )
            assert sorted(claim.state.value for claim in claims) == ["busy"] * 7 + ["claimed"]


async def test_a_released_key_is_free_at_once(stores):
    async with stores() as (first, second):
        await first.claim("k", "a", LONG_S)
        await first.release("k", "a")
        assert await second.claim("k", "b", LONG_S) == CLAIMED


async def test_only_its_owner_releases_renews_or_finishes_a_claim(stores):
    async with stores() as (first, second):
        await first.claim("k", "a", LONG_S)
        await second.release("k", "b")
        assert not await second.renew("k", "b", LONG_S)
        assert not await second.finish("k", "b")
        assert (await second.claim("k", "b", LONG_S)).state is State.BUSY
        assert await first.finish("k", "a")
        await first.release("k", "a")
        assert await second.claim("k", "b", LONG_S) == HANDLED, "what is handled cannot be released"


async def test_long_keys_differ_by_case_and_last_character(stores):
    """MySQL cuts values at the column's length with only a warning, and ignores case."""

    async with stores() as (first, second):
        for key in ("x" * 300 + "1", "x" * 300 + "2", "Foo", "foo", "foo ", "föö"):
            assert await first.claim(key, "a", LONG_S) == CLAIMED
            assert await first.finish(key, "a")


async def test_ended_claim_goes_to_the_next_owner(shared_stores):
    """A crash between claim and end does not lose the message."""

    async with shared_stores() as (first, second):
        await first.claim("k", "a", SHORT_S)
        await claim_in_the_end(second, "k", "b")
        assert not await first.renew("k", "a", LONG_S)
        assert not await first.finish("k", "a")
        await first.release("k", "a")
        assert await second.finish("k", "b")


async def test_ended_claim_goes_to_one_owner(shared_stores):
    async with shared_stores() as (first, second):
        await first.claim("k", "gone", 0.001)
        await asyncio.sleep(0.05)
        claims = await asyncio.gather(*((first, second)[at % 2].claim("k", f"owner-{at}", LONG_S) for at in range(8)))
        assert sorted(claim.state.value for claim in claims) == ["busy"] * 7 + ["claimed"]


async def test_a_renewed_lease_lasts(stores):
    async with stores() as (first, second):
        await first.claim("k", "a", 60.0)
        assert await first.renew("k", "a", LONG_S)
        assert (await second.claim("k", "b", LONG_S)).left_s > 60.0
        assert await first.finish("k", "a")


async def test_owner_may_finish_a_free_ended_claim(stores):
    async with stores() as (first, second):
        await first.claim("k", "a", 0.001)
        await asyncio.sleep(0.05)
        assert await first.finish("k", "a")
        assert await second.claim("k", "b", LONG_S) == HANDLED


async def test_release_ends_a_cancelled_claim(stores):
    async with stores() as (first, second):
        for turns in range(12):
            task = asyncio.create_task(first.claim("k", "a", LONG_S))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            await first.release("k", "a")
            assert await second.claim("k", "b", LONG_S) == CLAIMED, f"cancelled after {turns} turns of the loop"
            await second.release("k", "b")


async def test_forget_keeps_held_claims(sql_stores):
    async with sql_stores() as (first, second):
        await first.claim("handled", "a", LONG_S)
        await first.finish("handled", "a")
        await first.claim("held", "a", LONG_S)
        await first.claim("left", "a", 0.001)
        await asyncio.sleep(0.05)
        now = datetime.now(UTC)
        assert await second.forget(now - timedelta(hours=1)) == 0
        assert await second.forget(now + timedelta(hours=1)) == 2
        assert await second.claim("handled", "b", LONG_S) == CLAIMED
        assert (await second.claim("held", "b", LONG_S)).state is State.BUSY
        with pytest.raises(qmq.InvalidRequest, match="no time zone"):
            await second.forget(datetime(2030, 1, 1))


async def test_memory_forgets_the_oldest_handled_key():
    keys = MemoryKeys(keys_max=2)
    await keys.claim("held", "a", LONG_S)
    for key in "xyz":
        await keys.claim(key, key, LONG_S)
        await keys.finish(key, key)
    assert len(keys) == 2
    assert await keys.claim("z", "a", LONG_S) == HANDLED
    assert await keys.claim("x", "a", LONG_S) == CLAIMED
    assert (await keys.claim("held", "b", LONG_S)).state is State.BUSY


async def test_redis_keys_expire(redis_server: RedisServer):
    async with redis.asyncio.Redis.from_url(redis_server.url) as client:
        await client.flushall()
        keys = RedisKeys(client, keep_s=0.05)
        await keys.claim("k", "a", LONG_S)
        assert await keys.finish("k", "a")
        async with asyncio.timeout(30):
            while await client.exists("qmq:handled:k"):
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("make_stores", [async_sql_stores, blocking_sql_stores])
async def test_steps_survive_a_database_restart(database_server, make_stores):
    async with make_stores(database_server.create_database()) as (store, _):
        assert await store.claim("k", "a", LONG_S) == CLAIMED
        database_server.kill()
        database_server.start()
        assert await store.finish("k", "a")
        database_server.kill()
        database_server.start()
        assert await store.claim("l", "a", LONG_S) == CLAIMED
