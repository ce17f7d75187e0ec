"""Shell. One process of a worker: imports the consumers, runs them until SIGTERM, reports each second.

    python -m qmq.worker.process FD OPTIONS

`FD` is a socket of the parent. The process writes its reports there, one JSON object a line:

    state, reason   health of its consumers and producers (qmq.client.health), while the consumers run
    samples         its numbers (qmq.client.numbers): [name, [label, …], value]
    is_unique       whether a consumer has a fixed id
    error           reason of the end

Before and after the run of the consumers a report is empty. It shows only that no event loop of the process blocks. At
the end of file the parent has ended, and the process ends as at SIGTERM. It ignores SIGINT, which a terminal sends to
all processes.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import signal
import socket
import sys
from collections.abc import Iterable
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any, TypeVar

import uvloop

from qmq.blocking.background import current
from qmq.blocking.consumer import Consumer as BlockingConsumer
from qmq.client.consumer import Consumer
from qmq.client.health import Health, worst
from qmq.client.numbers import read
from qmq.client.producer import Producer
from qmq.errors import AccessError, InvalidRequest, QmqError
from qmq.logs import configure
from qmq.reply import Requester
from qmq.worker.plan import Exit

log = logging.getLogger(__name__)

REPORT_S = 1.0
AnyConsumer = Consumer | BlockingConsumer
C = TypeVar("C")


@dataclass(frozen=True)
class Options:
    """Options of a worker that its processes need.

    Args:
        setup: function that a process calls before it imports the targets, as "module:function".
        path: folders for the import of modules, as in `sys.path`.
        kill_after_s: time after which a process ends if no call of a listener can begin; infinite for never.
    """

    targets: tuple[str, ...]
    concurrency: int | None = None
    processes: int = 1
    log_level: str = "INFO"
    log_format: str = "text"
    setup: str = ""
    path: tuple[str, ...] = ()
    kill_after_s: float = math.inf

    @property
    def as_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of_json(cls, text: str) -> Options:
        words = json.loads(text)
        return cls(**words | {name: tuple(words[name]) for name in ("targets", "path")})


class CannotRun(Exception):
    """Error: the worker cannot start; the text names the remedy."""


def _call(path: str) -> None:
    """Call the function at "module:function"."""
    module, _, function = path.partition(":")
    try:
        getattr(import_module(module), function)()
    except Exception as error:
        raise CannotRun(f"{path} failed: {type(error).__name__}: {error}") from error


def load(targets: Iterable[str]) -> list[AnyConsumer]:
    """Return the consumers at "module:name", or all consumers of a module.

    Raises:
        CannotRun: a target has no consumer.
    """
    found: list[AnyConsumer] = []
    for target in targets:
        module_name, _, name = target.partition(":")
        here = {key: value for key, value in names_in(module_name).items() if isinstance(value, AnyConsumer)}
        if name and name not in here:
            others = f"it has {', '.join(here)}" if here else "it has no consumer"
            raise CannotRun(f"{module_name} has no consumer {name!r}: {others}. Name one as {module_name}:consumer")
        if not here:
            raise CannotRun(f"{module_name} has no consumer: make one with qmq.Consumer() at the top of the module")
        found += [here[name]] if name else here.values()
    found = list(dict.fromkeys(found))
    for consumer in found:
        if not consumer.listeners:
            raise CannotRun("a consumer has no listener: decorate a handler with listen(), in an imported module")
    return found


def names_in(module_name: str) -> dict[str, Any]:
    """Import a module; return its names. Raises CannotRun."""
    try:
        return vars(import_module(module_name))
    except ModuleNotFoundError as error:
        raise CannotRun(f"{module_name} cannot be imported: {error}. Start in its folder, or set PYTHONPATH") from error
    except Exception as error:
        raise CannotRun(f"{module_name} cannot be imported: {type(error).__name__}: {error}") from error


def values_of_modules(*kinds: type[C]) -> list[C]:
    """Return the instances of some classes that are attributes of the application's modules.

    A traced producer stands for the producer that it wraps.
    """
    traced = getattr(sys.modules.get("qmq.otel"), "Sending", ())
    found: dict[C, None] = {}
    for name, module in list(sys.modules.items()):
        for value in list(getattr(module, "__dict__", {}).values()) if name.partition(".")[0] != "qmq" else ():
            value = value._producer if issubclass(type(value), traced) else value
            if issubclass(type(value), kinds):
                found[value] = None
    return list(found)


class Run:
    """Run of the consumers on this process's event loop; `kill_after_s` as in `Options`."""

    def __init__(self, consumers: list[AnyConsumer], link: socket.socket, kill_after_s: float = math.inf) -> None:
        self._consumers = consumers
        self._link = link
        self._kill_after_s = kill_after_s
        self._stuck_since_s = math.inf
        self._stuck = ""
        """Reason of the end, if it is that no call of a listener can begin."""
        self._clients: list[Any] = []
        self._is_running = self._is_stopping = False

    async def serve(self) -> Exit:
        """Open the modules' clients and run the consumers until the end; return the exit status."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._stop)
        loop.add_reader(self._link, self._parent_ended)
        reporting = asyncio.create_task(self._report_always())
        try:
            async with AsyncExitStack() as stack:
                clients: list[Producer | Requester] = [*values_of_modules(Producer), *values_of_modules(Requester)]
                for client in clients:
                    self._clients.append(await stack.enter_async_context(client))
                ends = await self._run()
        finally:
            reporting.cancel()
        if self._stuck:
            send(self._link, error=self._stuck)
            return Exit.FAILED
        return next((status for error in ends if (status := self._status(error)) is not Exit.ENDED), Exit.ENDED)

    async def _run(self) -> list[BaseException | None]:
        """Run the consumers until the end; return their errors."""
        running = [asyncio.ensure_future(_run(consumer)) for consumer in self._consumers]
        self._is_running = True
        if self._is_stopping:
            self._stop()
        await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        self._stop()
        ends = await asyncio.gather(*running, return_exceptions=True)
        self._is_running = False
        send(self._link, **self._report())
        return ends

    def _status(self, error: BaseException | None) -> Exit:
        if error is None:
            return Exit.ENDED
        send(self._link, error=str(error) or repr(error))
        log.error("consumer ended error=%r", error, exc_info=None if isinstance(error, QmqError) else error)
        return Exit.REFUSED if isinstance(error, AccessError) else Exit.FAILED

    def _stop(self) -> None:
        self._is_stopping = True
        for consumer in self._consumers:
            consumer.stop()

    def _parent_ended(self) -> None:
        try:
            if self._link.recv(1):
                return
        except BlockingIOError:
            return
        except OSError:
            pass
        asyncio.get_running_loop().remove_reader(self._link)
        self._stop()

    async def _report_always(self) -> None:
        while True:
            if (background := current()) is not None:  # the blocking clients' loop may be blocked while this loop runs
                await asyncio.wrap_future(background.submit(asyncio.sleep(0)))
            self._check_threads()
            data = json.dumps(self._report() if self._is_running else {}).encode() + b"\n"
            with suppress(OSError):  # the parent has ended
                await asyncio.get_running_loop().sock_sendall(self._link, data)
            await asyncio.sleep(REPORT_S)

    def _check_threads(self) -> None:
        """End the process if all threads that a handler may have hang for `kill_after_s`."""
        listeners = [listener for consumer in self._consumers for listener in consumer.listeners.values()]
        hung = [listener for listener in listeners if listener.hung_threads >= listener.concurrency]
        now_s = asyncio.get_running_loop().time()
        self._stuck_since_s = min(self._stuck_since_s, now_s) if hung else math.inf
        if hung and now_s - self._stuck_since_s >= self._kill_after_s and not self._is_stopping:
            self._stuck = f"all threads of the handler of subject {hung[0].subject} hang"
            self._stop()

    def _report(self) -> dict[str, object]:
        health: Health = worst(client.health for client in [*self._consumers, *self._clients])
        return {"state": health.state.value, "reason": health.reason, "samples": read()}


async def _run(consumer: AnyConsumer) -> None:
    if isinstance(consumer, Consumer):
        await consumer.run()
    else:
        await asyncio.to_thread(consumer.run)


def send(link: socket.socket, **report: object) -> None:
    """Write a report, and wait until it is written, outside of the event loop; drop it if the parent does not read."""
    link.settimeout(REPORT_S)
    with suppress(OSError):
        link.sendall(json.dumps(report).encode() + b"\n")
    link.setblocking(False)


def main(descriptor: int, options: Options) -> Exit:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    link = socket.socket(fileno=descriptor)
    sys.path += [folder for folder in options.path if folder not in sys.path]
    try:
        if options.setup:
            _call(options.setup)
        consumers = load(options.targets)
        asynchronous = [consumer if isinstance(consumer, Consumer) else consumer._own for consumer in consumers]
        is_unique = not all(consumer._has_default_id for consumer in asynchronous)
        if is_unique and options.processes > 1:
            raise CannotRun("a consumer has a fixed consumer_id, and processes would replace each other: leave it out")
        if options.concurrency is not None:
            for listener in (listener for consumer in asynchronous for listener in consumer.listeners.values()):
                if not listener.terms.exclusive_ms:
                    listener.concurrency = options.concurrency
    except (CannotRun, InvalidRequest) as error:
        logging.debug("the import failed", exc_info=True)
        send(link, error=str(error))
        return Exit.CANNOT_START
    if not logging.getLogger().handlers:
        configure(options.log_level, options.log_format)
    send(link, is_unique=is_unique)
    status: Exit = uvloop.run(Run(consumers, link, options.kill_after_s).serve())
    return status


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), Options.of_json(sys.argv[2])))
