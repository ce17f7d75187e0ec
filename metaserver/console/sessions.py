"""Core. Sessions of the console: a signed cookie that names a token, and for each change a proof of the page.

    cookie   <identity>.<valid until, ms since 1970>.<16 random bytes>.<HMAC of all before>
    identity id of a token, or ~ and base64 of [name, role] for logins through an OpenID provider
    csrf     HMAC of the cookie, in every form that changes something
    login    <attempt at the provider>.<HMAC>, in a cookie of its own

The key derives from the installation's key, so every metaserver behind a balancer reads the cookie and none stores it.
The token's rights are looked up at each request: a revoked or expired token ends the session. A role from a provider
holds until the session ends, because no metaserver is notified of changes there. After a logout, this metaserver
rejects copies of the cookie; the others, and this one after a restart, accept it until it expires.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Protocol

from qmq.access import Token, token_text
from qmq.errors import AccessError
from qmq.metaserver.access import Access, RandomBytes
from qmq.rights import Caller, TokenRole

SESSION_MS = 12 * 3_600_000
"""A shift and its handover."""
COOKIE_CHARS_MAX = 500
SEALED_CHARS_MAX = 3_000
_PERSON = "~"
"""Prefix that no token's id has."""
_NONCE_BYTES = 16
ENDED_MAX = 10_000
"""Number of remembered logouts; beyond that, the session that expires first is forgotten."""


class Sessions:
    """Signer and checker of sessions. Made by main.

    Args:
        cluster_tokens: the installation's key; then the previous key while it is valid.
    """

    def __init__(self, access: Access, cluster_tokens: Iterable[Token], random_bytes: RandomBytes) -> None:
        self._access = access
        self._random_bytes = random_bytes
        self._ended: dict[str, int] = {}
        """Logged-out sessions by their random bytes: when they expire."""
        self._cluster_tokens = [token for token in cluster_tokens if token]

    @property
    def _keys(self) -> list[bytes]:
        return [_mac(token_text(token).encode(), "qmq console session").encode() for token in self._cluster_tokens]

    def begin(self, token: str, *, now_ms: int) -> str:
        """Log in with a token; return the cookie.

        Raises:
            AccessError: the token is not valid, or has no operator's role.
        """
        row = self._access.find(token, now_ms=now_ms)
        caller = self._access.caller_of(row.id, now_ms=now_ms)
        caller.require_role(TokenRole.VIEWER)
        return self._cookie(row.id, now_ms)

    def begin_without_token(self, caller: Caller, *, now_ms: int) -> str:
        """Log in a person from an OpenID provider; return the cookie."""
        caller.require_role(TokenRole.VIEWER)
        person = base64.urlsafe_b64encode(json.dumps([caller.name, caller.role], ensure_ascii=False).encode()).decode()
        return self._cookie(f"{_PERSON}{person}", now_ms)

    def _cookie(self, person: str, now_ms: int) -> str:
        text = f"{person}.{now_ms + SESSION_MS}.{self._random_bytes(_NONCE_BYTES).hex()}"
        return f"{text}.{_mac(self._keys[0], text)}"

    def end(self, cookie: str, *, now_ms: int) -> None:
        """End the session of a cookie that `caller` has accepted."""
        _, until_ms, nonce, _ = cookie.split(".")
        self._ended = {other: ms for other, ms in self._ended.items() if ms > now_ms}
        if len(self._ended) >= ENDED_MAX:
            del self._ended[min(self._ended, key=self._ended.__getitem__)]
        self._ended[nonce] = int(until_ms)

    def sealed(self, attempt: str) -> str:
        """Sign an attempt for the browser; the text has no dot."""
        return f"{attempt}.{_mac(self._keys[0], f'login {attempt}')}"

    def unsealed(self, cookie: str) -> str:
        """Return the text that was signed; raises AccessError."""
        attempt, _, signature = cookie[:SEALED_CHARS_MAX].rpartition(".")
        if not self._is_signed(f"login {attempt}", signature):
            raise AccessError("this login was not begun in this browser, or is over")
        return attempt

    def caller(self, cookie: str, *, now_ms: int, peer: str) -> Caller:
        """Return the caller of a cookie; raises AccessError."""
        text, _, signature = cookie[:COOKIE_CHARS_MAX].rpartition(".")
        if not self._is_signed(text, signature):
            raise AccessError("the session is not valid: log in again")
        try:
            identity, until_ms, nonce = text.split(".")
            has_ended = now_ms >= int(until_ms)
            person = _person(identity, peer) if identity.startswith(_PERSON) else None
        except (ValueError, TypeError):  # signed for another purpose, or by another version
            raise AccessError("the session is not valid: log in again") from None
        if has_ended:
            raise AccessError("the session has ended: log in again")
        if nonce in self._ended:
            raise AccessError("this session was logged out: log in again")
        if person is not None:
            return person
        caller = self._access.caller_of(identity, now_ms=now_ms, peer=peer)
        caller.require_role(TokenRole.VIEWER)
        return caller

    def csrf(self, cookie: str) -> str:
        """Return the proof that forms of this session must send."""
        return _mac(self._keys[0], f"form of {cookie}")

    def is_csrf(self, cookie: str, shown: str) -> bool:
        return self._is_signed(f"form of {cookie}", shown)

    def _is_signed(self, text: str, signature: str) -> bool:
        shown = signature.encode("utf-8", "replace")
        return any(hmac.compare_digest(_mac(key, text).encode(), shown) for key in self._keys)


def _person(identity: str, peer: str) -> Caller:
    """Return the caller of a provider's login; raises ValueError, TypeError."""
    name, role = json.loads(base64.urlsafe_b64decode(identity.removeprefix(_PERSON)))
    return Caller(name, TokenRole(role), peer=peer)


def _mac(key: bytes, text: str) -> str:
    return hmac.new(key, text.encode("utf-8", "replace"), hashlib.sha256).hexdigest()


ATTEMPT_MS = 600_000


@dataclass(frozen=True, slots=True)
class Attempt:
    """A login in progress; the browser keeps it, signed."""

    state: str
    nonce: str
    verifier: str
    to: str
    """Page to show after the login."""
    until_ms: int

    def text(self) -> str:
        return base64.urlsafe_b64encode(json.dumps(asdict(self)).encode()).decode()

    @staticmethod
    def of(text: str) -> Attempt:
        """Parse the result of `text`; its signature was checked before."""
        return Attempt(**json.loads(base64.urlsafe_b64decode(text)))


class ProviderPort(Protocol):
    """`metaserver.console.oidc.Provider`; its library is installed only where it is used."""

    async def begin(self, to: str, *, now_ms: int) -> tuple[str, Attempt]: ...

    async def finish(self, query: Mapping[str, str], attempt: Attempt, *, now_ms: int) -> Caller: ...
