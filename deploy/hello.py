"""Shell. A first message, sent and received.

qmq hello                                                       to the cluster of `qmq dev`
qmq hello --metaserver 10.0.0.9:8080 --token-file shop.token    to another one
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path

import qmq
from qmq.access import add_token_options, find_token
from qmq.errors import QmqError

SUBJECT, WAIT_S = "order.changed", 5.0


async def hello(metaserver: str, token: str | None) -> None:
    """Send a message and receive it; exit with an error if that fails."""
    async with qmq.Producer(metaserver=metaserver, app="hello", token=token) as producer:
        receipt = await producer.send(qmq.Message(SUBJECT, {"orderNo": "42"}, tags={"pay"}))
        print(f"sent: {receipt.outcome} {receipt.reason}".rstrip())
        if not receipt.is_stored:
            sys.exit(1)
        print(f"      in {receipt.broker_group}, sequence {receipt.sequence}, id {receipt.message_id}")

    consumer = qmq.Consumer(metaserver=metaserver, app="hello", token=token)
    async with consumer.pull(SUBJECT, group="hello", start="earliest") as puller:
        while messages := await puller.pull(100, timeout=WAIT_S):
            for message in messages:
                print(f"got:  {dict(message.properties)} {set(message.tags)}, id {message.id}")
                await message.ack()
                if message.id == receipt.message_id:
                    return
    sys.exit(f"the message did not come within {WAIT_S:g} s: `qmq Lag --subject={SUBJECT}` shows why its group waits")


def local_cluster(otherwise: str = "") -> tuple[str, str]:
    """Return metaserver and token of the cluster of `qmq dev`; `otherwise`: the program's alternative, for the
    error.
    """
    path = Path(os.environ.get("RUN_DIR", ".run")) / "cluster.json"
    if not path.exists():
        sys.exit(f"{path} is not there: start `qmq dev` here first, or set RUN_DIR to its --dir{otherwise}")
    cluster = json.loads(path.read_text())
    return cluster["metaserver"], cluster["token"]


def main() -> None:
    parser = argparse.ArgumentParser(prog="qmq hello", description="Send a message and receive it.")
    parser.add_argument(
        "--metaserver",
        default=os.environ.get("QMQ_METASERVER") or None,
        help="host:port of a metaserver, or of nginx before several; default: QMQ_METASERVER, or that of `qmq dev`",
    )
    add_token_options(parser)
    options = parser.parse_args()
    if options.metaserver is None:
        asyncio.run(hello(*local_cluster(", or name one with --metaserver")))
        return
    try:
        asyncio.run(hello(options.metaserver, find_token(options.token, token_file=options.token_file) or None))
    except QmqError as error:
        sys.exit(f"hello: {error}")


if __name__ == "__main__":
    main()
