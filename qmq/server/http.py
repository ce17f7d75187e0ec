"""Shell. HTTP port of a broker or delay server: health, metrics, clients' connections, states."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from qmq.errors import AccessError, MissingRight, NotServed
from qmq.http_port import HEADERS, shown_token
from qmq.replication.node import Node
from qmq.rights import TokenRole
from qmq.server.access import Access
from qmq.states import Machine

CHECK_S = 5.0
"""Time limit of a token's check; a request to the metaserver takes less."""
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"

Answering = Callable[[Request], Awaitable[Response]]


class CopyHttp:
    """HTTP addresses of a process. Made by main. Health needs no token; all others need the role viewer.

    Args:
        connections, readiness, states: called on the loop.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        access: Access,
        connections: Callable[[], list[dict[str, object]]],
        readiness: Callable[[], dict[str, object]],
        states: Callable[[], list[dict[str, object]]],
    ) -> None:
        self._registry = registry
        self._access = access
        self._connections = connections
        self._readiness = readiness
        self._states = states
        self._rendering = asyncio.Lock()

    def app(self) -> Starlette:
        routes = {
            "/health/live": self._live,
            "/health/ready": self._ready,
            "/metrics": self._guarded(self._metrics),
            "/connections": self._guarded(self._list),
            "/states": self._guarded(self._list_states),
        }
        return Starlette(routes=[Route(path, answer, methods=["GET"]) for path, answer in routes.items()])

    async def _live(self, _: Request) -> Response:
        return PlainTextResponse("ok")

    async def _ready(self, _: Request) -> Response:
        facts = self._readiness()
        return JSONResponse(facts, 200 if facts["ready"] else 503)

    async def _metrics(self, _: Request) -> Response:
        async with self._rendering:  # 10,000 subjects keep a thread busy for some 30 ms
            text = await asyncio.to_thread(lambda: render(self._registry.collect()))
        return Response(text, media_type=PROMETHEUS)

    async def _list(self, _: Request) -> Response:
        return JSONResponse(self._connections())

    async def _list_states(self, _: Request) -> Response:
        return JSONResponse(self._states())

    def _guarded(self, answer: Answering) -> Answering:
        async def guarded(request: Request) -> Response:
            try:
                async with asyncio.timeout(CHECK_S):
                    caller = await self._access.check(shown_token(request.headers))
                caller.require_role(TokenRole.VIEWER, TokenRole.BROKER)
            except MissingRight as error:
                return PlainTextResponse(f"{error}\n", 403)
            except AccessError as error:
                return PlainTextResponse(f"{error} ({HEADERS})\n", 401)
            except (NotServed, TimeoutError) as error:
                return PlainTextResponse(f"{str(error) or 'the token cannot be checked now'}\n", 503)
            return await answer(request)

        return guarded


T = TypeVar("T")

_SUFFIXES = {"counter": "_total", "gauge": "", "histogram": ""}
"""Suffix of a family's name, by its kind. Other kinds are not used."""


class Series(Metric):
    """A gauge or counter with any number of series.

    Args:
        kind: "gauge" or "counter".
        labels: names of the labels, at least one.
    """

    def __init__(self, name: str, text: str, kind: str, labels: Sequence[str]) -> None:
        self.name = name
        self.documentation = text
        self.type = kind
        self.unit = ""
        self._labels = tuple(labels)
        self._rows = list[tuple[Sequence[str], float]]()

    def add_metric(self, values: Sequence[str], value: float) -> None:
        """Add a series; `values` are the values of its labels, in their order."""
        self._rows.append((values, value))

    @property
    def samples(self) -> list[Sample]:  # type: ignore[override]  # for prometheus-client, which makes it anew each time
        name = self.name + _SUFFIXES[self.type]
        return [Sample(name, dict(zip(self._labels, values, strict=True)), value) for values, value in self._rows]

    def lines(self, quoted: Callable[[str], str], shown: Callable[[float], str]) -> Iterable[str]:
        """Return the line of each series. The families of a page share the encoders of label values and numbers."""
        if not self._rows:
            return ()
        labels, values = zip(*self._rows, strict=True)
        columns = dict(zip(self._labels, zip(*labels, strict=True), strict=True))
        names = sorted(columns)
        form = self.name + _SUFFIXES[self.type] + "{" + ",".join(f'{name}="%s"' for name in names) + "} %s\n"
        return map(form.__mod__, zip(*(map(quoted, columns[name]) for name in names), map(shown, values), strict=True))


class _Memo(dict[T, str]):
    """Cache of texts: a page has each subject several times, and the same few numbers thousands of times."""

    def __init__(self, make: Callable[[T], str]) -> None:
        super().__init__()
        self._make: Callable[[T], str] = make

    def __missing__(self, key: T) -> str:
        made = self[key] = self._make(key)
        return made


def render(families: Iterable[Metric]) -> bytes:
    """Return families as a page in Prometheus's text format 0.0.4."""
    lines: list[str] = []
    quoted, shown = _Memo[str](_quoted).__getitem__, _Memo[float](floatToGoString).__getitem__
    for family in families:
        name = family.name + _SUFFIXES[family.type]
        lines.append(f"# HELP {name} {_escaped(family.documentation)}\n# TYPE {name} {family.type}\n")
        lines += family.lines(quoted, shown) if isinstance(family, Series) else map(_line, family.samples)
    return "".join(lines).encode()


def _line(sample: Sample) -> str:
    labels = ",".join([f'{name}="{_quoted(value)}"' for name, value in sorted(sample.labels.items())])
    value = floatToGoString(sample.value)  # type: ignore[no-untyped-call]
    return f"{sample.name}{f'{{{labels}}}' if labels else ''} {value}\n"


def _quoted(text: str) -> str:
    return _escaped(text).replace('"', r"\"")


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


def machines(node: Node[Any]) -> Iterator[tuple[str, Machine[Any]]]:
    """Yield this process's state machines, each with its name."""
    yield "log", node.log.health
    if node.master is not None:
        for watch in node.master.slaves.all:
            yield f"its slave {watch.name}".rstrip(), watch.follower
    elif node.slave is not None:
        yield "slave", node.slave.life


def states(node: Node[Any], *, now_ms: int) -> list[dict[str, object]]:
    """Return each machine's state and last transitions, oldest first, as JSON.

    Args:
        now_ms: by the clock of the machines' owners, which is that of `Host.monotonic_ms`.
    """
    return [
        {
            "about": about,
            "state": machine.state.name,
            "illegal": machine.table.illegal,
            "transitions": [
                {
                    "before": move.before.name,
                    "event": move.event,
                    "after": move.after.name,
                    "secondsAgo": round((now_ms - move.at_ms) / 1000, 1) if move.at_ms else None,
                }
                for move in machine.history
            ],
        }
        for about, machine in machines(node)
    ]
