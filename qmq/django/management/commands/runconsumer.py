"""Shell. `manage.py runconsumer shop.handlers:consumer`: a process that handles messages in a Django project."""

from __future__ import annotations

import asyncio
from argparse import ArgumentParser
from contextlib import suppress
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from qmq import Consumer, blocking
from qmq.errors import QmqError
from qmq.worker.process import CannotRun, load


class Command(BaseCommand):  # type: ignore[misc]
    """Management command; ends with 0 at SIGTERM, Ctrl-C or `stop`, with 1 and the reason when the consumer fails."""

    help = "Run the handlers of a consumer until SIGTERM or Ctrl-C: running handlers finish, acks are sent."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "consumer",
            metavar="MODULE:CONSUMER",
            help="a qmq.Consumer or qmq.blocking.Consumer with listeners, such as shop.handlers:consumer",
        )

    def handle(self, *, consumer: str, **options: Any) -> None:
        found = load_one(consumer)
        self.stdout.write(f"{consumer} runs, id {found.id}")
        try:
            with suppress(KeyboardInterrupt):
                if isinstance(found, Consumer):
                    asyncio.run(found.run())
                else:
                    found.run()
        except QmqError as error:
            raise CommandError(f"{consumer} ended: {error}") from error


def load_one(path: str) -> Consumer | blocking.Consumer:
    """Return the consumer at "module:name", or the only one of a module; raises CommandError."""
    try:
        found = load([path])
    except CannotRun as error:
        raise CommandError(str(error)) from error
    if len(found) > 1:
        raise CommandError(f"{path} has {len(found)} consumers: name one, such as {path}:consumer")
    return found[0]
