"""Shell. Runner of a nightly job, which writes its outcome for Prometheus.

    qmq nightly --name audit --textfile /var/lib/prometheus/node-exporter -- qmq audit --all-groups …

node_exporter's textfile collector serves the file. A job that does not run writes nothing, so the time of its last
success grows old. That is an alert, as is a status other than 0.
"""

from __future__ import annotations

import argparse
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

from qmq.deploy.plan import write_atomically
from qmq.ledger import gauge

CANNOT_START = 127
"""Exit status of a shell for a command that cannot be started."""
_LAST_SUCCESS = "qmq_nightly_last_success_timestamp_seconds"
_SUCCESS = re.compile(rf"^{_LAST_SUCCESS}{{.*}} (\S+)$", re.MULTILINE)


def metrics(name: str, *, before: str, status: int, began_s: float, ended_s: float) -> str:
    """Return the text for Prometheus; `before` is that of the last run, which keeps the last success."""
    succeeded = f"{ended_s:.0f}" if status == 0 else (found[1] if (found := _SUCCESS.search(before)) else "")
    readings = [
        ("qmq_nightly_exit_status", "Exit status of the last run", str(status)),
        ("qmq_nightly_seconds", "How long the last run took", f"{ended_s - began_s:.1f}"),
        ("qmq_nightly_last_run_timestamp_seconds", "When the last run ended", f"{ended_s:.0f}"),
        (_LAST_SUCCESS, "When a run last ended with status 0", succeeded),
    ]
    return "".join(gauge(metric, text, [({"name": name}, value)]) for metric, text, value in readings if value)


def run(command: list[str]) -> int:
    """Run a command to its end, passing SIGTERM on; return its exit status as a shell does."""
    try:
        with subprocess.Popen(command) as process:

            def passed_on(number: int, frame: FrameType | None) -> None:
                process.send_signal(number)

            signal.signal(signal.SIGTERM, passed_on)
            status = process.wait()
    except OSError as error:
        print(f"qmq nightly: {error}", file=sys.stderr)
        return CANNOT_START
    return status if status >= 0 else 128 - status


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="qmq nightly", description="Run a nightly job and write its outcome for Prometheus."
    )
    parser.add_argument("--name", required=True, help="name in metrics and alerts: audit, backup")
    parser.add_argument("--textfile", type=Path, required=True, help="directory of node_exporter's textfile collector")
    parser.add_argument("command", nargs="+", help="the job's command, behind --")
    options = parser.parse_args(arguments)
    if not re.fullmatch(r"[a-z][a-z0-9_]*", options.name):
        parser.error(f"--name: {options.name!r} is no lower-case word")
    path: Path = options.textfile / f"qmq_nightly_{options.name}.prom"
    before = path.read_text() if path.exists() else ""
    began_s = time.time()
    status = run(options.command)
    text = metrics(options.name, before=before, status=status, began_s=began_s, ended_s=time.time())
    write_atomically(path, text, mode=0o644)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
