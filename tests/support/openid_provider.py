"""Shell. A small OpenID provider as a process of its own, on loopback: discovery, keys, codes, PKCE, RS256 tokens.

    python -m tests.support.openid_provider PORT

It needs no password: `as=` in the authorization's address is the user, and each user name plants a fault.
"""

from __future__ import annotations

import asyncio
import base64
import secrets
import sys
import time
from urllib.parse import parse_qsl, urlencode

from authlib.oauth2.rfc7636 import create_s256_code_challenge
from authlib.oidc.discovery import OpenIDProviderMetadata
from joserfc import jwt
from joserfc.jwk import KeySet, RSAKey
from starlette.applications import Starlette
from starlette.responses import JSONResponse, RedirectResponse
from starlette.routing import Route

from qmq.http_port import HttpPort, listen

CLIENT, SECRET = "qmq console", "a secret of both"
GROUPS = {"anna": ["staff", "on-call"], "root": ["on-call", "qmq-admins"], "vera": "lookers", "nobody": ["staff"]}


class Provider:
    def __init__(self, issuer):
        self.issuer, self.codes = issuer, {}
        self.key = RSAKey.generate_key(2048, {"kid": "k1"})
        self.foreign = RSAKey.generate_key(2048, {"kid": "k1"})

    def app(self):
        answers = {"/.well-known/openid-configuration": self.metadata, "/keys": self.keys, "/authorize": self.authorize}
        routes = [Route(path, answer) for path, answer in answers.items()]
        return Starlette(routes=[*routes, Route("/token", self.token, methods=["POST"])])

    async def metadata(self, request):
        data = OpenIDProviderMetadata(
            issuer=self.issuer,
            authorization_endpoint=f"{self.issuer}/authorize",
            jwks_uri=f"{self.issuer}/keys",
            token_endpoint=f"{self.issuer}/token",
            response_types_supported=["code"],
            subject_types_supported=["public"],
            id_token_signing_alg_values_supported=["RS256"],
        )
        return JSONResponse(dict(data))

    async def keys(self, request):
        return JSONResponse(KeySet([self.key]).as_dict(private=False))

    async def authorize(self, request):
        query = request.query_params
        assert (query["response_type"], query["client_id"]) == ("code", CLIENT) and "openid" in query["scope"]
        assert query["code_challenge_method"] == "S256"
        back = {"state": query["state"]}
        if query.get("as") == "refuses":
            back |= {"error": "access_denied", "error_description": "they said no"}
        else:
            self.codes[code := secrets.token_urlsafe(16)] = query
            back["code"] = code
        return RedirectResponse(f"{query['redirect_uri']}?{urlencode(back)}")

    async def token(self, request):
        form = dict(parse_qsl((await request.body()).decode()))
        shown = base64.b64decode(request.headers["authorization"].removeprefix("Basic ")).decode()
        query = self.codes.pop(form["code"], None)
        if (
            query is None
            or shown != f"{CLIENT}:{SECRET}"
            or create_s256_code_challenge(form["code_verifier"]) != query["code_challenge"]
            or (form["grant_type"], form["redirect_uri"]) != ("authorization_code", query["redirect_uri"])
        ):
            return JSONResponse({"error": "invalid_grant"}, 400)
        return JSONResponse({"token_type": "Bearer", "access_token": "x", "id_token": self._id_token(query)})

    def _id_token(self, query):
        who, now = query.get("as", "anna"), int(time.time())
        claims = {
            "iss": self.issuer,
            "sub": f"sub-{who}",
            "aud": CLIENT,
            "iat": now,
            "exp": now + 300,
            "nonce": query["nonce"],
            "preferred_username": who,
            "groups": GROUPS.get(who, ["on-call"]),
        }
        faults = {
            "audience": {"aud": "another"},
            "expired": {"iat": now - 900, "exp": now - 600},
            "issuer": {"iss": "http://elsewhere"},
            "nonce": {"nonce": "of another login"},
        }
        key, header = self.foreign if who == "key" else self.key, {"alg": "RS256", "kid": "k1"}
        if who == "unsigned":
            return ".".join(map(_encoded, (b'{"alg":"none"}', str(claims).replace("'", '"').encode(), b"")))
        return jwt.encode(header, claims | faults.get(who, {}), key)


def _encoded(data):
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def main(port):
    listener = listen("127.0.0.1", port)
    asyncio.run(HttpPort(Provider(f"http://127.0.0.1:{port}").app(), listener).run())


if __name__ == "__main__":
    main(int(sys.argv[1]))
