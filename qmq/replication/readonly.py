"""Core. Readonly reasons of a broker group, each with its remedy. A group takes new messages while it has no reason.

`qmq.replication.mastership` holds the reasons of a master; the metaserver, Doctor and the console show them.
"""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    OPERATOR = "operator"
    SLAVE_DOWN = "slave_down"
    SLAVE_LAG = "slave_lag"
    REJOIN = "rejoin"
    UNFILLED = "unfilled"
    DISK = "disk"
    DISK_LATE = "disk_late"
    MEMORY = "memory"
    CORRUPT = "corrupt"
    DIVERGED = "diverged"
    ROLLED_BACK = "rolled_back"
    FENCED = "fenced"
    DRAINING = "draining"


WAY_OUT = {
    Reason.OPERATOR: "an operator marked or drains it: UnMarkReadonly or UndrainGroup ends it",
    Reason.SLAVE_DOWN: "its slave is missing: start it; if it never returns, Doctor names the command",
    Reason.SLAVE_LAG: "its slave is behind and catches up",
    Reason.REJOIN: (
        "its master has restarted and waits, for rejoin_wait_s at most, for each copy that was in sync before: start "
        "them; RemoveBroker ends the wait for one that is gone for good"
    ),
    Reason.UNFILLED: "an incomplete slave waits until it may be filled: SyncReplica, as Doctor shows",
    Reason.DISK: "a disk is nearly full, its own or a slave's: make room on the disk that Doctor names in `disks`",
    Reason.DISK_LATE: "its disk does not finish a write: if that lasts, end this broker, then run Doctor",
    Reason.MEMORY: "its memory is over memory_limit; consumers continue, and it ends when they catch up or leave",
    Reason.CORRUPT: (
        "its log is damaged and is being repaired from another copy; if no copy has the range: stop this broker, then "
        "qmq give-up DIR"
    ),
    Reason.DIVERGED: (
        "its copies differ, and each confirmed its frames: RecoverGroup names the data directory to set aside; the "
        "master fills that copy again"
    ),
    Reason.ROLLED_BACK: (
        "its disk was restored to an older state, or lost fsynced frames: start the other copy, which refills it; "
        "if no copy has them any more: RecoverGroup, which makes the best copy the master, with --acceptLoss"
    ),
    Reason.FENCED: "a newer master exists: this broker becomes its slave, or ends, by itself",
    Reason.DRAINING: "its roles are being swapped",
}
"""Remedy of each reason, for refused producers and Doctor; docs/runbook.md explains each."""


def explain(reason: str) -> str:
    """Return a reason with its meaning and remedy. A reason of a later version is returned unchanged."""
    return WAY_OUT[Reason(reason)] if reason in list(Reason) else reason
