"""The example of docs/delay.md, run in place by pytest."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[3] / "docs" / "examples" / "unpaid_orders"


def test_example_orders_end_on_time():
    without = ["-p", "no:cacheprovider", "-p", "no:schemathesis", "-p", "no:hypothesispytest"]  # slow to load
    command = [sys.executable, "-B", "-m", "pytest", "-q", "-W", "error", "--rootdir", str(FOLDER), *without]
    ran = subprocess.run([*command, "test_orders.py"], cwd=FOLDER, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert re.search(r"^4 passed", ran.stdout, re.MULTILINE), ran.stdout
