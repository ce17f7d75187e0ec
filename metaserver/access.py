"""Core. Who may talk to the metaserver: holders of one of the API tokens."""

from __future__ import annotations

import hmac
from collections.abc import Iterable

from qmq.errors import AccessError


class Tokens:
    """The valid API tokens. Created by main from the settings."""

    def __init__(self, tokens: Iterable[str]) -> None:
        self._tokens = [token.encode() for token in tokens]

    def check(self, token: str | bytes | None) -> None:
        """Raise AccessError unless `token` is one of ours; the time it takes says nothing about how close it was."""
        given = token.encode("utf-8", "surrogatepass") if isinstance(token, str) else token or b""
        valid = [hmac.compare_digest(given, known) for known in self._tokens]
        if not any(valid):
            problem = "is not valid" if given else "is missing"
            raise AccessError(f"the API token {problem}; use one of those in the metaserver's setting `tokens`")
