"""Shell. Which listeners of a consumer let the messages of others go first.

A listener whose `priority` is lower begins no call while a message waits here for a listener of a higher one. Whoever
has no such listener pays a comparison for each call.
"""

from __future__ import annotations

from qmq.client.subscription import Subscription

PRIORITY_MAX = 9
"""Few classes: each is a subject of its own."""


class Precedence:
    """One for the listeners of a consumer; used on its event loop."""

    def __init__(self) -> None:
        self.highest = 0
        """Of those that take part."""
        self._priorities: dict[Subscription, int] = {}

    def joined(self, subscription: Subscription, priority: int) -> None:
        self._priorities[subscription] = priority
        self.highest = max(self._priorities.values())
        if priority:  # else nobody waits for it
            subscription.on_empty = self._go_on

    def left(self, subscription: Subscription) -> None:
        """It was stopped before, so nobody waits for it any more."""
        self._priorities.pop(subscription, None)
        self.highest = max(self._priorities.values(), default=0)

    def is_behind(self, priority: int) -> bool:
        """Whether messages of a higher priority wait."""
        return any(
            other > priority and not subscription.is_closing and subscription.next_message() is not None
            for subscription, other in self._priorities.items()
        )

    def _go_on(self) -> None:
        """Have all look again that let others go first."""
        for subscription in self._priorities:
            subscription.go_on()
