"""Shell. Exit statuses and signals of server processes."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

import pytest

from qmq import process_main
from qmq.errors import OperatorError
from qmq.settings import setting


@dataclass(frozen=True, slots=True)
class Settings:
    port: int = setting(1, least=1, why="a port")
    log_level: str = setting("INFO", why="level")
    log_format: str = setting("text", why="format")


class Exited(BaseException):
    """Python ended without waiting for threads."""


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setattr(process_main, "configure", lambda level, format: None)
    monkeypatch.setattr(process_main, "keep_private", lambda: None)
    monkeypatch.setattr(process_main, "raise_limit", lambda: None)
    return lambda serve: process_main.run_process("thing", "A thing.", Settings, "QMQ_THING", serve, [])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_stops_a_process_in_order(run, number):
    async def serve(settings, stop):
        os.kill(os.getpid(), number)
        await stop.wait()
        return False

    assert run(serve) == 0


def test_thread_without_an_end_holds_no_process(run, monkeypatch):
    def leave(status):
        raise Exited(status)

    async def serve(settings, stop):
        return True

    monkeypatch.setattr(os, "_exit", leave)
    with pytest.raises(Exited, match="0"):
        run(serve)


@pytest.mark.parametrize("error", [OSError("the port is taken"), OperatorError("the port is taken")])
def test_process_that_cannot_serve_ends_with_1(run, caplog, error):
    async def serve(settings, stop):
        raise error

    assert run(serve) == 1
    assert "thing cannot serve: the port is taken" in caplog.text


def test_invalid_settings_end_a_process_with_2(run, capsys, monkeypatch):
    monkeypatch.setenv("QMQ_THING_PORT", "0")
    assert run(None) == 2
    assert "port: " in capsys.readouterr().err
