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


def test_hung_test_shows_its_await_and_ends(tmp_path):
    (tmp_path / "test_hung.py").write_text(HUNG)
    (tmp_path / "conftest.py").write_text(
        "import sys\npytest_plugins = ['tests.support.timeouts']\n"
        "def pytest_configure(): sys.modules['tests.support.timeouts'].AGAIN_S = 0.5\n"
    )
    options = ["-o", "anyio_mode=auto", "--timeout=0.5", "--timeout-method=signal", "-p", "no:cacheprovider"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *options, "test_hung.py"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "1 failed, 1 error" in run.stdout, run.stdout
    assert "in first_message" in run.stdout and "threading.Event().wait()" in run.stdout
