"""Shell. `GET /meta/routes`: routes for clients whose network lets no gRPC through.

    ?subject=a&subject=b&app=shop&clientId=4711&produces=true&held=a:00c0ffee00c0ffee

`held` names the version of each route that the client uses, as `subject:version` with the version in hexadecimal; the
answer has those routes alone that differ: the content of gRPC's RouteUpdate as JSON. Clients ask every few seconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from metaserver.http import errors
from metaserver.http.errors import to_json
from metaserver.http.guard import Refused, caller_of, needs
from metaserver.watch import TooManySubjects, WatchHub
from qmq.proto import qmq_pb2 as pb
from qmq.rights import TokenRole

CLIENT_TEXT_CHARS_MAX = 100


def make_routes(hub: WatchHub) -> list[Route]:
    """The endpoint, for `build_app`."""

    @needs(TokenRole.CLIENT)
    async def meta_routes(request: Request) -> Response:
        words = request.query_params
        subjects = words.getlist("subject")
        if not subjects:
            raise Refused(errors.INVALID, "name at least one subject: ?subject=NAME")
        try:
            routes = await hub.poll(
                subjects, _versions(words.getlist("held")), caller_of(request),
                app=words.get("app", "")[:CLIENT_TEXT_CHARS_MAX],
                client_id=words.get("clientId", "")[:CLIENT_TEXT_CHARS_MAX],
                produces=words.get("produces") == "true",
            )  # fmt: skip
        except TooManySubjects as error:
            raise Refused(errors.INVALID, str(error)) from None
        answer = {"routes": [as_json(route.message) for route in routes]}
        return Response(to_json(answer), media_type="application/json", headers={"Cache-Control": "no-store"})

    return [Route("/meta/routes", meta_routes, methods=["GET"])]


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
    """One route as the answer has it."""
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
