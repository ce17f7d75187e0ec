"""Shell. Whether the two places of a broker group are its two copies: one that is read twice proves nothing."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from itertools import combinations

from qmq.audit.copies import Away, CannotRead, Owner, PathCopy, is_same_place, open_copy
from qmq.audit.schema import COPIES
from qmq.types import MASTERS


def check_places(group: str, places: Mapping[str, dict[str, str]]) -> None:
    """Raise CannotRead unless the places are two or more, each of another broker of this group.

    An address may be another name of the same broker, a directory another path to the same files: the brokers say who
    they are, and files have numbers.
    """
    if missing := [copy for copy in COPIES if copy not in places]:
        raise CannotRead(f"broker group {group} has no {' and no '.join(missing)}")
    for one, other in combinations(places, 2):
        _check_two(group, (one, other), places[one], places[other])


def _check_two(group: str, names: tuple[str, str], one: Mapping[str, str], other: Mapping[str, str]) -> None:
    both = " and ".join(names)
    if is_same_place(one, other):
        raise CannotRead(f"{both} of {group} are the same place: one copy proves nothing")
    with closing(open_copy(one)) as ours, closing(open_copy(other)) as theirs:
        if isinstance(ours, PathCopy) and isinstance(theirs, PathCopy):
            for base, *_ in {*ours.files()} & {*theirs.files()}:
                raise CannotRead(f"{both} of {group} share the file of the segment at {base}")
        first, second = ours.owner(), theirs.owner()
    for name, owner in zip(names, (first, second)):
        if owner.group and owner.group != group:
            raise CannotRead(f"the {name}'s place is a broker of {owner.group}, not of {group}")
    if first.incarnation and first.incarnation == second.incarnation:
        raise CannotRead(f"{both} of {group} are one broker, {first.incarnation}, under two names")
    if first.role in MASTERS and second.role in MASTERS:
        raise CannotRead(f"both places of {group} say that they are its master; look at the group, then audit it again")


def places_now(places: Mapping[str, dict[str, str]]) -> dict[str, dict[str, str]] | None:
    """Return the same brokers by the roles that they have now.

    None: one does not answer, not just one of them is master, or a slave lacks what the master acknowledged.

    Raises:
        CannotRead: a broker refuses, or it is a directory: waiting does not help.
    """
    owners: dict[str, Owner] = {}
    for name, place in places.items():
        if "broker" not in place:
            raise CannotRead(f"{name} is a directory")
        try:
            with closing(open_copy(place)) as copy:
                owners[name] = copy.owner()
        except Away:
            return None
    masters = [name for name, owner in owners.items() if owner.role in MASTERS]
    slaves = [name for name in owners if name not in masters]
    if len(masters) != 1 or any(owners[name].incarnation not in owners[masters[0]].in_step for name in slaves):
        return None
    return {name: places[now] for name, now in zip(places, [*masters, *slaves], strict=True)}
