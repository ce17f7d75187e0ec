"""Shell. A consumer as a process of its own, which one message kills as soon as its handler begins."""

from __future__ import annotations

import asyncio
import os
import sys

import qmq

LIMIT = 3


async def main(metaserver: str, token: str, subject: str, poison: str) -> None:
    client = qmq.Consumer(metaserver=metaserver, token=token, app="poisoned", consumer_id="poisoned")

    @client.listen(subject, group="g", start="earliest", retries_max=LIMIT, retry_delay=0)
    async def handle(message: qmq.ReceivedMessage) -> None:
        if message.id == poison:
            os._exit(9)
        print(message.id, message.times, flush=True)

    await client.run()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
