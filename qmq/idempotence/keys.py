"""Core. The key of a message, the contract of key stores, and the store in this process's memory.

A key is in one of three states:

    absent      not handled, and not being handled
    claimed     being handled, until a lease ends; the owner renews it
    handled     done

    claim:   absent -> claimed; claimed -> claimed, by another owner, once the lease ended
    renew:   claimed -> claimed, by its owner
    finish:  claimed -> handled, by its owner
    release: claimed -> absent, by its owner
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from enum import Enum
from hashlib import sha256
from typing import NamedTuple, Protocol

from qmq.client.received import ReceivedMessage
from qmq.errors import InvalidMessage, InvalidRequest
from qmq.message import text_of

KeyOf = Callable[[ReceivedMessage], str]
"""Function that returns the name of a message's work. A group handles messages of a subject with equal names once."""


class State(Enum):
    """Result of a claim."""

    CLAIMED = "claimed"
    BUSY = "busy"
    HANDLED = "handled"


class Claim(NamedTuple):
    """Answer to a claim. `left_s`: rest of another owner's lease."""

    state: State
    left_s: float = 0.0


class KeyStore(Protocol):
    """Store of keys. Every change is one atomic step, visible to all users of the store.

    Each claim has a new `owner`. The outcome of a call that raises is unknown.
    """

    async def claim(self, key: str, owner: str, lease_s: float) -> Claim:
        """Claim `key` for `owner`, unless it is handled or claimed."""

    async def renew(self, key: str, owner: str, lease_s: float) -> bool:
        """Renew the lease; return False if `owner` no longer has the key."""

    async def finish(self, key: str, owner: str) -> bool:
        """Mark the message as handled; return False if `owner` no longer has the key."""

    async def release(self, key: str, owner: str) -> None:
        """Remove the claim if it still belongs to `owner`."""


def message_key(message: ReceivedMessage, name_of: KeyOf | None) -> str:
    """Return `subject%group%id`, or the result of `name_of` in place of the id.

    A % in subject or group becomes %25, so that two different messages never share a key.

    Raises:
        InvalidRequest: the name is empty, or no value of a property. The text of another object, such as a
            coroutine, may contain its address, and other messages would count as handled.
    """
    given = message.id if name_of is None else name_of(message)
    try:
        name = text_of(given)  # as the property's text in the encoded message, for every client
    except InvalidMessage:
        raise InvalidRequest(
            f"the key of message {message.id} is a str, not {given!r:.100}; write str() around it"
        ) from None
    if not name:
        raise InvalidRequest(f"the key of message {message.id} is empty")
    return f"{message.subject.replace('%', '%25')}%{message.group.replace('%', '%25')}%{name}"


def key_digest(key: str) -> str:
    """Return 64 hexadecimal digits that stand for `key` in a database.

    Databases cut long texts, and many ignore case or trailing blanks, so two messages could share a key.
    """
    return sha256(key.encode()).hexdigest()


class MemoryKeys:
    """Keys of the messages last handled by this process; other processes do not share them.

    A claim needs no lease: it ends with its handler in this process. While a message is being handled, its second
    delivery requests redelivery after a lease.

    Args:
        keys_max: remembered messages; the oldest are forgotten first.
    """

    def __init__(self, *, keys_max: int = 100_000) -> None:
        if keys_max < 1:
            raise InvalidRequest(f"keys_max is 1 or more, not {keys_max}")
        self._keys_max = keys_max
        self._claimed: dict[str, str] = {}
        self._handled: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._handled)

    async def claim(self, key: str, owner: str, lease_s: float) -> Claim:
        if key in self._handled:
            return Claim(State.HANDLED)
        if key in self._claimed:
            return Claim(State.BUSY, lease_s)
        self._claimed[key] = owner
        return Claim(State.CLAIMED)

    async def renew(self, key: str, owner: str, lease_s: float) -> bool:
        return self._claimed.get(key) == owner

    async def finish(self, key: str, owner: str) -> bool:
        if self._claimed.get(key) != owner:
            return False
        del self._claimed[key]
        self._handled[key] = None
        if len(self._handled) > self._keys_max:
            self._handled.popitem(last=False)
        return True

    async def release(self, key: str, owner: str) -> None:
        if self._claimed.get(key) == owner:
            del self._claimed[key]
