"""Shell. `tools/tools.sh` with and without a terminal, against stub servers."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import termios
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qsl

TOOLS = Path(__file__).parents[2] / "tools" / "tools.sh"
DONE, REFUSED, USAGE, UNREACHABLE, UNKNOWN = range(5)
TOKEN = "qmq_id_secret"
WAIT_S = 60


def environment(token=TOKEN, **more):
    environ = {name: value for name, value in os.environ.items() if not name.startswith("QMQ_")}
    environ |= {"QMQ_PYTHON": sys.executable, "http_proxy": "http://127.0.0.1:9"}
    return environ | ({"QMQ_TOKEN": token} if token else {}) | more


def typed(options):
    return [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]


def run(command, metaserver, *words, token=TOKEN, stdin="", cwd=None, environ=None, **options):
    """Run a command without a terminal, as a script does."""
    return subprocess.run(
        [TOOLS, command, f"--metaserver={metaserver}", *typed(options), *words],
        env=environment(token, **(environ or {})),
        input=stdin,
        cwd=cwd,
        capture_output=True,
        text=True,
    )


@dataclass(frozen=True)
class Typed:
    """Result of a command at a terminal."""

    returncode: int
    stdout: str
    shown: str
    """Text on the terminal, without stdout."""


def run_at_terminal(command, metaserver, *words, answer="", token=TOKEN, **options):
    """Run a command at a terminal, and type `answer` at its first prompt; stdout is captured apart."""
    ours, theirs = pty.openpty()
    attributes = termios.tcgetattr(theirs)
    attributes[3] &= ~termios.ECHO
    termios.tcsetattr(theirs, termios.TCSANOW, attributes)
    process = subprocess.Popen(
        [TOOLS, command, f"--metaserver={metaserver}", *typed(options), *words],
        env=environment(token, TERM="xterm", NO_COLOR="1", COLUMNS="120"),
        stdin=theirs,
        stderr=theirs,
        stdout=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    os.close(theirs)
    shown = _talk(ours, answer)
    stdout, _ = process.communicate(timeout=WAIT_S)
    os.close(ours)
    return Typed(process.returncode, stdout, shown)


def _talk(terminal, answer):
    shown, is_answered, deadline = "", False, time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        if not select.select([terminal], [], [], 0.1)[0]:
            continue
        try:
            piece = os.read(terminal, 65536)
        except OSError:  # Linux' sign that the other end is closed
            break
        if not piece:
            break
        shown += piece.decode()
        if not is_answered and shown.rstrip().endswith((":", "[y/N]")):
            os.write(terminal, f"{answer}\n".encode() if answer else b"\x04")
            is_answered = True
    return shown.replace("\r\n", "\n")


class Replying(BaseHTTPRequestHandler):
    """Handler with a short way to answer."""

    def reply(self, content, status=200):
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@contextmanager
def served(handler):
    """Serve requests by a thread; yield the address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Stub:
    """Metaserver on a real port with given answers; it records the requests."""

    def __init__(self, answer):
        self.answer, self.asked, self.tokens = answer, [], []
        stub = self

        class Handler(Replying):
            def do_GET(self):
                """Answer health and address; the gRPC port is the HTTP port."""
                self.reply(stub.address.encode() if self.path == "/meta/address" else b"ok")

            def do_POST(self):
                if stub.answer is None:
                    self.send_error(405)
                    return
                body = self.rfile.read(int(self.headers["Content-Length"])).decode()
                words = dict(parse_qsl(body, keep_blank_values=True))
                stub.asked.append(words)
                stub.tokens.append(self.headers["X-Api-Token"])
                self.reply(json.dumps(stub.answer(words)).encode())

        self._served = served(Handler)

    def __enter__(self):
        self.address = self._served.__enter__()
        return self

    def __exit__(self, *error):
        self._served.__exit__(*error)

    @property
    def done(self):
        """Actions that were run, not only planned."""
        return [words["action"] for words in self.asked if words.get("dryRun") != "true"]


def ok(data):
    return {"status": 0, "message": "", "data": data}


def preview(**changes):
    shown = {
        "dryRun": True,
        "wouldChange": True,
        "reasons": [],
        "objections": [],
        "blastRadius": "12 subjects, 3 groups, 40 clients",
        "subjects": {"count": 0, "names": []},
        "groups": {"count": 1, "names": ["g1"]},
        "clients": 40,
        "before": {"term": 1},
        "after": {"term": 2},
    }
    return ok(shown | changes)


def planned(data, **changes):
    """Return an answer: a preview for plans, `data` for the change."""
    return lambda words: preview(**changes) if words.get("dryRun") == "true" else ok(data)


@contextmanager
def answering(answer):
    """Server that answers one plan, then reads one request and sends the given bytes."""
    import socket

    plan = json.dumps(preview()).encode()
    head = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(plan)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            while True:
                connection, _ = listener.accept()
                with connection:
                    connection.settimeout(WAIT_S)
                    received = b""
                    while b"brokerGroup=g1" not in received:
                        piece = connection.recv(65536)
                        assert piece, f"it hung up after {received!r}"
                        received += piece
                    is_plan = b"dryRun=true" in received
                    connection.sendall(head + plan if is_plan else answer)
                    if not is_plan:
                        return

        thread = threading.Thread(target=serve, daemon=True)  # a failed test may not send all requests
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        thread.join(WAIT_S)
        assert not thread.is_alive(), "it was not asked for the change"


@contextmanager
def watchdog(answer):
    """Watchdog with this status and JSON answer; None: no answer."""

    class Handler(Replying):
        def do_GET(self):
            if answer:
                status, content = answer
                self.reply(json.dumps(content).encode(), status)

    with served(Handler) as address:
        yield address
