"""Shell. A subscription: a subject's messages for a consumer group, from all broker groups, in one buffer."""

from __future__ import annotations

import asyncio
from collections import deque

from qmq.client.feed import Feed, Parcel, Terms
from qmq.client.holding import ReceivedMessage
from qmq.client.link import Link
from qmq.client.route_watch import RouteWatch
from qmq.errors import QmqError

UNSUBSCRIBE_TIMEOUT_S = 2.0


class Subscription:
    """Made by a Consumer for a listener or a puller; used on its event loop until `close`."""

    def __init__(self, terms: Terms, watch: RouteWatch) -> None:
        self.terms = terms
        self.error: QmqError | None = None
        """Why it ended: another process uses the consumer id, or the broker does not accept a name."""
        self.is_closing = False
        self._watch = watch
        self._feeds: dict[str, Feed] = {}
        self._parcels: deque[Parcel] = deque()
        self._takers: deque[asyncio.Future[None]] = deque()
        self._settlers: list[asyncio.Future[None]] = []

    # Told by the consumer.

    def feed(self, link: Link) -> Feed:
        """Return the feed of a broker group; a new one begins to pull when the link is open."""
        name = link.broker_group
        if name not in self._feeds:
            self._feeds[name] = Feed(self, link)
            if link.is_open:
                self._feeds[name].opened()
        return self._feeds[name]

    def link_opened(self, link: Link) -> None:
        if feed := self._feeds.get(link.broker_group):
            feed.opened()

    def link_lost(self, link: Link) -> None:
        if feed := self._feeds.get(link.broker_group):
            feed.lost()

    def lease_ms(self, broker_group: str) -> int | None:
        """Return the lease that the broker group gave; None if nothing is subscribed there now."""
        feed = self._feeds.get(broker_group)
        return feed.lease_ms if feed is not None and feed.is_subscribed else None

    # Told by feeds.

    @property
    def feeds_count(self) -> int:
        return len(self._feeds)

    def arrived(self, parcel: Parcel) -> None:
        self._parcels.append(parcel)
        self._wake(len(parcel.messages))

    def drop(self) -> None:
        """Forget messages that are not held any more and that nobody took yet; they will come again."""
        dropped = [parcel for parcel in self._parcels if parcel.messages[0].is_dropped]
        self._parcels = deque(parcel for parcel in self._parcels if not parcel.messages[0].is_dropped)
        for parcel in dropped:
            if parcel.feed is not None:
                parcel.feed.taken(parcel)

    def settled(self) -> None:
        waiting, self._settlers = self._settlers, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def failed(self, error: QmqError) -> None:
        self.error = self.error or error
        self.stop()

    def route_is_old(self) -> None:
        self._watch.refresh()

    # Taking messages.

    def take(self, messages_max: int) -> list[ReceivedMessage]:
        """Take up to `messages_max` messages of those that are here."""
        taken: list[ReceivedMessage] = []
        while self._parcels and len(taken) < messages_max:
            parcel = self._parcels[0]
            end = min(len(parcel.messages), parcel.at + messages_max - len(taken))
            taken += parcel.messages[parcel.at : end]
            self._took(parcel, end)
        return taken

    def take_one(self) -> ReceivedMessage | None:
        if not self._parcels:
            return None
        parcel = self._parcels[0]
        message = parcel.messages[parcel.at]
        self._took(parcel, parcel.at + 1)
        return message

    def _took(self, parcel: Parcel, end: int) -> None:
        parcel.at = end
        if end == len(parcel.messages):
            self._parcels.popleft()
            if parcel.feed is not None:
                parcel.feed.taken(parcel)

    def hand_again(self, message: ReceivedMessage) -> None:
        """Offer a message once more whose handler failed; it is still held."""
        if not message.is_dropped:
            self._parcels.appendleft(Parcel([message], None, 0))
            self._wake(1)

    async def wait(self) -> None:
        """Wait until there may be something to take, or the subscription ends."""
        if self._parcels or self.is_closing:
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._takers.append(future)
        await future

    def _wake(self, count: int) -> None:
        while self._takers and count:
            future = self._takers.popleft()
            if not future.done():
                future.set_result(None)
                count -= 1

    # Ending.

    def stop(self) -> None:
        """Pull no more, wake whoever waits for messages."""
        self.is_closing = True
        for feed in self._feeds.values():
            feed.stop_pulling()
        self._wake(len(self._takers))

    async def flush(self) -> None:
        """Wait until brokers keep all acks that can be sent: those of messages before which everything is acked too."""
        while self.error is None and not all(feed.holding.is_settled for feed in self._feeds.values()):
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._settlers.append(future)
            await future

    async def close(self, flush_s: float) -> None:
        """Send what is acked, for up to `flush_s`, and give back what is not."""
        self.stop()
        try:
            async with asyncio.timeout(flush_s):
                await self.flush()
        except TimeoutError:
            pass  # these messages come again, to this consumer or to another
        answers = [answer for feed in self._feeds.values() if (answer := feed.unsubscribe())]
        if answers:
            await asyncio.wait(answers, timeout=UNSUBSCRIBE_TIMEOUT_S)
            for answer in answers:
                if answer.done():
                    answer.exception()
