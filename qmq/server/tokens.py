"""Core. Tokens of others that this broker has seen: what the metaserver said of each, and for how long that holds.

An answer is used without asking again for as long as the metaserver said. After that it is asked again; while it
cannot be, the old answer goes on, so that an outage of the metaserver stops nobody, until the token expires.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass

from qmq.errors import InvalidRequest
from qmq.rations import NewSubjects, SentBytes
from qmq.remoting import commands
from qmq.remoting.commands import Command
from qmq.remoting.packet import Packet
from qmq.rights import CONSUME, PRODUCE, Caller, TokenRole

REFUSED_MS = 5000
"""A token that the metaserver did not know is not asked about again for so long."""
KNOWN_MAX = 10_000
SUBJECTS_MAX = 10_000
"""Per connection; more are checked anew."""

_WRITING = frozenset({Command.PRODUCE, Command.RECUR})
"""What is written with its message, and may bring a subject into being."""
_OF_PRODUCERS = frozenset({Command.CANCEL, Command.RESCHEDULE})
"""What delayed messages are told by those who may send them."""

CONTROL_ROLES: Mapping[str, frozenset[TokenRole]] = {
    "ReplicaStatus": frozenset({TokenRole.OPERATOR, TokenRole.BROKER}),
    "Rates": frozenset({TokenRole.OPERATOR}),
    "DescribeLog": frozenset({TokenRole.OPERATOR, TokenRole.BROKER}),
    "ReadLog": frozenset({TokenRole.OPERATOR, TokenRole.BROKER}),
    "ReadDerived": frozenset({TokenRole.OPERATOR}),
    "HoldLog": frozenset({TokenRole.OPERATOR}),
    "Consumers": frozenset({TokenRole.OPERATOR}),
    "DelayStats": frozenset({TokenRole.OPERATOR}),
    "ListDelayed": frozenset({TokenRole.OPERATOR}),
    "CancelDelayed": frozenset({TokenRole.CLUSTER}),
    "Quarantine": frozenset({TokenRole.CLUSTER}),
    "Browse": frozenset({TokenRole.OPERATOR, TokenRole.CLIENT}),
    "PrepareSwap": frozenset({TokenRole.CLUSTER}),
    "CancelSwap": frozenset({TokenRole.CLUSTER}),
    "PrepareFailover": frozenset({TokenRole.CLUSTER}),
    "ResetOffset": frozenset({TokenRole.CLUSTER}),
    "MarkGroups": frozenset({TokenRole.CLUSTER}),
}
"""Method of the control port -> roles of which a caller needs one. What changes something comes from a metaserver."""


@dataclass(frozen=True, slots=True)
class Known:
    """What is known about one token; `caller` None: the metaserver refused it, for `reason`."""

    caller: Caller | None
    fresh_until_ms: int
    expires_ms: int = 0
    """0: it does not expire."""
    reason: str = ""

    def is_expired(self, now_ms: int) -> bool:
        return bool(self.expires_ms) and now_ms >= self.expires_ms


class TokenCache:
    """Used on the loop. Times are of a clock that never goes back."""

    def __init__(self, own_token: str) -> None:
        self._own = own_token.encode()
        self._known: dict[str, Known] = {}

    def is_own(self, token: str) -> bool:
        """Whether it is the token that this broker has itself: the key of the installation."""
        return hmac.compare_digest(token.encode("utf-8", "surrogatepass"), self._own)

    def fresh(self, token: str, *, now_ms: int) -> Known | None:
        """What may be used without asking."""
        known = self._known.get(token)
        return known if known and now_ms < known.fresh_until_ms and not known.is_expired(now_ms) else None

    def fallback(self, token: str, *, now_ms: int) -> Caller | None:
        """What is used if nobody can be asked."""
        known = self._known.get(token)
        return known.caller if known and not known.is_expired(now_ms) else None

    def accepted(self, token: str, caller: Caller, *, valid_ms: int, expires_in_ms: int, now_ms: int) -> Known:
        expires_ms = now_ms + expires_in_ms if expires_in_ms else 0
        return self._learn(token, Known(caller, now_ms + valid_ms, expires_ms))

    def refused(self, token: str, reason: str, *, now_ms: int) -> Known:
        return self._learn(token, Known(None, now_ms + REFUSED_MS, reason=reason))

    def _learn(self, token: str, known: Known) -> Known:
        if token not in self._known and len(self._known) >= KNOWN_MAX:
            self._known = {text: kept for text, kept in self._known.items() if kept.caller is not None}
            if len(self._known) >= KNOWN_MAX:
                del self._known[next(iter(self._known))]  # the one that was learned first
        self._known[token] = known
        return known


class Limits:
    """What one connection of a client may do. Cheap: one look-up per batch, once a subject was seen."""

    def __init__(self, caller: Caller, ration: NewSubjects, sent: SentBytes | None = None) -> None:
        self._caller, self._ration, self._sent = caller, ration, sent
        self._produced: set[bytes] = set()

    def check(self, packet: Packet, known_subjects: Mapping[str, object], *, now_ms: int) -> None:
        """Raise MissingRight for a subject out of scope, Overloaded for one too many that is new, or too many bytes."""
        if packet.code in _WRITING:
            self._check_subject(_written_subject(packet), known_subjects, now_ms)
        elif packet.code == Command.SUBSCRIBE:
            subject = commands.decode_json(packet.body, subject=str)["subject"]
            self._caller.require_subject(CONSUME, subject)
        elif packet.code in _OF_PRODUCERS:
            self._caller.require_subject(PRODUCE, commands.decode_json(packet.body, subject=str)["subject"])
        if self._sent is not None and packet.code in _WRITING:
            self._sent.take(self._caller, len(packet.body), now_ms=now_ms)
        elif self._sent is not None and packet.code == Command.RESCHEDULE:
            self._sent.take(self._caller, 0, now_ms=now_ms)  # what it writes anew is counted when it is found

    def _check_subject(self, name: bytes, known_subjects: Mapping[str, object], now_ms: int) -> None:
        if name in self._produced:
            return
        try:
            subject = name.decode()
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"not a PRODUCE: {error}") from None
        self._caller.require_subject(PRODUCE, subject)
        if subject not in known_subjects and not self._ration.allow(self._caller, 1, now_ms=now_ms):
            raise self._ration.why_not(self._caller)
        if len(self._produced) >= SUBJECTS_MAX:
            self._produced.clear()
        self._produced.add(name)


def _written_subject(packet: Packet) -> bytes:
    if packet.code == Command.PRODUCE:
        return commands.produced_subject(packet.body)
    return str(commands.decode_json(packet.body, subject=str)["subject"]).encode()


def check_client(caller: Caller, group: str) -> None:
    """Raise MissingRight unless a client with this token may use the broker group."""
    caller.require_role(TokenRole.CLIENT)
    caller.require_group(group)


def check_broker(caller: Caller, group: str) -> None:
    """Raise MissingRight unless another broker of the group may hold this token."""
    caller.require_role(TokenRole.BROKER)
    caller.require_group(group)
