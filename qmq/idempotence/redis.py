"""Shell. Keys in Redis, through the package `redis`.

The value of a key is its owner, which expires with the lease, or "handled", which expires after `keep_s`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import redis.asyncio
from redis import Redis

from qmq.client.handler import finished
from qmq.errors import InvalidRequest
from qmq.idempotence.checker import in_thread
from qmq.idempotence.keys import Claim, State

HANDLED = "handled"

CLAIM = """
if redis.call("SET", KEYS[1], ARGV[1], "NX", "PX", ARGV[2]) then
    return {"", 0}
end
return {redis.call("GET", KEYS[1]), redis.call("PTTL", KEYS[1])}
"""
RENEW = """
if redis.call("GET", KEYS[1]) == ARGV[1] then
    return redis.call("PEXPIRE", KEYS[1], ARGV[2])
end
return 0
"""
# If the lease has ended and the key is free, the message still counts as handled.
FINISH = """
local owner = redis.call("GET", KEYS[1])
if owner == ARGV[1] or not owner then
    redis.call("SET", KEYS[1], ARGV[2], "PX", ARGV[3])
    return 1
end
return 0
"""
RELEASE = """
if redis.call("GET", KEYS[1]) == ARGV[1] then
    return redis.call("DEL", KEYS[1])
end
return 0
"""


class RedisKeys:
    """Keys in Redis, for `Idempotence`; each step is an atomic script.

    Redis may lose recent writes: by a crash between two syncs of its disk, a failover to a replica, or an eviction of
    keys. A redelivered message is then handled again; none is lost.

    Args:
        client: an asyncio client, or a blocking one; its calls then run in threads.
        keep_s: time for which handled messages are remembered; later redeliveries are handled again.
        prefix: prefix of all keys in Redis.
    """

    def __init__(
        self, client: redis.asyncio.Redis | Redis, *, keep_s: float = 7 * 86_400.0, prefix: str = "qmq:handled:"
    ) -> None:
        if not keep_s > 0:
            raise InvalidRequest(f"keys are kept for longer than 0 s, not {keep_s}")
        self._client = client
        self._keep_ms = _ms(keep_s)
        self._prefix = prefix

    async def claim(self, key: str, owner: str, lease_s: float) -> Claim:
        value, left_ms = await self._run(CLAIM, key, owner, _ms(lease_s))
        match value if isinstance(value, str) else value.decode():
            case "":
                return Claim(State.CLAIMED)
            case "handled":
                return Claim(State.HANDLED)
            case _:
                return Claim(State.BUSY, max(0, left_ms) / 1000)

    async def renew(self, key: str, owner: str, lease_s: float) -> bool:
        return bool(await self._run(RENEW, key, owner, _ms(lease_s)))

    async def finish(self, key: str, owner: str) -> bool:
        return bool(await self._run(FINISH, key, owner, HANDLED, self._keep_ms))

    async def release(self, key: str, owner: str) -> None:
        await self._run(RELEASE, key, owner)

    async def _run(self, script: str, key: str, *arguments: str | int) -> Any:
        client, name = self._client, self._prefix + key
        if isinstance(client, redis.asyncio.Redis):
            return await client.eval(script, 1, name, *map(str, arguments))
        evaluate = cast("Callable[..., Any]", client.eval)
        return await finished(await in_thread(lambda: evaluate(script, 1, name, *map(str, arguments))))


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))
