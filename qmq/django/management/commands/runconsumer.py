"""Shell. `manage.py runconsumer shop.handlers:consumer`: a process that handles messages in a Django project."""

from __future__ import annotations

import asyncio
from argparse import ArgumentParser
from contextlib import suppress
from importlib import import_module
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from qmq import Consumer, blocking
from qmq.errors import QmqError


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
        found = load(consumer)
        self.stdout.write(f"{consumer} runs, id {found.id}")
        try:
            with suppress(KeyboardInterrupt):
                if isinstance(found, Consumer):
                    asyncio.run(found.run())
                else:
                    found.run()
        except QmqError as error:
            raise CommandError(f"{consumer} ended: {error}") from error


def load(path: str) -> Consumer | blocking.Consumer:
    """Return the consumer at "module:name"; raises CommandError."""
    module, _, name = path.partition(":")
    if not module or not name:
        raise CommandError(f"{path!r} names no consumer: give module:name, such as shop.handlers:consumer")
    try:
        found = getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        raise CommandError(f"{module} cannot be imported: {error}") from error
    except AttributeError as error:
        raise CommandError(f"{error}: name the consumer after the colon") from error
    if not isinstance(found, Consumer | blocking.Consumer):
        raise CommandError(f"{path} is a {type(found).__name__}: name a qmq.Consumer or qmq.blocking.Consumer")
    return found
