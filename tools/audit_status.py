"""Shell. AuditStatus: reads the audit's ledger. It asks nobody, so that it answers while the cluster is down."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from qmq.ledger import PROVEN, Ledger, LedgerDamaged, all_status, is_old, write_gauges
from qmq.tools.answer import Exit
from qmq.tools.session import Session
from qmq.tools.terminal import complain, show


def run(session: Session) -> Exit:
    folder, now_ms = Path(session.values["ledger"]), int(time.time() * 1000)
    if not folder.is_dir():
        complain(f"{folder} is no directory")
        return Exit.REFUSED
    try:
        if metrics := session.values["metrics"]:
            write_gauges(Path(metrics), Ledger(folder), now_ms=now_ms)
        wanted = session.values["brokerGroup"]
        rows = [row for row in all_status(Ledger(folder), now_ms) if wanted in ("", row["group"])]
    except (LedgerDamaged, OSError) as error:
        complain(str(error))
        return Exit.REFUSED
    if session.as_json:
        print(json.dumps(rows, indent=1))
    else:
        show(session.command.show(rows), sys.stdout)
    are_proven = bool(rows) and all(row["verdict"] == PROVEN and not is_old(row) for row in rows)
    return Exit.DONE if are_proven else Exit.REFUSED
