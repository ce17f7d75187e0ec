"""Shell. What waits in a listener for handlers that became slow goes back to its group.

What was prefetched for fast handlers would be minutes of work, once they are slow, that no other consumer of the group
gets. So while messages wait, somebody looks at how many were taken, a few times a second; and if what waits is far more
than would be asked for now, the newest go back, as never delivered.
"""

from __future__ import annotations

import asyncio

from qmq.client.prefetch import LOOK_S, Pacer, Prefetch
from qmq.client.subscription import Subscription


class Sharing:
    """Made by a listener for each of its subscriptions; used on its event loop. It ends by itself."""

    def __init__(self, subscription: Subscription, prefetch: Prefetch) -> None:
        self._subscription, self._prefetch, self._pacer = subscription, prefetch, Pacer()
        self._is_watching = False
        subscription.on_waiting = self._watch

    def _watch(self) -> None:
        """Messages wait; look at them until none does."""
        if not self._is_watching:
            self._look()

    def _look(self) -> None:
        subscription, loop = self._subscription, asyncio.get_running_loop()
        waiting = 0 if subscription.is_closing else subscription.waiting_messages
        self._is_watching = waiting > 0
        if not waiting:
            return
        loop.call_later(LOOK_S, self._look)
        arrived = subscription.arrived_messages
        if (pace := self._pacer.looked(loop.time(), arrived=arrived, taken=arrived - waiting)) is None:
            return
        self._prefetch.seen(pace)
        subscription.prefetch_messages = self._prefetch.messages
        if pace.is_too_slow_for(waiting):
            subscription.give_back_excess()
