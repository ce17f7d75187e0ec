"""Shell. Program of a reader: pastes the Python snippets of a page, one after the other, into `python -m asyncio`.

    python -m tests.support.snippets PAGE
    python -m tests.support.snippets PROGRAM [DECISIONS]

Snippets with a file's name are not pasted; a program that calls `asyncio.run` runs as `python FILE`. A consumer
that runs is stopped as by Ctrl-C once it is connected, and if it starts at the earliest message, once it has decided
as many messages. Warnings and errors in the log fail the page.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import logging
import re
import sys
import threading
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from textwrap import dedent
from unittest.mock import patch

import qmq
from qmq.client.health import HealthState
from qmq.client.received import UnackedPiece

SNIPPET = re.compile(r"^( *)```python *\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
TICK_S = 0.05


def snippets(page):
    """Return (line, text) of the unnamed Python snippets of a page."""
    text = page.read_text()
    return [(text.count("\n", 0, found.start(2)) + 1, dedent(found[2])) for found in SNIPPET.finditer(text)]


def is_program(text):
    return "asyncio.run(" in text or "__name__" in text


@contextmanager
def recorded_consumers():
    """Yield a list of the consumers, filled as the snippets make them."""
    consumers, begin = [], qmq.Consumer.__init__

    @wraps(begin)
    def begin_recorded(consumer, **options):
        begin(consumer, **options)
        consumers.append(consumer)

    with patch.object(qmq.Consumer, "__init__", begin_recorded):
        yield consumers


@contextmanager
def consumers_stop(consumers, text, decisions=1):
    """Stop each consumer as by Ctrl-C, when it has done what its page shows."""
    ended, decided = threading.Event(), []

    def decide(of):
        return lambda piece, at: decided.append(at) or of(piece, at)

    def stop():
        while not ended.wait(TICK_S):
            for consumer in tuple(consumers):
                is_connected = consumer.listeners and consumer.health.state is HealthState.CONNECTED
                if is_connected and (len(decided) >= decisions or "earliest" not in text):
                    consumer.stop()

    watcher = threading.Thread(target=stop)
    with (
        patch.object(UnackedPiece, "mark", decide(UnackedPiece.mark)),
        patch.object(UnackedPiece, "refuse", decide(UnackedPiece.refuse)),
    ):
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()


async def paste(names, text, place):
    result = eval(compile(text, place, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True), names)
    if inspect.isawaitable(result):
        await result


def run(text, place):
    """Run a program as its own `__main__`."""
    exec(compile(text, place, "exec", dont_inherit=True), {"__name__": "__main__"})


def main(page, decisions):
    names = vars(sys.modules["__main__"])  # SQLAlchemy looks up annotations in the module
    records: list[logging.LogRecord] = []
    listening = logging.Handler(logging.WARNING)
    listening.emit = records.append
    logging.getLogger("qmq").addHandler(listening)
    with asyncio.Runner() as runner, recorded_consumers() as consumers:
        for line, text in snippets(page) if page.suffix == ".md" else [(1, page.read_text())]:
            place = f"{page.name}:{line}"
            print(place, flush=True)
            with consumers_stop(consumers, text, decisions):
                if is_program(text):
                    run(text, place)
                else:
                    runner.run(paste(names, text, place))
            if records and page.suffix == ".md":
                sys.exit(f"{place}: {records[0].getMessage()}: {records[0].exc_info}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if sys.argv[2:] else 1)
