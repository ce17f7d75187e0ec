"""Shell. Places of a broker group's copies: found through a metaserver, and checked to be different copies."""

from __future__ import annotations

import json
import urllib.parse
import urllib.request
from collections.abc import Mapping
from contextlib import closing
from itertools import combinations
from typing import Any, NamedTuple

from qmq.audit.copies import Away, CannotRead, Owner, PathCopy, is_same_place, open_copy
from qmq.audit.findings import COPIES, COPIES_MIN
from qmq.control_plane import DIRECT, first_answer, metaserver_urls
from qmq.errors import InvalidRequest
from qmq.types import MASTERS, Endpoint


def check_places(group: str, places: Mapping[str, dict[str, str]]) -> None:
    """Raise CannotRead unless each place is another broker of this group, and there are two or more.

    Two addresses may lead to one broker, two paths to the same files. So brokers are compared by incarnation, files by
    device and inode.
    """
    if missing := [copy for copy in COPIES if copy not in places]:
        raise CannotRead(f"broker group {group} has no {' and no '.join(missing)}")
    for first, second in combinations(places, 2):
        _check_two(group, (first, second), places[first], places[second])


def _check_two(group: str, names: tuple[str, str], first: Mapping[str, str], second: Mapping[str, str]) -> None:
    both = " and ".join(names)
    if is_same_place(first, second):
        raise CannotRead(f"{both} of {group} are the same place: one copy proves nothing")
    with closing(open_copy(first)) as ours, closing(open_copy(second)) as theirs:
        if isinstance(ours, PathCopy) and isinstance(theirs, PathCopy):
            for base, *_ in {*ours.files()} & {*theirs.files()}:
                raise CannotRead(f"{both} of {group} share the file of the segment at {base}")
        our_owner, their_owner = ours.owner(), theirs.owner()
    for name, owner in zip(names, (our_owner, their_owner)):
        if owner.group and owner.group != group:
            raise CannotRead(f"the {name}'s place is a broker of {owner.group}, not of {group}")
    if our_owner.incarnation and our_owner.incarnation == their_owner.incarnation:
        raise CannotRead(f"{both} of {group} are one broker, {our_owner.incarnation}, under two names")
    if our_owner.role in MASTERS and their_owner.role in MASTERS:
        raise CannotRead(f"both places of {group} report to be its master: check the group, then audit it again")


def places_now(places: Mapping[str, dict[str, str]]) -> dict[str, dict[str, str]] | None:
    """Return the same brokers under their present roles.

    Return None if a broker does not answer, not exactly one is master, or a slave lacks acknowledged frames.

    Raises:
        CannotRead: a broker refuses, or the place is a directory; waiting does not help.
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


CALL_TIMEOUT_S = 10.0


class GroupStatus(NamedTuple):
    """Status of a broker group: how many copies must acknowledge, readonly reasons (empty while writable), and whether
    it is a delay group.
    """

    min_copies: int = COPIES_MIN
    reasons: tuple[str, ...] = ()
    is_delay: bool = False


def find_places(metaserver: str, token: str) -> dict[str, dict[str, dict[str, str]]]:
    """Return {broker group: {copy: options of `open_copy`}} of all brokers that the metaserver lists.

    Copies are master, slave, and slave2, slave3, … in groups with more.

    Raises:
        CannotRead: the metaserver does not answer, or has no group.
    """
    found: dict[str, dict[str, dict[str, str]]] = {}
    for broker in sorted(_list_brokers(metaserver, token), key=lambda broker: str(broker.get("name"))):
        place = {"broker": str(Endpoint(broker["ip"], broker["controlPort"])), "token": token}
        role = str(broker["role"]).lower().removeprefix("delay_")  # logs of delay groups are audited like others
        places = found.setdefault(broker["group"], {})
        places[role if role not in places else f"{role}{sum(name.startswith(role) for name in places) + 1}"] = place
    if not found:
        raise CannotRead(f"{metaserver} has no broker group: register one with AddBroker, or check the address")
    return {
        name: {copy: places[copy] for copy in sorted(places) if copy.startswith(COPIES)}
        for name, places in sorted(found.items())
    }


def find_group_status(metaserver: str, token: str) -> dict[str, GroupStatus]:
    """Return {broker group: status} from the metaserver. Raise CannotRead if it does not answer."""
    return {str(row["groupName"]): _group_status(row) for row in _list_groups(metaserver, token)}


class Change(NamedTuple):
    """Command of the audit trail about a consumer group's position."""

    at_ms: int
    subject: str
    consumer_group: str


POSITIONING = ("ResetOffset", "RemoveConsumerGroup")


def find_changes(metaserver: str, token: str) -> list[Change]:
    """Return the commands that moved or removed consumer groups. Raise CannotRead if the trail cannot be read."""
    found = []
    for name in POSITIONING:
        asked: dict[str, object] | None = {"name": name, "limit": 1000}
        while asked is not None:
            answer = _ask("AuditTrail", metaserver, token, **asked)
            if not isinstance(answer, dict) or answer.get("status") != 0:
                raise CannotRead(f"AuditTrail at {metaserver}: {answer}")
            page = answer["data"]
            for row in page["rows"]:
                about = row["parameters"]
                found.append(Change(row["time"], about.get("subject", ""), about.get("group", "")))
            asked = None if page["next"] is None else asked | {"before": page["next"]}
    return found


def _group_status(row: Mapping[str, Any]) -> GroupStatus:
    closed = row.get("writable") is False
    reasons = tuple(row.get("why") or ("unknown",)) if closed else ()
    return GroupStatus(int(row.get("minCopies", COPIES_MIN)), reasons, row.get("kind") == "DELAY")


def _list_brokers(metaserver: str, token: str) -> list[dict[str, Any]]:
    result = _ask("ListBrokers", metaserver, token, details="true")
    if not isinstance(result, dict) or result.get("status") != 0:
        raise CannotRead(f"ListBrokers at {metaserver}: {result}")
    return list(result["data"])


def _list_groups(metaserver: str, token: str) -> list[dict[str, Any]]:
    result = _ask("ListBrokerGroups", metaserver, token, details="true")
    if not isinstance(result, list):
        raise CannotRead(f"ListBrokerGroups at {metaserver}: {result}")
    return result


def _ask(action: str, metaserver: str, token: str, **parameters: object) -> Any:
    query = urllib.parse.urlencode({"action": action} | parameters)

    def ask(url: str) -> Any:
        request = urllib.request.Request(f"{url}/management?{query}", data=b"", headers={"X-Api-Token": token})
        with DIRECT.open(request, timeout=CALL_TIMEOUT_S) as answer:
            return json.load(answer)

    try:
        return first_answer(metaserver_urls(metaserver), ask)
    except (OSError, ValueError, InvalidRequest) as error:
        raise CannotRead(f"{action} at {metaserver}: {error}") from None
