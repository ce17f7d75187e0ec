"""Shell. Questions and orders of the metaserver to the active watchdogs, over their HTTP ports."""

from __future__ import annotations

import asyncio
import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlencode

from qmq.control_plane import DIRECT
from qmq.errors import NotServed, OperatorError, OutcomeUnknown, cause_of

ANSWER_S = 25.0
"""A watchdog gives a database 20 s."""
ANSWER_BYTES_MAX = 16 << 20
ASKED_AT_ONCE = 8
"""Threads of our own: a watchdog that stands still must not take those of others."""


class Watchdogs:
    """Created by main; called from the loop.

    Args:
        token: the key of the installation, with which a watchdog does what it is told.
    """

    def __init__(self, token: str) -> None:
        self._token = token
        self._threads = ThreadPoolExecutor(ASKED_AT_ONCE, "watchdogs")

    async def ask(self, address: str, path: str, words: Mapping[str, Any], *, changes: bool = False) -> Any:
        """Return what a watchdog answers, read from JSON.

        Raises:
            OperatorError: it refuses. NotServed: it did not answer; nothing was changed.
            OutcomeUnknown: as NotServed, of what `changes`; it may have done it.
        """
        query = urlencode({name: value for name, value in words.items() if value != ""})
        method = "POST" if changes else "GET"
        request = urllib.request.Request(
            f"http://{address}{path}?{query}", headers={"X-Api-Token": self._token}, method=method
        )
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, _read, request)
        except urllib.error.HTTPError as error:
            if error.code < 500:
                raise OperatorError(_problem(error)) from None
            lost = changes and error.code != 503
            raise (OutcomeUnknown if lost else NotServed)(f"the watchdog at {address}: {_problem(error)}") from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            lost = changes and not isinstance(getattr(error, "reason", None), ConnectionRefusedError)
            text = f"the watchdog at {address} does not answer: {cause_of(error)}"
            raise (OutcomeUnknown if lost else NotServed)(text) from None


def _read(request: urllib.request.Request) -> Any:
    with DIRECT.open(request, timeout=ANSWER_S) as answer:
        return json.loads(answer.read(ANSWER_BYTES_MAX))


def _problem(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.loads(error.read())["problem"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"it answered {error.code} {error.reason}"
