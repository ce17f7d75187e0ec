"""Shell. Retries that are due later than brokers keep them: a delay group keeps these, for this consumer group alone.

A copy of the message goes to the delay group, under the group's mailbox as its subject, and once it is stored there the
message is acked. Nobody waits for that but the message. The copy has the id and the content, and says how often the
message was delivered. If an answer is lost, both may come: at least once, as everything.
"""

from __future__ import annotations

from collections.abc import Callable

from qmq.client.batching import Done, Outcome, unstored
from qmq.client.queues import Waiting
from qmq.client.received import ReceivedMessage
from qmq.client.sender import Sender
from qmq.codec import delayed_copy
from qmq.errors import QmqError
from qmq.logs import bounded
from qmq.message import EXPIRES_AFTER, TIMES

log = bounded(__name__)

TIMEOUT_MS = 10_000
"""Until a delay group must have stored a copy; otherwise the broker keeps the message for as long as it does."""


class Deferring:
    """Made by a session, whose event loop it is used on; `stop` is its end.

    Args:
        make_sender: makes the way to the delay groups, when a message first needs it.
    """

    def __init__(self, make_sender: Callable[[], Sender]) -> None:
        self._make_sender = make_sender
        self._sender: Sender | None = None

    def defer(self, message: ReceivedMessage, mailbox: str, due_ms: int, done: Done) -> None:
        """Have a copy of a message come at `due_ms`; `done` gets the receipt of the copy."""
        if self._sender is None:
            self._sender = self._make_sender()
            self._sender.start()
        sender, id = self._sender, ""
        try:
            id = str(message.id)
            own = {TIMES: str(message.times + 1)}
            if (expires_ms := message.expires_ms) is not None:  # it does not begin anew when it is due
                own[EXPIRES_AFTER] = str(max(0, expires_ms - due_ms))
            data = delayed_copy(message._data, due_ms, own)
            sender.add(sender.queue(mailbox), Waiting(data, id, sender.now_ms() + TIMEOUT_MS, done))
        except QmqError as error:
            done(unstored(Outcome.REFUSED, id, mailbox, "", error))

    async def stop(self) -> None:
        if self._sender is not None:
            await self._sender.stop()
