"""Core. Who may talk to the metaserver: holders of a token, with the rights that its row names.

A token reads `qmq_<id>_<secret>`. The row is found by the id; of the secret only a salted hash is kept. One round of
BLAKE2 is enough for it: the secret is 256 random bits, which nobody guesses however fast he hashes.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Callable, Iterable, Mapping

from qmq.errors import AccessError, OperatorError
from qmq.metaserver.model import TokenRow
from qmq.rights import Caller, Scope, TokenRole, check_patterns
from qmq.subjects import check_name

SECRET_BYTES = 32
SALT_BYTES = 16
ID_BYTES = 6
VALID_OF_ONE_NAME_MAX = 2
"""The one in use and the one that comes after it."""
FIRST_ADMIN_ID = "first"
"""One row can have it: of several metaservers that start on an empty database, one makes the token."""
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
"""Method of the gRPC service -> roles of which a caller needs one. What is not here is refused to everybody."""

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
    """Make a token; return its row, and its text, which is shown once and kept nowhere.

    Args:
        known: all tokens there are.
        lifetime_ms: 0: it does not expire.

    Raises:
        OperatorError, InvalidName: which word is wrong, or that two valid tokens have this name already.
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
    """Make the first admin token, with the id that only one row can have; None if there ever was an admin's token."""
    if any(token.role == TokenRole.ADMIN for token in known):
        return None
    return new_token(
        FIRST_ADMIN_NAME, TokenRole.ADMIN, known=(), random_bytes=random_bytes, now_ms=now_ms, id=FIRST_ADMIN_ID
    )


class UnknownToken(AccessError):
    """No row has this token. Where the rows may have been lost, nobody can say whether it was valid."""


class Access:
    """Knows the valid tokens. Created by main; used on the loop; `replace` follows each change of the table."""

    def __init__(self, cluster_tokens: Iterable[str]) -> None:
        self._cluster_tokens = [token.encode() for token in cluster_tokens if token]
        self._tokens: Mapping[str, TokenRow] = {}

    @property
    def tokens(self) -> list[TokenRow]:
        return list(self._tokens.values())

    def replace(self, tokens: Iterable[TokenRow]) -> None:
        """Know these tokens, and no others."""
        self._tokens = {token.id: token for token in tokens}

    def check(self, text: str | bytes | None, *, now_ms: int, peer: str = "") -> Caller:
        """Say whose token this is; the time it takes tells nothing about how close a wrong one was.

        Args:
            now_ms: milliseconds since 1970.

        Raises:
            AccessError: it is missing, not valid, expired or revoked.
        """
        caller, _ = self.look_up(text, now_ms=now_ms, peer=peer)
        return caller

    def find(self, text: str, *, now_ms: int) -> TokenRow:
        """The row of a valid token. The key of the installation has none. Raises AccessError."""
        given = text.encode("utf-8", "replace")
        if self._is_key(given):
            raise AccessError("this is the key of the installation, which is for its processes and has no page")
        token = self._proven(given)
        if token is None:
            raise UnknownToken("the API token is not valid")
        return _valid(token, now_ms)

    def caller_of(self, id: str, *, now_ms: int, peer: str = "") -> Caller:
        """Whose token has this id, which somebody proved to have before; raises AccessError."""
        token = self._tokens.get(id)
        if token is None:
            raise UnknownToken("the API token is not valid any more")
        return _caller(_valid(token, now_ms), peer)

    def look_up(self, text: str | bytes | None, *, now_ms: int, peer: str = "") -> tuple[Caller, int]:
        """As `check`; and when the token expires, 0: never."""
        given = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text or b""
        if not given:
            raise AccessError("the API token is missing")
        if self._is_key(given):
            return Caller("cluster", TokenRole.CLUSTER, peer=peer), 0
        token = self._proven(given)
        if token is None:
            raise UnknownToken("the API token is not valid")
        return _caller(_valid(token, now_ms), peer), token.expires_ms

    def _is_key(self, given: bytes) -> bool:
        equal = [hmac.compare_digest(given, known) for known in self._cluster_tokens]  # all, whatever the first says
        return any(equal)

    def _proven(self, given: bytes) -> TokenRow | None:
        """The row that `given` is the token of. For an unknown id a hash is computed and compared as well."""
        parts = _TOKEN.fullmatch(given.decode("utf-8", "replace"))
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
