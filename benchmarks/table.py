"""Shell. Speed of reading a log as a table, by one task, without Spark: MB of log per CPU second.

    python -m benchmarks.table

Writes a log of 1 KiB messages and reads it with more and more columns, as the Arrow batches for Spark.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from benchmarks.audit import SUBJECT, write_log
from qmq.audit.data_source import TableReader

COLUMNS = {
    "numbers": "subject,sequence,stored_at",
    "ids": "subject,sequence,id",
    "properties": "subject,sequence,id,tags,created_at,properties",
}


def measure(data: Path, columns: str, **options: str) -> tuple[int, float]:
    """Return the number of messages read, and the CPU time."""
    reader = TableReader({"path": str(data)} | options, columns.split(","))
    began, messages = time.process_time(), 0
    for part in reader.partitions():
        for batch in reader.read(part):
            messages += batch.num_rows
    return messages, time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.table", description="Measure the table of a log.")
    parser.add_argument("--messages", type=int, default=100, help="messages of 1 KiB in a frame")
    parser.add_argument("--megabytes", type=int, default=256, help="size of the log, MiB")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="qmq-table-") as folder:
        data = Path(folder)
        write_log(data, options.megabytes << 20, options.messages)
        megabytes = (options.megabytes << 20) / 1e6
        for name, columns in COLUMNS.items():
            messages, seconds = measure(data, columns, subject=SUBJECT)
            print(f"{name:<12}{megabytes / seconds:6.0f} MB/s of CPU  {messages / seconds:9.0f} messages/s")


if __name__ == "__main__":
    main()
