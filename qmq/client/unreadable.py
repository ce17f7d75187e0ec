"""Shell. Messages of a listener that it cannot decode for now: a codec, a key or a package is missing in this process.

They are neither acked nor failed: the cause is the deployment, not the message. They wait here, and then return to the
group as never begun, so no attempt counts and another consumer may get them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from qmq.client.received import ReceivedMessage

WAIT_S = 30.0
"""Time until such messages return to their group. Each return is a frame of the log."""


class Unreadable:
    """Unreadable messages of one listener, `waiting`. Used on its event loop."""

    def __init__(self) -> None:
        self.waiting: set[ReceivedMessage] = set()

    def others(self, messages: list[ReceivedMessage]) -> list[ReceivedMessage]:
        """Return the messages that do not wait here."""
        return [message for message in messages if message not in self.waiting]

    def put(self, messages: list[ReceivedMessage]) -> None:
        """Keep messages, and release them after `WAIT_S`."""
        self.waiting.update(messages)
        asyncio.get_running_loop().call_later(WAIT_S, self._release, messages)

    def release(self) -> None:
        """Release all messages now: the listener leaves its group."""
        self._release(list(self.waiting))

    def _release(self, messages: Iterable[ReceivedMessage]) -> None:
        for message in messages:
            if message in self.waiting:
                self.waiting.discard(message)
                if not message.is_dropped:
                    message._piece.acker.not_begun(message)
