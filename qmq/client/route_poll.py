"""Shell. Asks the metaserver for routes over HTTP, for networks that let no gRPC through. Blocks."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode

from qmq.client.routing import GroupRoute, SubjectRoute
from qmq.control_plane import get
from qmq.errors import AccessError
from qmq.types import Endpoint, GroupKind

SUBJECTS_PER_REQUEST = 40
"""Names of 100 bytes, escaped and with their versions, stay below the 64 KiB that servers take as an address."""
ANSWER_BYTES_MAX = 64 << 20


def poll(
    metaserver: str,
    subjects: Sequence[str],
    held: Mapping[str, int],
    *,
    token: str,
    app: str,
    client_id: str,
    produces: bool,
    timeout_s: float,
    kind: GroupKind = GroupKind.NORMAL,
) -> list[SubjectRoute]:
    """Return the routes of `subjects` that differ from the versions `held`.

    Raises:
        OSError: nobody answers. ValueError: what answers is no metaserver of ours.
        AccessError: the token is not accepted.
    """
    routes: list[SubjectRoute] = []
    for begin in range(0, len(subjects), SUBJECTS_PER_REQUEST):
        names = subjects[begin : begin + SUBJECTS_PER_REQUEST]
        words = [("app", app), ("clientId", client_id), ("produces", "true" if produces else "false")]
        words += [("kind", kind.name)] if kind != GroupKind.NORMAL else []
        words += [("subject", name) for name in names]
        words += [("held", f"{name}:{held[name]:016x}") for name in names if name in held]
        request = urllib.request.Request(f"{metaserver}/meta/routes?{urlencode(words)}")
        request.add_header("X-Api-Token", token)
        routes += _parse(_read(request, timeout_s))
    return routes


def _read(request: urllib.request.Request, timeout_s: float) -> bytes:
    try:
        return get(request, timeout_s=timeout_s, bytes_max=ANSWER_BYTES_MAX)
    except HTTPError as error:
        with error:
            text = error.read(1000).decode("utf-8", "replace")
        if error.code in (401, 403):
            raise AccessError(f"the metaserver does not accept the token: {text}") from None
        raise


def _parse(data: bytes) -> list[SubjectRoute]:
    try:
        return [_route(route) for route in json.loads(data)["routes"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"this is no answer of a metaserver: {error!r}") from None


def _route(route: Any) -> SubjectRoute:
    return SubjectRoute(
        str(route["subject"]),
        tuple(
            GroupRoute(
                str(group["brokerGroup"]),
                Endpoint(str(group["master"]["ip"]), int(group["master"]["servePort"])),
                group["writable"] is True,
                int(group["term"]),
            )
            for group in route["groups"]
        ),
        str(route["refused"]),
        int(route["version"], 16),
    )
