"""The files of docs/testing.md, run as by a reader: by pytest, in a folder of their own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "testing.md"
FILE = re.compile(r"^```python (\S+\.py)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_printed_example_passes(tmp_path):
    files = dict(FILE.findall(PAGE.read_text()))
    assert list(files) == ["billing.py", "test_billing.py", "test_blocking_billing.py", "shop.py", "test_shop.py"]
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    without = ["-p", "no:cacheprovider", "-p", "no:schemathesis", "-p", "no:hypothesispytest"]  # slow to load
    ran = subprocess.run([sys.executable, "-m", "pytest", "-q", *without], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert re.search(r"^9 passed", ran.stdout, re.MULTILINE), ran.stdout


def test_the_page_names_every_function_of_the_broker():
    from qmq.testing import Broker

    text = PAGE.read_text()
    public = [name for name in dir(Broker) if not name.startswith("_")]
    assert len(public) > 8
    assert [
        name for name in public if f"`{name}" not in text and f"`await {name}" not in text and f", `{name}" not in text
    ] == []
