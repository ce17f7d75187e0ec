"""Shell. `GET /meta/routes`: routes for clients without gRPC.

    ?subject=a&subject=b&app=shop&clientId=4711&produces=true&held=a:00c0ffee00c0ffee

`held` names the version of each route that the client uses: `subject:version`, the version in hexadecimal. The answer
has the routes that differ, as the JSON of gRPC's RouteUpdate. Clients poll every few seconds. `kind=DELAY` requests all
groups of delay servers instead of the groups of the route.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from fastapi import Query, Request, Response
from fastapi.routing import APIRoute

from qmq.metaserver.http import errors
from qmq.metaserver.http.endpoints import JSON, make_route
from qmq.metaserver.http.errors import to_json
from qmq.metaserver.http.guard import Refused, caller_of, needs
from qmq.metaserver.routes.hub import RouteHubs, TooManyWatches
from qmq.proto import qmq_pb2 as pb
from qmq.rights import TokenRole
from qmq.types import GroupKind

CLIENT_TEXT_CHARS_MAX = 100


def make_routes(hubs: RouteHubs) -> list[APIRoute]:
    """Return the endpoint, for `build_app`."""

    @needs(TokenRole.CLIENT)
    async def meta_routes(
        request: Request,
        subject: Annotated[list[str], Query(min_length=1)],
        held: Annotated[list[str], Query(default_factory=list, description="subject:version in hexadecimal")],
        app: str = "",
        clientId: str = "",
        produces: Literal["true", "false"] = "false",
        kind: Literal["NORMAL", "DELAY"] = "NORMAL",
    ) -> Response:
        try:
            routes = await hubs.of(GroupKind[kind]).poll(
                subject,
                _versions(held),
                caller_of(request),
                app=app[:CLIENT_TEXT_CHARS_MAX],
                client_id=clientId[:CLIENT_TEXT_CHARS_MAX],
                produces=produces == "true",
            )
        except TooManyWatches as error:
            raise Refused(errors.NOT_SERVED, str(error)) from None
        answer = {"routes": [as_json(route.message) for route in routes]}
        return Response(to_json(answer), media_type="application/json", headers={"Cache-Control": "no-store"})

    summary = "routes of subjects, for clients without gRPC"
    return [make_route("GET", "/meta/routes", meta_routes, summary=summary, role=TokenRole.CLIENT, content=JSON)]


def _versions(held: Iterable[str]) -> dict[str, int]:
    versions = {}
    for pair in held:
        subject, colon, version = pair.rpartition(":")
        if not colon or len(version) > 16:
            raise Refused(errors.INVALID, f"held={pair[:120]!r} is not subject:version")
        try:
            versions[subject] = int(version, 16)
        except ValueError:
            raise Refused(errors.INVALID, f"held={pair[:120]!r}: the version is no hexadecimal number") from None
    return versions


def as_json(route: pb.SubjectRoute) -> dict[str, Any]:
    """Return one route in the form of the answer."""
    return {
        "subject": route.subject,
        "version": f"{route.version:016x}",
        "refused": route.refused,
        "groups": [
            {
                "brokerGroup": group.broker_group,
                "term": group.term,
                "writable": group.writable,
                "master": {"ip": group.master.ip, "servePort": group.master.serve_port},
            }
            for group in route.groups
        ],
    }
