"""Shell. Ask a metaserver which brokers there are, so that an audit of all groups needs no list of addresses."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Mapping
from typing import Any, NamedTuple

from qmq.audit.copies import CannotRead
from qmq.audit.schema import COPIES, COPIES_MIN
from qmq.control_plane import DIRECT

CALL_TIMEOUT_S = 10.0


class Standing(NamedTuple):
    """A broker group: how many copies acknowledge; why it takes no messages, a sentence each, empty if it does; whether
    it is one of delay servers."""

    min_copies: int = COPIES_MIN
    why: tuple[str, ...] = ()
    is_delay: bool = False


def find_places(metaserver: str, token: str) -> dict[str, dict[str, dict[str, str]]]:
    """Return by broker group and copy where its brokers are, as options of `open_copy`, as far as it has them.

    Copies are master, slave, and slave2, slave3, … of a group with more.

    Raises:
        CannotRead: the metaserver gives no answer, or knows no group.
    """
    found: dict[str, dict[str, dict[str, str]]] = {}
    for broker in sorted(_list_brokers(metaserver, token), key=lambda broker: str(broker.get("name"))):
        place = {"broker": f"{broker['ip']}:{broker['controlPort']}", "token": token}
        role = str(broker["role"]).lower().removeprefix("delay_")  # a group of delay servers has a log as others have
        places = found.setdefault(broker["group"], {})
        places[role if role not in places else f"{role}{sum(name.startswith(role) for name in places) + 1}"] = place
    if not found:
        raise CannotRead(f"{metaserver} knows no broker group")
    return {
        name: {copy: places[copy] for copy in sorted(places) if copy.startswith(COPIES)}
        for name, places in sorted(found.items())
    }


def find_standing(metaserver: str, token: str) -> dict[str, Standing]:
    """Return by broker group what the metaserver says of it. Raises CannotRead: it gives no answer."""
    return {str(row["groupName"]): _standing(row) for row in _list_groups(metaserver, token)}


def _standing(row: Mapping[str, Any]) -> Standing:
    closed = row.get("writable") is False
    why = tuple(row.get("why") or ("unknown",)) if closed else ()
    return Standing(int(row.get("minCopies", COPIES_MIN)), why, row.get("kind") == "DELAY")


def _list_brokers(metaserver: str, token: str) -> list[dict[str, Any]]:
    result = _ask("ListBrokers", metaserver, token)
    if not isinstance(result, dict) or result.get("status") != 0:
        raise CannotRead(f"ListBrokers at {metaserver}: {result}")
    return list(result["data"])


def _list_groups(metaserver: str, token: str) -> list[dict[str, Any]]:
    result = _ask("ListBrokerGroups", metaserver, token)
    if not isinstance(result, list):
        raise CannotRead(f"ListBrokerGroups at {metaserver}: {result}")
    return result


def _ask(action: str, metaserver: str, token: str) -> Any:
    url = metaserver if "://" in metaserver else f"http://{metaserver}"
    request = urllib.request.Request(
        f"{url.rstrip('/')}/management?action={action}&details=true", data=b"", headers={"X-Api-Token": token}
    )
    try:
        with DIRECT.open(request, timeout=CALL_TIMEOUT_S) as answer:
            return json.load(answer)
    except (OSError, ValueError) as error:
        raise CannotRead(f"{action} at {url}: {error}") from None
