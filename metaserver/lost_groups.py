"""Core. Whether a database may be served from: it has to have a row of each group whose brokers are registered.

A row of a group is never deleted: RemoveBroker of the last broker leaves one that keeps the term. So a group that a
metaserver has in memory or in its snapshot, and of which the database has no row, proves that this is not the database
in which its brokers were registered, or that it lost them: an empty one, or a copy from before the group was added.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from qmq.metaserver.model import Directory

NAMED_MAX = 3
COMMANDS = (
    "Restore puts a backup into it; AdoptDatabase --keep=memory fills it with what this metaserver has in memory; "
    "AdoptDatabase --keep=database forgets these groups"
)


def registered(directory: Directory) -> frozenset[str]:
    """Groups of which a broker is registered."""
    return frozenset(
        group.name for group in directory.groups.values() if any(broker.incarnation for broker in group.brokers)
    )


def find_lost(known: Collection[str], reported: Mapping[str, int], rows: Collection[str]) -> list[str]:
    """Name the groups that the database has lost.

    Args:
        known: groups that memory or the snapshot has, with registered brokers.
        reported: groups that brokers without a place report, with their term: they count against an empty database.
        rows: names of all groups that the database has a row of, removed ones too.
    """
    return sorted(set(known).difference(rows) | (set(reported) if not rows else set()))


def describe(lost: Collection[str]) -> str:
    """Say what is wrong, and which commands decide."""
    names = sorted(lost)
    listed = ", ".join(names[:NAMED_MAX]) + (f" and {len(names) - NAMED_MAX} more" if names[NAMED_MAX:] else "")
    return (
        f"the database is not used: it has no row of {listed}, whose brokers are registered, so it was emptied or "
        "replaced. What is in memory goes on; changes wait until Restore or AdoptDatabase decides"
    )
