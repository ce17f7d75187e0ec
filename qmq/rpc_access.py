"""Shell. Acceptor of a gRPC server: it rejects calls whose token has none of the roles in the method's entry.

Every server of qmq has one. Methods that the table lacks are refused for all callers.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextvars import ContextVar
from typing import Any

import grpc
import grpc.aio

from qmq.errors import AccessError, CallError, MissingRight, NotServed, OperatorError, QmqError
from qmq.rights import Caller, TokenRole
from qmq.types import Endpoint

TOKEN_KEY = "x-api-token"

Needed = Mapping[str, frozenset[TokenRole]]
"""Method name -> roles of which a caller needs one."""

_caller: ContextVar[Caller] = ContextVar("caller")


def caller() -> Caller:
    """Return the caller of the current call. Set in the task of a call that the acceptor accepted."""
    return _caller.get()


class RpcAcceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpcio comes without types
    """Interceptor of one server. Made by main.

    Args:
        needed: roles that each method requires.
        check: returns the caller of a token; raises AccessError.
        refused: called for each rejected call with the method, the caller's host and the reason.
    """

    def __init__(
        self, needed: Needed, check: Callable[[str], Awaitable[Caller]], refused: Callable[[str, str, str], None]
    ) -> None:
        self._needed = needed
        self._check = check
        self._refused = refused

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        name = str(details.method).rpartition("/")[2]
        handler = await continuation(details)
        try:
            token = next((value for key, value in details.invocation_metadata if key == TOKEN_KEY), "")
            known = await self._check(token if isinstance(token, str) else "")
            known.require_role(*self._needed.get(name, ()))
        except (AccessError, NotServed) as error:
            return self._refusal(name, error, handler)
        _caller.set(known)
        return handler

    def _refusal(self, name: str, error: AccessError | NotServed, handler: Any) -> Any:
        async def refuse(request: Any, context: Any) -> None:
            self._refused(name, Endpoint.of_peer(context.peer()).host, str(error))
            await context.abort(status_of(error), f"{error} (metadata {TOKEN_KEY})")

        async def refuse_stream(request: Any, context: Any) -> AsyncIterator[Any]:
            await refuse(request, context)
            yield  # never reached; makes it a stream

        sends_stream, returns_stream = (
            (handler.request_streaming, handler.response_streaming) if handler else (False, False)
        )
        behaviour = refuse_stream if returns_stream else refuse
        kind = f"{'stream' if sends_stream else 'unary'}_{'stream' if returns_stream else 'unary'}_rpc_method_handler"
        return getattr(grpc, kind)(behaviour)


_STATUS: Mapping[type[BaseException], grpc.StatusCode] = {
    MissingRight: grpc.StatusCode.PERMISSION_DENIED,
    AccessError: grpc.StatusCode.UNAUTHENTICATED,
    OperatorError: grpc.StatusCode.FAILED_PRECONDITION,
    CallError: grpc.StatusCode.INVALID_ARGUMENT,
}


def status_of(error: QmqError) -> grpc.StatusCode:
    """Return the gRPC status of the nearest class in the table, or UNAVAILABLE, at which the caller repeats."""
    found = (_STATUS[cls] for cls in type(error).__mro__ if cls in _STATUS)
    return next(found, grpc.StatusCode.UNAVAILABLE)
