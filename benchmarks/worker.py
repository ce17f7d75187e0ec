"""Shell. A client process that does one action after the other: both ends of its pipe, one JSON line each way."""

from __future__ import annotations

import asyncio
import json
import os
import random
import select
import string
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from qmq.errors import NotServed

ROOT = Path(__file__).parents[1]
STOP_S = 15.0
TEXTS = 64

Action = Callable[..., Awaitable[dict[str, Any]]]


class Worker:
    """A client in a process of its own, from `with` to its end.

    Args:
        module: module to run; it calls `answer` with its actions.
        log: file for its complaints.
        arguments: its command line.
        token: its QMQ_TOKEN, which no process list shows.
    """

    def __init__(self, module: str, log: Path, *arguments: str, token: str = "") -> None:
        self._module = module
        self._log = log
        self._arguments = arguments
        self._environ = os.environ | {"QMQ_TOKEN": token}
        self._text = b""

    def __enter__(self) -> Worker:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", self._module, *self._arguments],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                env=self._environ,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        if error is not None:
            self._process.terminate()
        self._process.stdin.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def run(self, action: str, *, timeout_s: float = 600.0, **arguments: object) -> dict[str, Any]:
        """Carry out an action; return its measurement."""
        self.begin(action, **arguments)
        return self.end(timeout_s)

    def begin(self, action: str, **arguments: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"action": action, **arguments}).encode() + b"\n")
        self._process.stdin.flush()

    def end(self, timeout_s: float = 600.0) -> dict[str, Any]:
        """Wait for the answer to the begun action; without one, raise NotServed with the worker's last output."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._text:
            readable, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(self._process.stdout.fileno(), 65_536) if readable else b""
            if not data:
                outcome = "ended" if readable else f"did not answer within {timeout_s:.0f} s"
                raise NotServed(f"{self._module} {outcome}:\n{self._log.read_text(errors='replace')[-3000:]}")
            self._text += data
        line, _, self._text = self._text.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer


async def answer(actions: dict[str, Action]) -> None:
    """Run the worker's end: read a line, do the action, print its measurement; end with the input."""
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        request = json.loads(line)
        measured = await actions[request.pop("action")](**request)
        print(json.dumps(measured), flush=True)


def texts(size: int) -> list[str]:
    """Return some different texts of `size` bytes, equal in each run, that do not compress to nothing."""
    rng = random.Random(size)
    return ["".join(rng.choices(string.ascii_letters, k=size)) for _ in range(TEXTS)]
