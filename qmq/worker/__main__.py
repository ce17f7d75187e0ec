"""Shell. The command `qmq worker`: its options, and the HTTP port of its parent process."""

from __future__ import annotations

import argparse
import asyncio
import socket
import sys
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from qmq.logs import FORMATS, LEVELS, configure
from qmq.types import Endpoint
from qmq.worker.parent import Parent, pages
from qmq.worker.plan import Exit
from qmq.worker.process import Options

READ_S = 5.0
"""Time of one request."""


def main(arguments: Sequence[str] | None = None) -> Exit:
    parser = argparse.ArgumentParser(
        prog="qmq worker",
        description="Handle messages in processes of their own, until SIGTERM or Ctrl-C. SIGHUP reloads.",
        epilog="exit status: 0 ended on request, 1 failed, 2 wrong call or import error, 77 token rejected",
    )
    parser.add_argument("targets", nargs="+", metavar="MODULE:CONSUMER", help="such as shop.handlers:consumer")
    parser.add_argument("--processes", type=_count, default=1, help="number of processes; default: 1")
    parser.add_argument(
        "--concurrency", type=_count, help="calls of each handler at a time, in each process; default: that of listen()"
    )
    parser.add_argument("--reload", action="store_true", help="reload when a .py file below this folder changes")
    parser.add_argument("--http", type=_endpoint, metavar="HOST:PORT", help="serve /live, /ready and /metrics there")
    parser.add_argument("--stop-timeout", type=float, default=60.0, help="seconds until a kill; default: 60")
    parser.add_argument("--log-level", choices=LEVELS, default="INFO")
    parser.add_argument("--log-format", choices=FORMATS, default="text")
    given = parser.parse_args(arguments)
    configure(given.log_level, given.log_format)
    options = Options(tuple(given.targets), given.concurrency, given.processes, given.log_level, given.log_format)
    return asyncio.run(_run(options, given.http, stop_s=given.stop_timeout, reloads=given.reload))


async def _run(options: Options, place: Endpoint | None, *, stop_s: float, reloads: bool) -> Exit:
    parent = Parent(options, stop_s=stop_s, reloads=reloads)
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
            """Log no request: probes come each second."""

    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in place.host else socket.AF_INET

    server = Server((place.host, place.port), Handler)
    threading.Thread(target=server.serve_forever, name="qmq worker http", daemon=True).start()
    return server


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


def _endpoint(text: str) -> Endpoint:
    try:
        return Endpoint.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


if __name__ == "__main__":
    sys.exit(main())
