"""Shell. Login with OpenID Connect: authorization code with PKCE; claims become a name and a role.

    browser ── /oidc/login ──> here ── state, nonce, challenge; the attempt in a signed cookie ──> provider
    provider ── code, state ──> /oidc/callback ── code, verifier ──> provider's token endpoint ── id token, checked

The token's signature is checked with the provider's keys, read anew for each login, and with these algorithms alone.
"""

from __future__ import annotations

import asyncio
import base64
import http.client
import json
import re
import secrets
import urllib.error
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from authlib.common.security import generate_token
from authlib.oauth2.rfc6749.parameters import prepare_grant_uri, prepare_token_request
from authlib.oauth2.rfc7636 import create_s256_code_challenge
from authlib.oidc.core import CodeIDToken
from authlib.oidc.discovery import OpenIDProviderMetadata, get_well_known_url
from joserfc import jwt
from joserfc.errors import JoseError
from joserfc.jwk import KeySet

from qmq.errors import AccessError, NotServed, cause_of
from qmq.metaserver.console.sessions import ATTEMPT_MS, Attempt
from qmq.rights import Caller, TokenRole

ALGORITHMS = ["RS256", "PS256", "ES256", "EdDSA"]
"""Signatures with the provider's keys; neither `none` nor a shared secret."""
ANSWER_S = 5.0
ANSWER_BYTES_MAX = 1 << 20
LEEWAY_S = 30
"""Difference allowed between two machines' clocks."""
NAME_CHARS_MAX = 60
PREFIX = "oidc:"
"""Prefix of names from a provider; names of tokens have no colon."""
_THREADS = ThreadPoolExecutor(4, "oidc")
"""A pool of its own: callers are not logged in yet, and a hanging provider must not block other threads."""
RANKS = (TokenRole.ADMIN, TokenRole.OPERATOR, TokenRole.VIEWER)


@dataclass(frozen=True, slots=True)
class ProviderSettings:
    """Settings of the provider: its address, our client there, and roles by claim.

    Args:
        roles: (role, value of the claim that grants it).
        roles_claim: claim with a person's groups or roles; dots lead into objects, or are part of its name.
    """

    issuer: str
    client_id: str
    client_secret: str
    redirect: str
    roles: tuple[tuple[TokenRole, str], ...]
    roles_claim: str
    name_claim: str


class Provider:
    """Client of one OpenID provider. Made by main; used on the loop."""

    def __init__(self, settings: ProviderSettings) -> None:
        self.settings = settings
        self._used: dict[str, int] = {}
        """States of finished logins, until they expire."""

    async def begin(self, to: str, *, now_ms: int) -> tuple[str, Attempt]:
        """Return the provider's address for the browser, and the attempt that must come back with it. Raises
        NotServed.
        """
        metadata = await self._metadata()
        attempt = Attempt(
            secrets.token_urlsafe(24), secrets.token_urlsafe(24), generate_token(64), to, now_ms + ATTEMPT_MS
        )
        settings = self.settings
        address = prepare_grant_uri(
            metadata["authorization_endpoint"],
            settings.client_id,
            "code",
            redirect_uri=settings.redirect,
            scope="openid profile email",
            state=attempt.state,
            nonce=attempt.nonce,
            code_challenge_method="S256",
            code_challenge=create_s256_code_challenge(attempt.verifier),
        )
        return str(address), attempt

    async def finish(self, query: Mapping[str, str], attempt: Attempt, *, now_ms: int) -> Caller:
        """Return the caller that the provider sent back.

        Raises:
            AccessError: the login is refused. NotServed: the provider does not answer as it should.
        """
        self._use(query["state"], attempt, now_ms)
        if query["error"]:
            raise AccessError(f"the provider refused: {query['error'][:100]} {query['error_description'][:200]}")
        metadata = await self._metadata()
        token = await self._exchange(metadata["token_endpoint"], query["code"], attempt.verifier)
        claims = await self._claims(metadata["jwks_uri"], token, attempt.nonce, now_ms)
        return Caller(name_of(claims, self.settings.name_claim), role_of(claims, self.settings))

    def _use(self, state: str, attempt: Attempt, now_ms: int) -> None:
        """Record the use of a state, which is valid once, in time, in the browser that began. Raises AccessError
        otherwise.
        """
        self._used = {state: until_ms for state, until_ms in self._used.items() if until_ms > now_ms}
        if not secrets.compare_digest(state.encode(), attempt.state.encode()):
            raise AccessError("this login was not begun in this browser")
        if now_ms >= attempt.until_ms:
            raise AccessError("this login took longer than ten minutes")
        if state in self._used:
            raise AccessError("this login was finished before")
        self._used[state] = attempt.until_ms

    async def _metadata(self) -> Any:
        metadata = OpenIDProviderMetadata(await _fetch(get_well_known_url(self.settings.issuer, external=True)))
        if metadata.get("issuer") != self.settings.issuer:
            raise NotServed(f"the provider's issuer is {str(metadata.get('issuer'))[:200]}, not {self.settings.issuer}")
        missing = [name for name in ("authorization_endpoint", "token_endpoint", "jwks_uri") if not metadata.get(name)]
        if missing:
            raise NotServed(f"the provider's metadata lack {missing[0]}")
        return metadata

    async def _exchange(self, address: str, code: str, verifier: str) -> str:
        settings = self.settings
        body = prepare_token_request(
            "authorization_code",
            code=code,
            redirect_uri=settings.redirect,
            code_verifier=verifier,
            client_id=settings.client_id,
        )
        headers = {"Content-Type": "application/x-www-form-urlencoded"}
        if settings.client_secret:
            both = f"{settings.client_id}:{settings.client_secret}".encode()
            headers["Authorization"] = f"Basic {base64.b64encode(both).decode()}"
        answer = await _fetch(urllib.request.Request(address, body.encode(), headers))
        if not isinstance(token := answer.get("id_token"), str):
            raise NotServed("the provider returned no id token")
        return token

    async def _claims(self, keys_at: str, token: str, nonce: str, now_ms: int) -> Mapping[str, Any]:
        settings = self.settings
        try:
            keys = KeySet.import_key_set(await _fetch(keys_at))
            decoded = jwt.decode(token, keys, algorithms=ALGORITHMS)
            claims = CodeIDToken(
                decoded.claims,
                decoded.header,
                options={
                    "iss": {"essential": True, "value": settings.issuer},
                    "aud": {"essential": True, "value": settings.client_id},
                },
                params={"nonce": nonce, "client_id": settings.client_id},
            )
            claims.validate(now=now_ms // 1000, leeway=LEEWAY_S)
        except JoseError as error:
            raise AccessError(f"the provider's token is invalid: {error}") from None
        except (ValueError, KeyError, TypeError) as error:
            raise AccessError(f"the provider's token cannot be read: {cause_of(error)}") from None
        return dict(claims)


def role_of(claims: Mapping[str, Any], settings: ProviderSettings) -> TokenRole:
    """Return the highest role among a person's claims; raises AccessError."""
    found = _claim(claims, settings.roles_claim)
    listed = found if isinstance(found, list) else [found]
    has = {value for value in listed if isinstance(value, str)}
    for role in RANKS:
        if any(granted == role and value in has for granted, value in settings.roles):
            return role
    raise AccessError(
        f"nothing in the claim {settings.roles_claim} has a role here; an admin of the provider can add one"
    )


def _claim(claims: object, path: str) -> Any:
    """Return a claim. A name with dots (`https://x.org/roles`) takes precedence over a path into objects."""
    if not isinstance(claims, Mapping):
        return None
    if path in claims:
        return claims[path]
    for dot in [at for at, character in enumerate(path) if character == "."]:
        if (found := _claim(claims.get(path[:dot]), path[dot + 1 :])) is not None:
            return found
    return None


def name_of(claims: Mapping[str, Any], claim: str) -> str:
    """Return the person's name for the audit trail."""
    text = claims.get(claim) or claims["sub"]
    return PREFIX + re.sub(r"[^\w.@+-]", "_", str(text))[:NAME_CHARS_MAX]


async def _fetch(request: str | urllib.request.Request) -> Any:
    """Read a JSON object; raises NotServed."""
    address = request if isinstance(request, str) else request.full_url
    try:
        answer = await asyncio.get_running_loop().run_in_executor(_THREADS, _read, request)
    except urllib.error.HTTPError as error:
        raise NotServed(f"the provider answered {error.code} at {address}") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise NotServed(f"the provider does not answer at {address}: {cause_of(error)}") from None
    if not isinstance(answer, dict):
        raise NotServed(f"the provider answered no object at {address}")
    return answer


def _read(request: str | urllib.request.Request) -> Any:
    with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
        return json.loads(answer.read(ANSWER_BYTES_MAX))
