"""Core. API tokens: how they are made and checked, and the rights of their rows.

A token reads `qmq_<id>_<secret>`. Its row is found by the id and holds a salted hash of the secret. One round of BLAKE2
is enough: the secret is 256 random bits.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Callable, Iterable, Mapping

from qmq.access import Token, token_text
from qmq.errors import AccessError, NotServed, OperatorError
from qmq.metaserver.model import TokenRow
from qmq.rights import Caller, Scope, TokenRole, check_patterns
from qmq.subjects import check_name

SECRET_BYTES = 32
SALT_BYTES = 16
ID_BYTES = 6
VALID_OF_ONE_NAME_MAX = 2
"""The current token and its successor."""
FIRST_ADMIN_ID = "first"
"""Only one row can have this id: of several metaservers that start on an empty database, one makes the token."""
FIRST_ADMIN_NAME = "first-admin"

RPC_ROLES: Mapping[str, frozenset[TokenRole]] = {
    "Register": frozenset({TokenRole.BROKER}),
    "Heartbeat": frozenset({TokenRole.BROKER}),
    "BeginGroups": frozenset({TokenRole.BROKER}),
    "CheckToken": frozenset({TokenRole.BROKER}),
    "WatchRoutes": frozenset({TokenRole.CLIENT}),
    "CountOldRoutes": frozenset({TokenRole.CLUSTER}),
    "HoldLease": frozenset({TokenRole.CLUSTER}),
    "ListSources": frozenset({TokenRole.CLUSTER}),
}
"""Method of the gRPC service -> roles of which a caller needs one. Methods that are missing here are refused."""

_TOKEN = re.compile(r"qmq_([0-9a-z]{1,32})_([0-9a-f]{64})", re.ASCII)

RandomBytes = Callable[[int], bytes]


def is_valid(token: TokenRow, now_ms: int) -> bool:
    return not token.revoked_ms and (not token.expires_ms or now_ms < token.expires_ms)


def hash_of(secret: str, salt: str) -> str:
    """Hash a secret for its row; both are hexadecimal."""
    return hashlib.blake2b(bytes.fromhex(salt) + secret.encode()).hexdigest()


def new_token(
    name: str,
    role: str,
    *,
    known: Iterable[TokenRow],
    random_bytes: RandomBytes,
    now_ms: int,
    lifetime_ms: int = 0,
    subjects: Iterable[str] = (),
    groups: Iterable[str] = (),
    id: str = "",
) -> tuple[TokenRow, str]:
    """Make a token; return its row, and its text, which is shown once and not stored.

    Args:
        known: all tokens.
        lifetime_ms: 0: it does not expire.

    Raises:
        OperatorError, InvalidName: an argument is invalid, or two valid tokens have this name already.
    """
    check_name("name", name)
    if role == TokenRole.CLUSTER or role not in list(TokenRole):
        roles = ", ".join(known_role for known_role in TokenRole if known_role != TokenRole.CLUSTER)
        raise OperatorError(f"role {role[:50]!r} is none of {roles}")
    if lifetime_ms < 0:
        raise OperatorError("a token cannot have expired before it is made")
    check_patterns("subject", subjects := tuple(subjects), rights=True)
    check_patterns("broker group", groups := tuple(groups), rights=False)
    valid = [token for token in known if token.name == name and is_valid(token, now_ms)]
    if len(valid) >= VALID_OF_ONE_NAME_MAX:
        ids = " and ".join(token.id for token in valid)
        raise OperatorError(f"two tokens named {name} are valid already, {ids}; RevokeToken the older one first")
    secret, salt = random_bytes(SECRET_BYTES).hex(), random_bytes(SALT_BYTES).hex()
    row = TokenRow(
        id or random_bytes(ID_BYTES).hex(),
        name,
        str(role),
        salt,
        hash_of(secret, salt),
        subjects,
        groups,
        created_ms=now_ms,
        expires_ms=now_ms + lifetime_ms if lifetime_ms else 0,
    )
    return row, f"qmq_{row.id}_{secret}"


def first_admin(known: Iterable[TokenRow], *, random_bytes: RandomBytes, now_ms: int) -> tuple[TokenRow, str] | None:
    """Make the first admin token, with the id that only one row can have; None if an admin token ever existed."""
    if any(token.role == TokenRole.ADMIN for token in known):
        return None
    return new_token(
        FIRST_ADMIN_NAME, TokenRole.ADMIN, known=(), random_bytes=random_bytes, now_ms=now_ms, id=FIRST_ADMIN_ID
    )


class UnknownToken(AccessError):
    """No row has this token. Where rows may have been lost, it may still be valid."""


class Access:
    """Valid tokens. Created by main; used on the loop; `replace` follows each change of the table.

    Args:
        lost_because: returns the reason why the table may lack valid tokens, or "". Clients stop when their token is
            rejected, so an unknown token is then answered with NotServed.
    """

    def __init__(self, cluster_tokens: Iterable[Token], lost_because: Callable[[], str] = lambda: "") -> None:
        self._cluster_tokens = [token for token in cluster_tokens if token]
        self._lost_because = lost_because
        self._tokens: Mapping[str, TokenRow] = {}

    @property
    def tokens(self) -> list[TokenRow]:
        return list(self._tokens.values())

    def replace(self, tokens: Iterable[TokenRow]) -> None:
        """Replace all tokens by these."""
        self._tokens = {token.id: token for token in tokens}

    def check(self, text: str | bytes | None, *, now_ms: int, peer: str = "") -> Caller:
        """Return the holder of a token. Wrong tokens are rejected in constant time.

        Args:
            now_ms: milliseconds since 1970.

        Raises:
            AccessError: the token is missing, invalid, expired or revoked.
            NotServed: the token is unknown, and the table may lack it.
        """
        caller, _ = self.look_up(text, now_ms=now_ms, peer=peer)
        return caller

    def find(self, text: str, *, now_ms: int) -> TokenRow:
        """Return the row of a valid token; the installation's key has none. Raises AccessError."""
        token_bytes = text.encode("utf-8", "replace")
        if self._is_key(token_bytes):
            raise AccessError("this is the key of the installation, which is for its processes and has no page")
        token = self._proven(token_bytes)
        if token is None:
            raise UnknownToken("the API token is not valid")
        return _valid(token, now_ms)

    def caller_of(self, id: str, *, now_ms: int, peer: str = "") -> Caller:
        """Return the holder of the token with this id, which was checked before. Raises AccessError."""
        token = self._tokens.get(id)
        if token is None:
            raise UnknownToken("the API token is not valid any more")
        return _caller(_valid(token, now_ms), peer)

    def look_up(self, text: str | bytes | None, *, now_ms: int, peer: str = "") -> tuple[Caller, int]:
        """Return the holder as `check` does, and when the token expires; 0: never."""
        token_bytes = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text or b""
        if not token_bytes:
            raise AccessError("the API token is missing")
        if self._is_key(token_bytes):
            return Caller("cluster", TokenRole.CLUSTER, peer=peer), 0
        token = self._proven(token_bytes)
        if token is None and (lost := self._lost_because()):
            raise NotServed(lost)
        if token is None:
            raise UnknownToken("the API token is not valid")
        return _caller(_valid(token, now_ms), peer), token.expires_ms

    def _is_key(self, token_bytes: bytes) -> bool:
        equal = [
            hmac.compare_digest(token_bytes, token_text(known).encode()) for known in self._cluster_tokens
        ]  # no short cut: compare all of them
        return any(equal)

    def _proven(self, token_bytes: bytes) -> TokenRow | None:
        """Return the row of the token `token_bytes`. For an unknown id a hash is computed and compared as well."""
        parts = _TOKEN.fullmatch(token_bytes.decode("utf-8", "replace"))
        identity, secret = (parts[1], parts[2]) if parts else ("", "")
        token = self._tokens.get(identity)
        computed = hash_of(secret, token.salt if token else "")
        return token if hmac.compare_digest(computed, token.hash if token else "") else None


def _valid(token: TokenRow, now_ms: int) -> TokenRow:
    if token.revoked_ms:
        raise AccessError(f"the API token {token.id} ({token.name}) was revoked")
    if not is_valid(token, now_ms):
        raise AccessError(f"the API token {token.id} ({token.name}) has expired; AddToken makes another one")
    return token


def _caller(token: TokenRow, peer: str) -> Caller:
    return Caller(token.name, TokenRole(token.role), Scope(token.subjects, token.groups), peer)
