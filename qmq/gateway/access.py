"""Shell. Tokens of requests, checked at the metaserver. Brokers check them again at each connection.

Without this check each wrong token would open connections of its own, and one without the right to a subject would wait
for a route. Answers are kept for `VALID_S`, so a revoked token ends within that time. While the metaserver does not
answer, tokens that it accepted before are admitted, as brokers do.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import OrderedDict
from hashlib import sha256
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import Request

from qmq.access import TOKEN_CHARS_MAX
from qmq.control_plane import find_metaserver, first_answer, get, metaserver_urls
from qmq.errors import AccessError, MissingRight, NotServed, QmqError, cause_of
from qmq.logs import shielded

VALID_S = 10.0
ANSWER_S = 5.0
CHECKS_MAX = 16
"""Checks at the same time: a crowd with wrong tokens uses no more threads."""
KNOWN_MAX = 10_000
ANSWER_BYTES_MAX = 1 << 20
_Key = tuple[str, bytes]
"""Address at the metaserver, hash of the token."""

CLIENT = "/meta/routes"
"""Routes need the role client. Without a subject this address checks the token, and then refuses the request."""
VIEWER = "/api/v1/ListMetaservers"


class Access:
    """Checks of tokens. Made by main; used on its loop."""

    def __init__(self, metaserver: str, app: str = "gateway") -> None:
        self._metaservers = metaserver_urls(metaserver)
        self._app = app
        self._accepted: OrderedDict[_Key, float] = OrderedDict()
        """Until when, the one used before all others first."""
        self._refused: dict[_Key, tuple[float, QmqError]] = {}
        self._asked: dict[_Key, asyncio.Task[QmqError | None]] = {}
        self._checks = asyncio.Semaphore(CHECKS_MAX)

    async def check_subject(self, token: str, subject: str, *, produces: bool) -> None:
        """Return if a token may produce to, or consume from, a subject.

        Raises:
            MissingRight: it may not. AccessError, NotServed: see `check`.
        """
        words = {"app": self._app, "clientId": f"{self._app}-access", "subject": subject}
        await self.check(token, f"{CLIENT}?{urlencode(words | {'produces': str(produces).lower()})}")

    async def check(self, token: str, address: str = CLIENT) -> None:
        """Return if the metaserver accepts the token at an address of its own.

        Raises:
            AccessError: the token is missing, wrong, or lacks the role.
            NotServed: the metaserver does not answer, and never accepted the token.
        """
        if not token:
            raise AccessError("the API token is missing")
        if len(token) > TOKEN_CHARS_MAX or not token.isascii() or not token.isprintable():
            raise AccessError("this is no API token")
        key = address, sha256(token.encode()).digest()
        if time.monotonic() < self._accepted.get(key, 0.0):
            self._accepted.move_to_end(key)
            return
        until_s, error = self._refused.get(key, (0.0, None))
        if time.monotonic() >= until_s:
            if key not in self._asked:
                self._asked[key] = asyncio.create_task(self._ask(key, token))
            error = await shielded(self._asked[key])
        if error is not None:
            raise error

    async def _ask(self, key: _Key, token: str) -> QmqError | None:
        try:
            async with self._checks:
                error = await asyncio.to_thread(self._answer, key[0], token)
        finally:
            del self._asked[key]
        until_s = time.monotonic() + VALID_S
        if error is None or (isinstance(error, NotServed) and key in self._accepted):
            self._accepted[key] = until_s
            if len(self._accepted) > KNOWN_MAX:
                self._accepted.popitem(last=False)
            return None
        if not isinstance(error, NotServed):
            self._accepted.pop(key, None)
            if len(self._refused) >= KNOWN_MAX:
                self._refused.clear()
            self._refused[key] = until_s, error
        return error

    def _answer(self, address: str, token: str) -> QmqError | None:
        """Return the error of a token; None: it is accepted. Blocks."""

        def ask(url: str) -> QmqError | None:
            request = Request(f"{url}{address}", headers={"X-Api-Token": token})
            try:
                answer = get(request, timeout_s=ANSWER_S, bytes_max=ANSWER_BYTES_MAX)
            except HTTPError as error:
                with error:
                    return _refusal(error.code, error.read(2_000), address)
            return _missing_right(answer)

        try:
            return first_answer(self._metaservers, ask)
        except (OSError, ValueError, NotServed) as error:
            return NotServed(f"the token cannot be checked, no metaserver answers: {cause_of(error)}")

    async def trouble(self) -> str:
        """Return why no metaserver answers, or ""."""
        try:
            async with self._checks:
                await asyncio.to_thread(find_metaserver, self._metaservers, timeout_s=ANSWER_S)
        except (OSError, ValueError) as error:
            return f"no metaserver answers: {cause_of(error)}"
        return ""


def _missing_right(answer: bytes) -> MissingRight | None:
    """Return the error of a route that the metaserver refuses for the token's rights; other reasons may end."""
    try:
        routes = json.loads(answer)["routes"]
        return next(
            (MissingRight(route["refused"]) for route in routes if route["refusedCode"] == "MISSING_RIGHT"), None
        )
    except (KeyError, TypeError, ValueError):
        return None


def _refusal(status: int, text: bytes, address: str) -> QmqError | None:
    """Return the error that an answer of the metaserver stands for; None: it accepts the token.

    Raises:
        NotServed: another metaserver may answer.
    """
    try:
        reason = str(json.loads(text)["error"]["message"])
    except (KeyError, TypeError, ValueError):
        reason = f"status {status}"
    if status == 401:
        return AccessError(f"the token is rejected: {reason}")
    if status == 403:
        return MissingRight(f"the token is rejected: {reason}")
    if status == 400 and address == CLIENT:
        return None
    raise NotServed(reason)
