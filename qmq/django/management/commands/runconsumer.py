"""Shell. `manage.py runconsumer shop.handlers:consumer`: `qmq worker` with the settings of a Django project."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace
from typing import Any

from django.conf import ENVIRONMENT_VARIABLE
from django.core.management.base import BaseCommand, CommandError

from qmq.worker.command import add_options, run
from qmq.worker.plan import Exit


class Command(BaseCommand):  # type: ignore[misc]
    """Management command; ends with the exit statuses of `qmq worker`."""

    help = "Handle messages in processes of their own, until SIGTERM or Ctrl-C. SIGHUP reloads."

    def add_arguments(self, parser: ArgumentParser) -> None:
        add_options(parser)

    def handle(self, **options: Any) -> None:
        # Without a settings module, the import of the consumer's module configures Django.
        setup = "django:setup" if ENVIRONMENT_VARIABLE in os.environ else ""
        status = run(Namespace(**options), setup=setup, path=sys.path)
        if status is not Exit.ENDED:
            raise CommandError(
                f"the worker ended with exit status {status:d}; its log has the reason", returncode=status
            )
