"""Shell. Ask a metaserver which brokers there are, so that an audit of all groups needs no list of addresses."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

from qmq.audit.copies import CannotRead
from qmq.audit.schema import COPIES
from qmq.control_plane import DIRECT

CALL_TIMEOUT_S = 10.0


def find_places(metaserver: str, token: str) -> dict[str, dict[str, dict[str, str]]]:
    """Return by broker group and copy where its brokers are, as options of `open_copy`, as far as it has them.

    Raises:
        CannotRead: the metaserver gives no answer, or knows no group.
    """
    found: dict[str, dict[str, dict[str, str]]] = {}
    for broker in _list_brokers(metaserver, token):
        place = {"broker": f"{broker['ip']}:{broker['controlPort']}", "token": token}
        copy = str(broker["role"]).lower().removeprefix("delay_")  # a group of delay servers has a log as others have
        found.setdefault(broker["group"], {})[copy] = place
    if not found:
        raise CannotRead(f"{metaserver} knows no broker group")
    return {name: {copy: places[copy] for copy in COPIES if copy in places} for name, places in sorted(found.items())}


def _list_brokers(metaserver: str, token: str) -> list[dict[str, Any]]:
    url = metaserver if "://" in metaserver else f"http://{metaserver}"
    request = urllib.request.Request(
        f"{url.rstrip('/')}/management?action=ListBrokers&details=true", data=b"", headers={"X-Api-Token": token}
    )
    try:
        with DIRECT.open(request, timeout=CALL_TIMEOUT_S) as answer:
            result = json.load(answer)
    except (OSError, ValueError) as error:
        raise CannotRead(f"ListBrokers at {url}: {error}") from None
    if not isinstance(result, dict) or result.get("status") != 0:
        raise CannotRead(f"ListBrokers at {url}: {result}")
    return list(result["data"])
