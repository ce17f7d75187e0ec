"""Core. A login that was begun at an OpenID provider, as the browser brings it back, and what is asked of one."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Protocol

from qmq.rights import Caller

ATTEMPT_MS = 600_000


@dataclass(frozen=True, slots=True)
class Attempt:
    """One login that was begun; it waits in the browser, signed."""

    state: str
    nonce: str
    verifier: str
    to: str
    """The page that was asked for."""
    until_ms: int

    def text(self) -> str:
        return base64.urlsafe_b64encode(json.dumps(asdict(self)).encode()).decode()

    @staticmethod
    def of(text: str) -> Attempt:
        """Read what `text` wrote; its signature was checked before."""
        return Attempt(**json.loads(base64.urlsafe_b64decode(text)))


class ProviderPort(Protocol):
    """`metaserver.console.oidc.Provider`, whose library is installed only where it is used."""

    async def begin(self, to: str, *, now_ms: int) -> tuple[str, Attempt]: ...

    async def finish(self, query: Mapping[str, str], attempt: Attempt, *, now_ms: int) -> Caller: ...
