"""Shell. Tests that never end fail, twice if need be, and show the await that did not return."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
HUNG = """
import asyncio, threading

import pytest


@pytest.fixture
def closing():
    yield
    threading.Event().wait()


async def test_waits(closing):
    event = asyncio.Event()

    async def first_message():
        await event.wait()

    await asyncio.create_task(first_message())
"""


CONFTEST = """
import sys, time

pytest_plugins = ["tests.support.timeouts"]


def pytest_configure():
    sys.modules["tests.support.timeouts"].AGAIN_S = 0.2


def pytest_runtest_logreport(report):
    if report.when == "call":
        time.sleep(0.5)  # an exception raised here would end the session without a bound
"""


def test_hung_test_shows_its_await_and_ends(tmp_path):
    (tmp_path / "test_hung.py").write_text(HUNG)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    options = ["-o", "anyio_mode=auto", "--timeout=0.5", "--timeout-method=signal", "-p", "no:cacheprovider"]
    options += ["-p", "anyio.pytest_plugin", "-p", "pytest_timeout"]  # the others take seconds to load
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *options, "test_hung.py"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "1 failed, 1 error" in run.stdout, run.stdout
    assert "in first_message" in run.stdout and "threading.Event().wait()" in run.stdout
