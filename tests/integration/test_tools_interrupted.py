"""Shell. Ctrl-C while the tool's modules are still read ends it in order."""

from __future__ import annotations

import subprocess
import sys


def test_an_interrupt_at_the_start_shows_no_traceback(tmp_path):
    (tmp_path / "difflib.py").write_text("raise KeyboardInterrupt")  # as if it came while this module was read
    ended = subprocess.run(
        [sys.executable, "-m", "qmq.tools", "ListBrokers"],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": f"{tmp_path}:."},
    )
    assert (ended.returncode, ended.stderr) == (1, "tools.sh: interrupted before anything was changed\n")
