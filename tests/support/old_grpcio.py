"""Shell. Plugin of `make oldest`: a closed event loop is no failure of the next test.

Old grpcio has one poller for all loops of a process. It passes late events to the loop of an earlier test, which is
closed, and reports that on the loop of the present one. An application has one loop.
"""

from __future__ import annotations

import asyncio
from typing import Any

from anyio._backends._asyncio import TestRunner

_handle = TestRunner._exception_handler


def _handle_others(self: TestRunner, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    if "PollerCompletionQueue" not in context.get("message", ""):
        _handle(self, loop, context)


TestRunner._exception_handler = _handle_others  # type: ignore[method-assign]
