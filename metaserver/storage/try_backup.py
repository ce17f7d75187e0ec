"""Shell. `qmq try-backup FILE…`: restore a backup into an empty database, and check that every row returned.

It reads the file as Restore does, on SQLite in a temporary directory, without asking. The nightly job runs it after
Backup, and its failure is an alert.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from qmq.errors import QmqError
from qmq.metaserver.storage.changes import DatabaseUnusable, RestoreAll
from qmq.metaserver.storage.engine import open_database
from qmq.metaserver.storage.repository import Repository


def rows(dump: dict[str, Any]) -> dict[str, int]:
    """Return the number of a dump's rows in each table."""
    return {name: len(table) for name, table in dump["tables"].items()}


def try_backup(path: Path) -> dict[str, int]:
    """Restore the backup in `path`; return the number of restored rows in each table.

    Raises:
        QmqError, ValueError: it cannot be restored, or rows are missing afterwards.
    """
    dump = json.loads(path.read_text())
    with TemporaryDirectory(prefix="qmq-backup-") as directory:
        engine = open_database(f"sqlite:///{directory}/restored.db")
        try:
            restored = Repository(engine)
            restored.change([RestoreAll(dump)])
            found = rows(restored.dump())
        finally:
            engine.dispose()
    missing = {name: count - found.get(name, 0) for name, count in rows(dump).items() if found.get(name, 0) < count}
    if missing:
        raise QmqError("rows did not come back: " + ", ".join(f"{count} of {name}" for name, count in missing.items()))
    return found


def main() -> int:
    """Try each file; return 0 if all can be restored, else 1."""
    parser = argparse.ArgumentParser(prog="qmq try-backup", description="Restore backups into an empty database.")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="files of `qmq Backup --file=FILE`")
    failed = False
    for path in parser.parse_args().files:
        try:
            found = try_backup(path)
            print(f"{path}: can be restored; " + ", ".join(f"{count} {name}" for name, count in found.items() if count))
        except (QmqError, DatabaseUnusable, OSError, ValueError) as error:
            failed = True
            print(f"{path}: cannot be restored: {error}", file=sys.stderr)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
