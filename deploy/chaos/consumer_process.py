"""Shell. A consumer as a process of its own, so that it can be killed; it notes what it is given, then acks it."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import time

import qmq

FLUSH_S = 30.0


async def consume(arguments: argparse.Namespace, journal: int, subject: str, started: float) -> None:
    """Pull from one subject until cancelled."""
    client = qmq.Consumer(metaserver=arguments.metaserver, app="chaos", consumer_id=arguments.id, drain_s=30.0)
    async with client.pull(subject, group=arguments.group, start="earliest", prefetch_messages=200) as puller:
        while True:
            messages = await puller.pull(100, timeout=1.0)
            if not messages:
                continue
            at = time.monotonic()
            lines = [
                f"D {one.id} {subject} {one.broker_group} {one.sequence} {arguments.id} {started} {at}\n"
                for one in messages
            ]
            os.write(journal, "".join(lines).encode())  # no buffer: a kill must not take back what was handled
            await puller.ack(messages)
            try:
                async with asyncio.timeout(FLUSH_S):
                    await puller.flush()
            except TimeoutError:
                continue
            at = time.monotonic()
            os.write(journal, "".join(f"A {one.id} {at}\n" for one in messages if not one.is_dropped).encode())


async def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("metaserver", "id", "group", "journal", "subjects"):
        parser.add_argument(f"--{name}", required=True)
    arguments = parser.parse_args()
    journal = os.open(arguments.journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    started = time.monotonic()
    tasks = [asyncio.create_task(consume(arguments, journal, one, started)) for one in arguments.subjects.split(",")]

    def stop(_: object = None) -> None:
        for task in tasks:
            task.cancel()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop)
    for task in tasks:
        task.add_done_callback(stop)
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception):
            raise result


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    asyncio.run(main())
