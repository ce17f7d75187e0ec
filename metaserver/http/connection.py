"""Shell. A connection of the HTTP server: uvicorn's, but one that sends no whole head of a request is closed.

uvicorn bounds how many connections there are, and waits for ever for what a client sends first. So a thousand of them
that say nothing would keep everybody else out, without a token. What follows a head is bounded by the guard.
"""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 10.0
"""For a head to arrive, from the first byte on; and for that byte, on a new connection."""


class Connection(H11Protocol):
    """Made by uvicorn, one for each connection."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._expect_head()

    def connection_lost(self, error: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(error)

    def _expect_head(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._stop_waiting()
        elif self._late is None:
            self._late = self.loop.call_later(HEAD_S, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None
