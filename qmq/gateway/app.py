"""Shell. HTTP addresses of the gateway, with their OpenAPI document. TLS ends at nginx (docs/gateway.md)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, FastAPI, Header, Path, Query, Request, Response, Security
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from fastapi.security import HTTPBearer
from pydantic import BaseModel, Field, ValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from qmq.errors import QmqError
from qmq.gateway.clients import Clients, TokenClients
from qmq.gateway.deliveries import Decision
from qmq.gateway.guard import VIEWER, Access, Guard, as_response
from qmq.gateway.metrics import Metrics
from qmq.gateway.models import (
    AckIn,
    BatchIn,
    BatchSent,
    DeadLetterIn,
    Decided,
    Error,
    ErrorBody,
    MessageIn,
    NackIn,
    Pulled,
    RawQuery,
    RenewIn,
    Result,
    Sent,
    describe,
    sent_of,
)
from qmq.gateway.outcomes import STATUS, Code, HttpError, Refused, error_of, headers_of, worst
from qmq.gateway.session import EVENT_STREAM, ClientLeft, Place, Session, SessionTerms, events, while_connected
from qmq.gateway.settings import GatewaySettings
from qmq.http_port import shown_token
from qmq.version import VERSION

DESCRIPTION = """
Producing and consuming without a client library. Outcomes, rights and limits are those of the native protocol.
A status below 300 means that all of a request is done; any other body has an `error` with a remedy.
"""

Subject = Annotated[str, Path(min_length=1, max_length=300, description="Subject, percent-encoded.")]
Group = Annotated[str, Path(min_length=1, max_length=100, description="Consumer group, percent-encoded.")]
IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        pattern=r"^[!-~]{8,90}$",
        description="Becomes the message id; a repeat is not stored again. Unique per message: use a UUID.",
    ),
]


CLIENT = r"^[A-Za-z0-9_.-]{1,50}$"
ClientId = Annotated[str, Query(pattern=CLIENT, description="Name of the client.")]


class Terms(BaseModel):
    """Query parameters of a session."""

    start: Literal["latest", "earliest"] | datetime = Field("latest", description="First message of a new group.")
    tags: list[str] = Field(default_factory=list, max_length=10, description="Only messages with these tags.")
    tag_mode: Literal["any", "all"] = "any"
    retries_max: int = Field(32, ge=1, le=1_000_000, description="Attempts until a message becomes a dead letter.")
    retry_delay_s: float = Field(5.0, ge=0, le=86_400, description="Time between attempts, unless a nack names one.")
    lease_s: float | None = Field(None, gt=0, description="Time to decide a message, else it goes back to the group.")
    client: str = Field("default", pattern=CLIENT, description="Name of the client; each running one has its own.")

    def of_session(self) -> SessionTerms:
        return SessionTerms(self.start, tuple(self.tags), self.tag_mode, self.retries_max, self.retry_delay_s)


class PullQuery(Terms):
    """Query parameters of a pull."""

    max: int = Field(10, ge=1, le=1_000, description="Most messages of the answer.")
    wait_s: float = Field(10.0, ge=0, description="Wait for the first message, up to the gateway's limit.")


class StreamQuery(Terms):
    """Query parameters of a stream."""

    unacked_max: int = Field(100, ge=1, le=100_000, description="Undecided messages at which the stream pauses.")


def build_app(settings: GatewaySettings, clients: Clients, access: Access, metrics: Metrics) -> FastAPI:
    app = FastAPI(
        title="qmq gateway",
        version=VERSION,
        description=DESCRIPTION,
        docs_url=None,
        redoc_url=None,
        strict_content_type=False,
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )
    app.add_middleware(Guard, access=access, metrics=metrics, settings=settings)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["Authorization", "Content-Type", "Idempotency-Key"],
            expose_headers=["Idempotent-Replayed", "Retry-After"],
        )
    _handle_errors(app)
    app.include_router(_produce_routes(clients, access))
    app.include_router(_batch_routes(clients, access))
    app.include_router(_consume_routes(clients, access, settings))
    app.include_router(_decide_routes(clients, settings))
    app.include_router(_own_routes(clients, access, metrics))
    return app


def _handle_errors(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def not_as_described(request: Request, error: RequestValidationError) -> Response:
        return as_response(HttpError(Code.INVALID, describe(error.errors())))

    @app.exception_handler(HTTPException)
    async def not_found(request: Request, error: HTTPException) -> Response:
        path = request.url.path[:200]
        if error.status_code == 404:
            return as_response(HttpError(Code.NOT_FOUND, f"there is nothing at {path}"))
        if error.status_code == 405:
            text = f"{request.method[:20]} is not for {path}"
            return as_response(HttpError(Code.METHOD, text, dict(error.headers or {})))
        return as_response(HttpError(Code.INVALID, f"the body is no JSON: {error.detail}"))

    @app.exception_handler(QmqError)
    async def failed(request: Request, error: QmqError) -> Response:
        return as_response(error_of(error))

    @app.exception_handler(Refused)
    async def refused(request: Request, error: Refused) -> Response:
        return as_response(error.error)

    @app.exception_handler(ClientLeft)
    async def left(request: Request, error: ClientLeft) -> Response:
        return Response(status_code=499)


_TOKEN = Security(HTTPBearer(scheme_name="token", auto_error=False, description="API token of the installation."))
"""Used only in the document, because the guard has checked the token."""


def _errors(*codes: Code, model: Any = Error) -> dict[int | str, Any]:
    """Return the document's entries for errors, including those of every address with a token."""
    everywhere = (Code.INVALID, Code.UNAUTHORIZED, Code.MISSING_RIGHT, Code.TOO_SLOW, Code.TOO_LARGE, Code.LIMIT)
    found: dict[int | str, Any] = {}
    for code in (*everywhere, Code.INTERNAL, Code.NOT_SERVED, *codes):
        found[STATUS[code]] = {"model": model, "description": str(code)}
    return found


def _router() -> APIRouter:
    return APIRouter(dependencies=[_TOKEN], strict_content_type=False)


def _as_json(model: BaseModel, status: int, headers: Mapping[str, str] | None = None) -> Response:
    return Response(model.model_dump_json(exclude_none=True), status, headers, media_type="application/json")


def _several(code: Code | None, count: int, noun: str) -> ErrorBody | None:
    """Return the error of a request whose parts have separate outcomes, or None."""
    if code is None:
        return None
    return ErrorBody.model_validate(HttpError(code, f"{count} of the {noun} have another outcome").as_json())


async def _send_one(
    clients: Clients, access: Access, request: Request, subject: str, message: MessageIn, key: str | None
) -> Response:
    token = request.scope["qmq.token"]
    await access.check_subject(token, subject, produces=True)
    with clients.of(token) as token_clients:
        ((receipt, is_repeat),) = await token_clients.send(subject, [message], key)
    sent, code = sent_of(receipt)
    headers = {"Idempotent-Replayed": "true"} if is_repeat else {}
    return _as_json(sent, STATUS[code] if code else 201, headers | (headers_of(code) if code else {}))


def _stores(model: type[BaseModel]) -> dict[str, Any]:
    """Return the entries of the document for addresses that store."""
    errors = _errors(Code.REPEAT_DIFFERS, Code.UNKNOWN, model=model | Error)
    return {"status_code": 201, "response_model": model, "responses": errors}


def _produce_routes(clients: Clients, access: Access) -> APIRouter:
    router = _router()

    @router.post("/v1/subjects/{subject}/messages", **_stores(Sent), summary="store a message")
    async def produce(request: Request, subject: Subject, message: MessageIn, key: IdempotencyKey = None) -> Response:
        return await _send_one(clients, access, request, subject, message, key)

    @router.post(
        "/v1/subjects/{subject}/messages:raw",
        **_stores(Sent),
        summary="store the request's bytes as a message",
        description="The payload is the body of the request, and its media type is the header Content-Type.",
        openapi_extra={"requestBody": {"content": {"*/*": {"schema": {"type": "string", "format": "binary"}}}}},
    )
    async def produce_raw(
        request: Request, subject: Subject, query: Annotated[RawQuery, Query()], key: IdempotencyKey = None
    ) -> Response:
        try:
            message = query.message(await request.body(), request.headers.get("content-type"))
        except ValidationError as error:
            raise Refused(Code.INVALID, describe(error.errors())) from None
        return await _send_one(clients, access, request, subject, message, key)

    return router


def _batch_routes(clients: Clients, access: Access) -> APIRouter:
    router = _router()

    @router.post(
        "/v1/subjects/{subject}/messages:batch",
        **_stores(BatchSent),
        summary="store messages",
        description="Each message has an outcome of its own. The status is 201 if all are stored; else it is that of "
        "an unknown outcome, of one that a repeat may change, or of the first error, in this order. With an "
        "Idempotency-Key a repeat stores only messages that are not stored; their ids are the key, a point and the "
        "position.",
    )
    async def produce_batch(request: Request, subject: Subject, batch: BatchIn, key: IdempotencyKey = None) -> Response:
        await access.check_subject(request.scope["qmq.token"], subject, produces=True)
        with clients.of(request.scope["qmq.token"]) as token_clients:
            found = await token_clients.send(subject, batch.messages, key)
        outcomes = [sent_of(receipt) for receipt, _ in found]
        codes = [code for _, code in outcomes if code is not None]
        code = worst(codes)
        answer = BatchSent(outcomes=[sent for sent, _ in outcomes], error=_several(code, len(codes), "messages"))
        return _as_json(answer, STATUS[code] if code else 201, headers_of(code) if code else {})

    return router


async def _session(token_clients: TokenClients, clients: Clients, subject: str, group: str, terms: Terms) -> Session:
    place = Place(subject, group, terms.client)
    return await token_clients.session(place, terms.of_session(), is_full=clients.is_full)


def _lease_s(asked_s: float | None, settings: GatewaySettings) -> float:
    if asked_s is not None and asked_s > settings.lease_s_max:
        raise Refused(Code.INVALID, f"lease_s: the gateway's limit is {settings.lease_s_max}")
    return settings.lease_s if asked_s is None else asked_s


def _consume_routes(clients: Clients, access: Access, settings: GatewaySettings) -> APIRouter:
    router = _router()

    @router.post(
        "/v1/subjects/{subject}/groups/{group}/pull",
        response_model=Pulled,
        responses=_errors(Code.OTHER_TERMS),
        summary="pull messages for a consumer group",
        description="Waits for the first message. The pulls of a client's session have the same parameters.",
    )
    async def pull(request: Request, subject: Subject, group: Group, query: Annotated[PullQuery, Query()]) -> Response:
        lease_s, wait_s = _lease_s(query.lease_s, settings), min(query.wait_s, settings.wait_s_max)
        await access.check_subject(request.scope["qmq.token"], subject, produces=False)
        with clients.of(request.scope["qmq.token"]) as token_clients:
            session = await _session(token_clients, clients, subject, group, query)
            with session:
                messages = await while_connected(request, session.pull(query.max, wait_s=wait_s, lease_s=lease_s))
            return _as_json(Pulled(messages=messages, trouble=session.trouble), 200)

    @router.get(
        "/v1/subjects/{subject}/groups/{group}/stream",
        response_class=StreamingResponse,
        responses=_errors(Code.OTHER_TERMS)
        | {200: {"description": "server-sent events", "content": {EVENT_STREAM: {"schema": {"type": "string"}}}}},
        summary="pull messages for a consumer group, as server-sent events",
        description="Events `message` have the JSON of a pulled message; decide each with a POST. It pauses at "
        "`unacked_max` undecided messages. An event `error` ends it.",
    )
    async def stream(
        request: Request, subject: Subject, group: Group, query: Annotated[StreamQuery, Query()]
    ) -> Response:
        lease_s = _lease_s(query.lease_s, settings)
        await access.check_subject(request.scope["qmq.token"], subject, produces=False)
        with clients.of(request.scope["qmq.token"]) as token_clients:
            session = await _session(token_clients, clients, subject, group, query)
        made = events(session, unacked_max=query.unacked_max, lease_s=lease_s, keep_alive_s=settings.keep_alive_s)
        return StreamingResponse(
            made, media_type=EVENT_STREAM, headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        )

    @router.delete(
        "/v1/subjects/{subject}/groups/{group}/session",
        status_code=204,
        responses=_errors(),
        summary="end a client's session",
        description="Its undecided messages go back to the group at once. Without a session, nothing changes.",
    )
    async def end_session(request: Request, subject: Subject, group: Group, client: ClientId = "default") -> Response:
        with clients.of(request.scope["qmq.token"]) as token_clients:
            if (session := token_clients.find_place(Place(subject, group, client))) is not None:
                await token_clients.end(session)
        return Response(status_code=204)

    return router


Apply = Callable[[Session, list[str]], Awaitable[list[Result]]]
_CODES = {"gone": Code.GONE, "decided": Code.DECIDED, "unknown": Code.UNKNOWN}


def _decide_routes(clients: Clients, settings: GatewaySettings) -> APIRouter:
    router = APIRouter(
        prefix="/v1/subjects/{subject}/groups/{group}",
        dependencies=[_TOKEN],
        responses=_errors(Code.DECIDED, Code.GONE, Code.UNKNOWN, model=Decided | Error),
        strict_content_type=False,
    )

    async def decided(request: Request, handles: list[str], apply: Apply) -> Response:
        """Apply a decision to the sessions of the handles, and join their results."""
        subject, group = request.path_params["subject"], request.path_params["group"]
        with clients.of(request.scope["qmq.token"]) as token_clients:
            sessions = token_clients.find(handles, subject, group)
            results = {handle: Result(handle=handle, outcome="gone") for handle in handles}
            for session in {session.id: session for session in sessions.values() if session is not None}.values():
                own = [handle for handle, found in sessions.items() if found is session]
                with session:
                    results |= {result.handle: result for result in await apply(session, own)}
        codes = [_CODES[result.outcome] for result in results.values() if result.outcome in _CODES]
        code = worst(codes)
        answer = Decided(results=[results[handle] for handle in handles], error=_several(code, len(codes), "handles"))
        return _as_json(answer, STATUS[code] if code else 200, headers_of(code) if code else {})

    @router.post("/ack", response_model=Decided, summary="ack messages: they are done")
    async def ack(request: Request, subject: Subject, group: Group, given: AckIn) -> Response:
        return await decided(request, given.handles, lambda session, own: session.decide(own, Decision.ACK))

    @router.post("/nack", response_model=Decided, summary="have messages delivered again")
    async def nack(request: Request, subject: Subject, group: Group, given: NackIn) -> Response:
        reason, delay_s = given.reason, given.delay_s
        return await decided(
            request, given.handles, lambda session, own: session.decide(own, Decision.NACK, reason, delay_s)
        )

    @router.post("/dead-letter", response_model=Decided, summary="give messages up, with a reason")
    async def dead_letter(request: Request, subject: Subject, group: Group, given: DeadLetterIn) -> Response:
        return await decided(
            request, given.handles, lambda session, own: session.decide(own, Decision.DEAD_LETTER, given.reason)
        )

    @router.post("/renew", response_model=Decided, summary="begin the leases of messages anew")
    async def renew(request: Request, subject: Subject, group: Group, given: RenewIn) -> Response:
        lease_s = _lease_s(given.lease_s, settings)
        return await decided(request, given.handles, lambda session, own: session.renew(own, lease_s))

    return router


def _own_routes(clients: Clients, access: Access, metrics: Metrics) -> APIRouter:
    router = APIRouter()

    @router.get("/live", response_class=PlainTextResponse, summary="whether the process runs")
    async def live() -> Response:
        return PlainTextResponse("ok")

    @router.get(
        "/ready",
        responses={503: {"description": "it stops, or its metaserver does not answer"}},
        summary="whether it serves requests",
    )
    async def ready() -> Response:
        trouble = "the gateway stops" if clients.is_stopping else await access.trouble()
        return JSONResponse({"ready": not trouble, "trouble": trouble}, 503 if trouble else 200)

    @router.get(
        "/metrics",
        response_class=PlainTextResponse,
        responses={status: entry for status, entry in _errors().items() if status in (401, 403, 503)},
        dependencies=[_TOKEN],
        summary="metrics for Prometheus; needs a token with the role viewer",
    )
    async def read_metrics(request: Request) -> Response:
        await access.check(shown_token(request.headers), VIEWER)
        text = await asyncio.to_thread(metrics.render)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    return router
