"""Core. What a Restore would replace."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from qmq.metaserver.actions.plan import Plan, refused
from qmq.metaserver.actions.route_plans import NAMED_MAX
from qmq.metaserver.storage.backup import header_fault, lost_masters
from qmq.metaserver.storage.changes import Change, ForgetGroup, RestoreAll

KEPT = ("api_token", "audit_trail")
"""Tables of which rows do not make a metaserver count as used: the first admin token is there from the start."""

_SUBJECT = ("subject_route", "subject_info")
_GROUP = ("broker_group", "group_name")


def restore(backup: Any, present: Mapping[str, Any], *, forced: bool) -> Plan:
    """Plan to put a backup in the place of everything.

    Args:
        present: what Backup would give now.
    """
    tables = backup.get("tables") if isinstance(backup, dict) else None
    if not isinstance(tables, dict) or not all(isinstance(rows, list) for rows in tables.values()):
        return refused("this is no backup of a metaserver; Backup makes one")
    if fault := header_fault(backup, schema=present["schema"], tables=present["tables"]):
        return refused(fault)
    if lost := lost_masters(present["tables"], tables):
        return refused(*lost[:NAMED_MAX], *([f"and {len(lost) - NAMED_MAX} more groups"] if lost[NAMED_MAX:] else []))
    before, after = _count(present["tables"]), _count(tables)
    used = {name: count for name, count in before.items() if count and name not in KEPT}
    objections = []
    if used:
        held = ", ".join(f"{count:,} rows of {name}" for name, count in used.items())
        objections.append(f"this metaserver is in use, and would lose what is not in the backup: {held}")
    return Plan(
        (RestoreAll(backup),),
        objections=tuple(objections),
        subjects=_column(tables, *_SUBJECT) | _column(present["tables"], *_SUBJECT),
        groups=_column(tables, *_GROUP) | _column(present["tables"], *_GROUP),
        everything=True,
        before=before,
        after=after,
        data={"restored": after, "backupTime": backup.get("time")},
        forced=forced,
    )


def adopt_database(
    lost: Mapping[str, int],
    present: Mapping[str, Any],
    dump_memory: Callable[[], dict[str, Any]],
    *,
    keeps_memory: bool,
) -> Plan:
    """Plan what becomes of a database that has lost groups.

    Args:
        lost: these groups, with the newest term that is known of each.
        present: what Backup would give now.
        dump_memory: makes the same of what the metaserver has in memory.
    """
    if not lost:
        return refused("the database has a row of each group whose brokers are registered: there is nothing to decide")
    before = _count(present["tables"])
    changes: tuple[Change, ...]
    if keeps_memory:
        memory = dump_memory()
        if missing := sorted(lost.keys() - _column(memory["tables"], *_GROUP)):
            named = ", ".join(missing[:NAMED_MAX])
            return refused(f"this metaserver has {named} in no memory either; ask one that has, or Restore a backup")
        changes, after = (RestoreAll(memory, is_newer=True),), _count(memory["tables"])
    else:
        changes, after = tuple(ForgetGroup(name, term) for name, term in sorted(lost.items())), before
    data = {"keep": "memory" if keeps_memory else "database", "groups": sorted(lost), "rows": after}
    return Plan(
        changes, groups=frozenset(lost), whole_groups=True, everything=True, before=before, after=after, data=data
    )


def _count(tables: Mapping[str, Any]) -> dict[str, int]:
    return {name: len(rows) for name, rows in tables.items()}


def _column(tables: Mapping[str, Any], table: str, column: str) -> frozenset[str]:
    rows = (row for row in tables.get(table, ()) if isinstance(row, dict))
    return frozenset(row[column] for row in rows if isinstance(row.get(column), str))
