"""Examples of docs/testing.md, run as by a reader in a folder of their own, and of docs/delay.md, run in place."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parents[3] / "docs"
PAGE = DOCS / "testing.md"
FILE = re.compile(r"^```python (\S+\.py)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def passed(folder: Path, *arguments: str) -> str:
    """Run pytest there; return its last lines."""
    without = ["-p", "no:cacheprovider", "-p", "no:schemathesis", "-p", "no:hypothesispytest"]  # slow to load
    command = [sys.executable, "-B", "-m", "pytest", "-q", *without, *arguments]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_printed_example_passes(tmp_path):
    files = dict(FILE.findall(PAGE.read_text()))
    assert list(files) == ["billing.py", "test_billing.py", "test_blocking_billing.py", "shop.py", "test_shop.py"]
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    assert re.search(r"^9 passed", passed(tmp_path), re.MULTILINE)


def test_example_orders_end_on_time():
    folder = DOCS / "examples" / "unpaid_orders"
    ran = passed(folder, "-W", "error", "--rootdir", str(folder), "test_orders.py")
    assert re.search(r"^4 passed", ran, re.MULTILINE)


def test_the_page_names_every_function_of_the_broker():
    from qmq.testing import Broker

    text = PAGE.read_text()
    public = [name for name in dir(Broker) if not name.startswith("_")]
    assert len(public) > 8
    assert [
        name for name in public if f"`{name}" not in text and f"`await {name}" not in text and f", `{name}" not in text
    ] == []
