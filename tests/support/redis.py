"""Shell. A real Redis server for tests, from the program that Debian's package redis-server installs."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from tests.support.ports import kept_port

START_S = 60


class RedisServer:
    """One server on a free loopback port, without a disk; it ends with the session, even if that is killed."""

    def __init__(self) -> None:
        self.port = kept_port()
        self._directory = Path(tempfile.mkdtemp(prefix="qmq-redis-"))
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start the server and wait until it answers."""
        program = shutil.which("redis-server")
        if program is None:
            raise RuntimeError("there is no program redis-server; apt-get install redis-server")
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self._process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "TERM", program, *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=self._directory,
        )
        deadline = time.monotonic() + START_S
        while not self._answers():
            assert self._process.poll() is None and time.monotonic() < deadline, "redis-server does not start"
            time.sleep(0.02)

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(START_S)
            self._process = None

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _answers(self) -> bool:
        with redis.Redis.from_url(self.url) as client:
            try:
                return bool(client.ping())
            except redis.ConnectionError:
                return False


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """A running Redis server; tests restart it after they stop it."""
    server = RedisServer()
    try:
        server.start()
        yield server
    finally:
        server.remove()
