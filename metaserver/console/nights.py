"""Shell. The audit's ledger as a page: how each broker group stands, and what each run said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qmq.ledger import PROVEN, Ledger
from qmq.ledger_status import status_of

GROUPS_MAX = 200
RUNS_MAX = 100
"""So many runs are listed, over all groups, the newest first."""
FINDINGS_MAX = 20


def nights_of(folder: Path, only: str, now_ms: int) -> dict[str, Any]:
    """Read a ledger; `only`: one broker group, empty: all. Raises LedgerDamaged, OSError."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is no directory: has the audit run here, or is it mounted?")
    ledger = Ledger(folder)
    names = [name for name in ledger.groups() if only in ("", name)]
    entries = {name: found for name in names[:GROUPS_MAX] if (found := ledger.entries(name))}
    status = sorted((status_of(found, now_ms) for found in entries.values()), key=lambda row: row["verdict"] == PROVEN)
    runs = sorted((entry for found in entries.values() for entry in found), key=lambda one: (-one.at_ms, one.group))
    return {
        "status": status,
        "proven": sum(row["verdict"] == PROVEN for row in status),
        "oldest_ms": min((row["runMs"] for row in status), default=0),
        "left_out": len(names) - len(names[:GROUPS_MAX]),
        "runs": [
            {
                "run": one.run,
                "group": one.group,
                "verdict": one.verdict,
                "why": one.why,
                "verified": one.verified,
                "found": one.found,
                "findings": one.findings[:FINDINGS_MAX],
                "read": sum(one.read.values()),
                "by": one.by,
            }
            for one in runs[:RUNS_MAX]
        ],
    }
