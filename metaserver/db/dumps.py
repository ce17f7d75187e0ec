"""Core. What a dump of the tables has to be before it may take their place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from qmq.types import Role

FORMAT, VERSION = "qmq metadata", 1
REMOVED = 0
"""As the kind of a group: it is no more. Its row keeps the term, in case the name is used again."""

Tables = Mapping[str, Any]
"""Rows, each a mapping of columns, by name of the table."""


def header_fault(dumped: Mapping[str, Any], *, schema: str, tables: Iterable[str]) -> str:
    """Say why this is no dump of tables like ours; empty: it is one. Its rows are not looked at."""
    if dumped.get("format") != FORMAT or dumped.get("version") != VERSION:
        return f"this is no backup of version {VERSION} of a metaserver's tables; Backup makes one"
    if dumped.get("schema") != schema:
        return (
            f"the backup was made with tables of version {dumped.get('schema')}, these have {schema}: restore it into "
            "an empty database with the qmq that made it, then start this one on that"
        )
    content = dumped.get("tables")
    if not isinstance(content, Mapping) or content.keys() != set(tables):
        return "the backup lacks tables, or has others"
    return ""


def lost_masters(present: Tables, dumped: Tables) -> list[str]:
    """Say which groups would get another master than they have, which may lack what was acknowledged since.

    A master that never registered has nothing to lose. A group that the dump does not have at all is removed.
    """
    masters, others = _masters(present), _masters(dumped)
    live = {name for name, row in _by_name(dumped).items() if row.get("kind") != REMOVED}
    return [
        f"{name} is served by {_key(row)}, the backup has {_key(others[name]) if name in others else 'nobody'} in its "
        "place, and knows nothing of messages that came since: first make the two agree (SwapRoles or ReplaceBroker; "
        "RemoveBroker if what the group holds may go)"
        for name, row in sorted(masters.items())
        if row["incarnation"] and name in live and (name not in others or _key(others[name]) != _key(row))
    ]


def with_disks(present: Tables, dumped: Tables) -> list[dict[str, Any]]:
    """Brokers of the dump. Which disk each one has served with never goes back: a master with an emptied one would be
    let in. Whether a slave is complete has to be seen again."""
    disks = {_key(row): {name: row[name] for name in ("incarnation", "instance")} for row in present["broker"]}
    return [{**row, "complete": False, **disks.get(_key(row), {})} for row in dumped["broker"]]


def _masters(tables: Tables) -> dict[str, Mapping[str, Any]]:
    rows = [row for row in tables["broker"] if isinstance(row, Mapping)]
    return {str(row.get("group_name")): row for row in rows if row.get("role") == Role.MASTER}


def _by_name(tables: Tables) -> dict[str, Mapping[str, Any]]:
    return {str(row.get("group_name")): row for row in tables["broker_group"] if isinstance(row, Mapping)}


def _key(row: Mapping[str, Any]) -> str:
    return f"{row.get('hostname')}:{row.get('serve_port')}"
