"""Shell. Whether the two places of a broker group are its two copies: one that is read twice proves nothing."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing

from qmq.audit.copies import CannotRead, PathCopy, is_same_place, open_copy
from qmq.audit.schema import COPIES
from qmq.types import Role

MASTERS = frozenset({Role.MASTER, Role.DELAY_MASTER})


def check_places(group: str, places: Mapping[str, dict[str, str]]) -> None:
    """Raise CannotRead unless the places are two, of two brokers of this group.

    An address may be another name of the same broker, a directory another path to the same files: the brokers say who
    they are, and files have numbers.
    """
    if missing := [copy for copy in COPIES if copy not in places]:
        raise CannotRead(f"broker group {group} has no {' and no '.join(missing)}")
    if is_same_place(*places.values()):
        raise CannotRead(f"master and slave of {group} are the same place: one copy proves nothing")
    with closing(open_copy(places[COPIES[0]])) as ours, closing(open_copy(places[COPIES[1]])) as theirs:
        if isinstance(ours, PathCopy) and isinstance(theirs, PathCopy):
            for base in {*ours.bases} & {*theirs.bases}:
                if ours.file_of(base) == theirs.file_of(base):
                    raise CannotRead(f"master and slave of {group} share the file of the segment at {base}")
        owners = dict(zip(COPIES, (ours.owner(), theirs.owner()), strict=True))
    for name, owner in owners.items():
        if owner.group and owner.group != group:
            raise CannotRead(f"the {name}'s place is a broker of {owner.group}, not of {group}")
    one, other = owners.values()
    if one.incarnation and one.incarnation == other.incarnation:
        raise CannotRead(f"master and slave of {group} are one broker, {one.incarnation}, under two names")
    if one.role in MASTERS and other.role in MASTERS:
        raise CannotRead(f"both places of {group} say that they are its master; look at the group, then audit it again")
