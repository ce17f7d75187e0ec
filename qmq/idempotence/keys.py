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
from qmq.errors import InvalidRequest
from qmq.plain import plain

KeyOf = Callable[[ReceivedMessage], str]
"""Names what a message is about: two messages of a subject with the same name are handled once by a group."""


class State(Enum):
    """What a claim found."""

    OURS = "ours"
    BUSY = "busy"
    HANDLED = "handled"


class Claim(NamedTuple):
    """Answer to a claim. `left_s`: if another one handles the message, how long its lease lasts."""

    state: State
    left_s: float = 0.0


class KeyStore(Protocol):
    """Where keys are kept. Every change is one atomic step, seen by all that use the store.

    `owner` is new with each claim. A call that raises may have been carried out or not.
    """

    async def claim(self, key: str, owner: str, lease_s: float) -> Claim:
        """Claim `key` for `owner`, if nobody has handled it and nobody does."""

    async def renew(self, key: str, owner: str, lease_s: float) -> bool:
        """Begin the lease anew; False if the key is not `owner`'s any more."""

    async def finish(self, key: str, owner: str) -> bool:
        """Note that the message is handled; False if the key is not `owner`'s any more."""

    async def release(self, key: str, owner: str) -> None:
        """Forget the claim, if it is `owner`'s still."""


def message_key(message: ReceivedMessage, name_of: KeyOf | None) -> str:
    """Return `subject%group%id`, or with what `name_of` says instead of the id.

    A % in subject or group is written as %25, so that two different messages never have the same key.

    Raises:
        InvalidRequest: the name is empty, or no text or whole number: the text of another object, such as a coroutine,
            may hold its address, and then other messages count as handled.
    """
    name = plain(message.id if name_of is None else name_of(message))
    if not isinstance(name, str | int):
        raise InvalidRequest(f"the key of message {message.id} is a str, not {name!r:.100}; write str() around it")
    if not name:
        raise InvalidRequest(f"the key of message {message.id} is empty")
    return f"{message.subject.replace('%', '%25')}%{message.group.replace('%', '%25')}%{name}"


def key_digest(key: str) -> str:
    """Return 64 hexadecimal digits that stand for `key` in a database, whatever its length.

    Databases cut long texts, and many take `Foo` for `foo` or ignore blanks at the end; two messages would then be one.
    """
    return sha256(key.encode()).hexdigest()


class MemoryKeys:
    """Keys of the messages that this process handled last; they end with it, and no other process sees them.

    A claim needs no lease here: it ends with the handler, as both live in this process. While one handles a message,
    whoever is given it a second time asks for it again after a lease.

    Args:
        keys_max: handled messages that are remembered; the oldest are forgotten first.
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
        return Claim(State.OURS)

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
