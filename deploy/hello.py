"""Shell. A first message: sent to the cluster that `make run` started, and taken out again."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import qmq


async def hello(metaserver: str, token: str) -> None:
    async with qmq.Producer(metaserver=metaserver, app="hello", token=token) as producer:
        receipt = await producer.send(qmq.Message("order.changed", {"orderNo": "42"}, tags={"pay"}))
        print(f"sent: {receipt.outcome} {receipt.reason}".rstrip())
        print(f"      in {receipt.broker_group}, sequence {receipt.sequence}, id {receipt.message_id}")

    consumer = qmq.Consumer(metaserver=metaserver, app="hello", token=token)
    async with consumer.pull("order.changed", group="hello", start="earliest") as puller:
        for message in await puller.pull(100, timeout=5.0):
            print(f"got:  {dict(message.properties)} {set(message.tags)}, id {message.id}")
            await message.ack()


if __name__ == "__main__":
    path = Path(os.environ.get("RUN_DIR", ".run")) / "cluster.json"
    if not path.exists():
        sys.exit(f"{path} is not there: start a cluster with `make run` first")
    cluster = json.loads(path.read_text())
    asyncio.run(hello(cluster["metaserver"], cluster["token"]))
