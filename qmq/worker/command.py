"""Shell. Options and run of a worker, for `qmq worker` and Django's `runconsumer`; HTTP port of the parent process."""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from qmq.descriptors import socket_family
from qmq.logs import FORMATS, LEVELS, configure
from qmq.types import Endpoint
from qmq.worker.parent import Parent, pages
from qmq.worker.plan import Exit
from qmq.worker.process import Options

READ_S = 5.0
"""Time limit of one request."""
KILL_AFTER_S_MIN = 2.0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the targets and options of a worker, for `run`."""
    parser.add_argument("targets", nargs="+", metavar="MODULE:CONSUMER", help="such as shop.handlers:consumer")
    parser.add_argument("--processes", type=_count, default=1, help="number of processes; default: 1")
    parser.add_argument(
        "--concurrency", type=_count, help="calls of each handler at a time, in each process; default: that of listen()"
    )
    parser.add_argument("--reload", action="store_true", help="reload when a .py file below this folder changes")
    parser.add_argument("--http", type=_endpoint, metavar="HOST:PORT", help="serve /live, /ready and /metrics there")
    parser.add_argument(
        "--stop-timeout", type=_seconds, default=60.0, help="seconds from SIGTERM to the kill of a process; default: 60"
    )
    parser.add_argument(
        "--kill-after",
        type=_kill_after,
        default=300.0,
        help="seconds until a process whose event loop or handler threads hang is replaced; 0: never; default: 300",
    )
    parser.add_argument("--log-level", choices=LEVELS, default="INFO")
    parser.add_argument("--log-format", choices=FORMATS, default="text")


def run(given: argparse.Namespace, *, setup: str = "", path: Sequence[str] = ()) -> Exit:
    """Run a worker until its end; return the exit status.

    Args:
        given: values of `add_options`.
        setup, path: see `Options`.
    """
    configure(given.log_level, given.log_format)
    options = Options(
        targets=tuple(given.targets),
        concurrency=given.concurrency,
        processes=given.processes,
        log_level=given.log_level,
        log_format=given.log_format,
        setup=setup,
        path=tuple(path),
        kill_after_s=given.kill_after,
    )
    parent = Parent(options, stop_s=given.stop_timeout, kill_after_s=given.kill_after, reloads=given.reload)
    return asyncio.run(_run(parent, given.http))


async def _run(parent: Parent, place: Endpoint | None) -> Exit:
    server = None
    if place is not None:
        try:
            server = _serve(parent, place)
        except OSError as error:
            print(f"qmq worker: cannot listen on {place}: {error}", file=sys.stderr)
            return Exit.CANNOT_START
    try:
        return await parent.run()
    finally:
        if server is not None:
            server.shutdown()
            server.server_close()


def _serve(parent: Parent, place: Endpoint) -> ThreadingHTTPServer:
    found = pages(parent)

    class Handler(BaseHTTPRequestHandler):
        timeout = READ_S

        def do_GET(self) -> None:
            page = found.get(self.path.partition("?")[0])
            status, kind, body = page() if page is not None else (404, "text/plain", b"/live, /ready, /metrics\n")
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Log no request, because probes arrive each second."""

    class Server(ThreadingHTTPServer):
        address_family = socket_family(place.host)

    server = Server((place.host, place.port), Handler)
    threading.Thread(target=server.serve_forever, name="qmq worker http", daemon=True).start()
    return server


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


def _seconds(text: str) -> float:
    if not 0 <= (seconds := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds")
    return seconds


def _kill_after(text: str) -> float:
    if 0 < (seconds := _seconds(text)) < KILL_AFTER_S_MIN:
        raise argparse.ArgumentTypeError(f"{text} is less than {KILL_AFTER_S_MIN:g}: processes report each second")
    return seconds or math.inf


def _endpoint(text: str) -> Endpoint:
    try:
        return Endpoint.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
