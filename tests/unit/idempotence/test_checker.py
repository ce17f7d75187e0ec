"""Shell. The filter that lets a message through once: no way of QMQ's checkers to lose messages is possible.

`deliver` acts as a consumer with a filter: returning acks the message, raising means redelivery.
"""

from __future__ import annotations

import asyncio

import pytest

from qmq.errors import DeadLetter, RetryLater
from qmq.idempotence import Claim, Idempotence, MemoryKeys
from qmq.idempotence.keys import State
from tests.unit.idempotence.stores import Handed, blocking_sql_stores

SHORT_S = 0.05


class Handler:
    """Records handled messages; raises each given error once."""

    def __init__(self, *errors: BaseException) -> None:
        self.handled: list[str] = []
        self._errors = list(errors)

    async def __call__(self, message):
        if self._errors:
            raise self._errors.pop(0)
        self.handled.append(message.id)


class FailingKeys:
    """A store with a given number of failing calls: before they take effect, or after ("answer_of_")."""

    def __init__(self, keys, **failures: int) -> None:
        self._keys = keys
        self._failures = failures

    def __getattr__(self, name):
        async def call(*arguments):
            self._fail(name)
            answer = await getattr(self._keys, name)(*arguments)
            self._fail(f"answer_of_{name}")
            return answer

        return call

    def _fail(self, name: str) -> None:
        if self._failures.get(name, 0) > 0:
            self._failures[name] -= 1
            raise ConnectionError(f"{name} failed")


async def deliver(check, message, handler):
    """Deliver a message once; return whether it would be acked."""
    try:
        await check(message, handler)
    except BaseException:
        return False
    return True


async def deliver_until_acked(check, message, handler):
    """Deliver a message until it is acked, with the requested delays."""
    async with asyncio.timeout(30):
        while True:
            try:
                await check(message, handler)
                return
            except RetryLater as later:
                await asyncio.sleep(min(later.delay_s, 0.2))
            except Exception:
                await asyncio.sleep(0)


async def test_redelivered_message_is_acked_unhandled(some_stores):
    async with some_stores() as (first_store, second_store):
        handler, message = Handler(), Handed("id-1")
        for keys in (first_store, second_store, first_store):
            assert await deliver(Idempotence(keys), message, handler)
        assert handler.handled == ["id-1"]


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(ValueError("bad"), id="exception"),
        pytest.param(RetryLater(0.0), id="retry at once, in the same process"),
        pytest.param(DeadLetter("broken"), id="dead letter, sent back later"),
        pytest.param(asyncio.CancelledError(), id="cancelled"),
        pytest.param(SystemExit(1), id="exit"),
    ],
)
async def test_failed_message_is_handled_again(some_stores, error):
    """QMQ: an Error keeps the key, and a local retry begins before the key is gone. Both lose the message."""

    async with some_stores() as (first_store, second_store):
        handler, message = Handler(error), Handed("id-1")
        with pytest.raises(type(error)):
            await Idempotence(first_store)(message, handler)
        assert handler.handled == []
        assert await deliver(Idempotence(second_store), message, handler), "the key was released before the failure"
        assert handler.handled == ["id-1"]


async def test_cancelled_message_is_handled_again(some_stores):
    async with some_stores() as (first_store, second_store):
        for turns in range(25):
            handler, message = Handler(), Handed(f"id-{turns}")
            task = asyncio.create_task(deliver(Idempotence(first_store, lease_s=0.2), message, handler))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            is_acked = not task.cancelled() and task.result()
            if not is_acked:
                await deliver_until_acked(Idempotence(second_store, lease_s=0.2), message, handler)
            assert handler.handled, f"lost: cancelled after {turns} turns of the loop"


async def test_second_consumer_retries_after_the_lease(some_stores):
    async with some_stores() as (first_store, second_store):
        began, may_end = asyncio.Event(), asyncio.Event()

        async def slow(message):
            began.set()
            await may_end.wait()

        handler, message = Handler(), Handed("id-1")
        first = asyncio.create_task(deliver(Idempotence(first_store, lease_s=60.0), message, slow))
        await began.wait()
        with pytest.raises(RetryLater) as later:
            await Idempotence(second_store, lease_s=60.0)(message, handler)
        assert 30.0 < later.value.delay_s <= 60.0
        may_end.set()
        assert await first
        assert await deliver(Idempotence(second_store), message, handler)
        assert handler.handled == [], "the first one did it"


async def test_lease_is_renewed_until_the_handler_ends(some_stores):
    tasks = asyncio.all_tasks()
    async with some_stores() as (first_store, second_store):
        watched, enough = Watched(first_store), asyncio.Event()
        watched.on_renewed = lambda: len(watched.renewals) == 3 and enough.set()

        async def slow(message):
            async with asyncio.timeout(30):
                await enough.wait()

        assert await deliver(Idempotence(watched, lease_s=4.5), Handed("id-1"), slow)
        assert len(watched.renewals) >= 3 and all(watched.renewals)
        assert await second_store.claim("order.paid%stock%id-1", "other", 4.5) == Claim(State.HANDLED)
        assert asyncio.all_tasks() == tasks


async def test_lost_claim_does_not_ack(some_stores):
    """It was suspended for longer than its lease; the other consumer's outcome is still unknown."""

    async with some_stores() as (first_store, second_store):
        watched, key = Watched(first_store), "order.paid%stock%id-1"

        async def expired_meanwhile(message):
            await first_store.release(key, watched.owner)
            assert await second_store.claim(key, "other", 60.0) == Claim(State.CLAIMED)

        with pytest.raises(RetryLater):
            await Idempotence(watched, lease_s=60.0)(Handed("id-1"), expired_meanwhile)


class Watched:
    """Records the owner of the last claim, and the answers to renewals."""

    def __init__(self, keys):
        self._keys = keys
        self.owner = ""
        self.renewals = []
        self.on_renewed = lambda: None

    async def claim(self, key, owner, lease_s):
        self.owner = owner
        return await self._keys.claim(key, owner, lease_s)

    async def renew(self, key, owner, lease_s):
        self.renewals.append(await self._keys.renew(key, owner, lease_s))
        self.on_renewed()
        return self.renewals[-1]

    def __getattr__(self, name):
        return getattr(self._keys, name)


@pytest.mark.parametrize("step", ["claim", "answer_of_claim", "renew", "finish", "answer_of_finish", "release"])
@pytest.mark.parametrize("error", [None, ValueError("bad")], ids=["handled", "handler fails"])
async def test_failing_store_loses_no_message(tmp_path, step, error):
    async with blocking_sql_stores(f"sqlite:///{tmp_path / 'keys.db'}") as (keys, _):
        handler, check = (
            Handler(*filter(None, [error])),
            Idempotence(FailingKeys(keys, **{step: 1}), lease_s=SHORT_S),
        )
        await deliver_until_acked(check, Handed("id-1"), handler)
        assert set(handler.handled) == {"id-1"}


async def test_handler_error_wins_over_release_error():
    with pytest.raises(ValueError, match="bad"):
        await Idempotence(FailingKeys(MemoryKeys(), release=1))(Handed("id-1"), Handler(ValueError("bad")))


async def test_failing_store_fails_the_message_by_default():
    handler = Handler()
    with pytest.raises(ConnectionError):
        await Idempotence(FailingKeys(MemoryKeys(), claim=1))(Handed("id-1"), handler)
    assert handler.handled == []
    assert await deliver(Idempotence(FailingKeys(MemoryKeys(), claim=1), handle_anyway=True), Handed("id-1"), handler)
    assert await deliver(Idempotence(FailingKeys(MemoryKeys(), finish=1), handle_anyway=True), Handed("id-2"), handler)
    assert handler.handled == ["id-1", "id-2"]
    failing = Handler(ValueError("bad"))
    assert not await deliver(
        Idempotence(FailingKeys(MemoryKeys(), claim=1), handle_anyway=True), Handed("id-3"), failing
    )


async def test_only_done_errors_keep_the_key():
    """QMQ's idempotent-for, without its retry-for that has no effect."""

    keys = MemoryKeys()
    check = Idempotence(keys, done_for=(LookupError,))
    handler = Handler(KeyError("gone"), ValueError("bad"))
    assert not await deliver(check, Handed("done"), handler)
    assert not await deliver(check, Handed("failed"), handler)
    assert await deliver(check, Handed("done"), handler)
    assert await deliver(check, Handed("failed"), handler)
    assert handler.handled == ["failed"]


@pytest.mark.parametrize("error", [RetryLater(0.0), DeadLetter("broken")], ids=["retry later", "dead letter"])
async def test_retry_request_never_counts_as_done(error):
    check, handler = Idempotence(MemoryKeys(), done_for=(Exception,)), Handler(error)
    assert not await deliver(check, Handed("id-1"), handler)
    assert await deliver(check, Handed("id-1"), handler)
    assert handler.handled == ["id-1"]


async def test_failing_key_fails_the_message():
    handler = Handler()
    assert not await deliver(Idempotence(MemoryKeys(), key=lambda message: message["no"]), Handed("id-1"), handler)
    assert handler.handled == []
