"""Shell. Clients in processes that fork, are signalled, and end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from pathlib import Path

import pytest

import qmq
import qmq.blocking
from qmq import grpc_forks


@pytest.fixture
def broker(qmq_blocking_broker):
    return qmq_blocking_broker


@pytest.fixture
def producer(broker):
    with qmq.blocking.Producer(metaserver=broker.metaserver, app="test") as producer:
        yield producer


def numbers(messages):
    return [int(message["n"]) for message in messages]


def message(n):
    return qmq.Message("s", {"n": str(n)})


HEAD = """
import os, sys, threading, time, signal, multiprocessing
import qmq, qmq.blocking
metaserver = sys.argv[1]
def message(n):
    return qmq.Message("s", {"n": str(n)})
producer = qmq.blocking.Producer(metaserver=metaserver, app="test")
consumer = qmq.blocking.Consumer(metaserver=metaserver, app="test")
"""


@pytest.fixture
def launch():
    """Run Python processes in sessions of their own; each is killed after the test."""
    started, pipe = [], subprocess.PIPE
    python = [sys.executable, "-W", "ignore::DeprecationWarning"]  # newer Pythons warn of a fork beside threads
    environment = os.environ | {"GRPC_VERBOSITY": "NONE"}  # gRPC logs lost connections
    del environment[grpc_forks.SETTING]  # set in this process by its import of qmq

    def launch(*arguments):
        started.append(
            subprocess.Popen(
                [*python, *arguments],
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                text=True,
                start_new_session=True,
                env=environment,
            )
        )
        return started[-1]

    yield launch
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.fixture
def start(broker, launch):
    """Start a program that begins with HEAD."""
    return lambda code: launch("-c", HEAD + textwrap.dedent(code), broker.metaserver)


@pytest.fixture
def run(start):
    """Run a program to its end; return its output."""

    def run(code):
        process = start(code)
        out, err = process.communicate(timeout=120)
        assert (process.returncode, err) == (0, "")
        return out.split()

    return run


@pytest.mark.parametrize(
    "code",
    [
        "for n in range(3): producer.send_nowait(message(n))",
        """
        producer.send(message(0))
        def work():
            time.sleep(0.1)
            for n in (1, 2): producer.send_nowait(message(n))
        threading.Thread(target=work).start()
        """,
        """
        import atexit
        producer.send_many([message(0), message(1)])
        atexit.register(lambda: producer.send_nowait(message(2)))
        """,
    ],
    ids=["main thread", "thread that outlives it", "atexit"],
)
def test_sent_messages_are_stored_before_exit(broker, run, code):
    run(code)
    assert numbers(broker.messages("s")) == [0, 1, 2]


def test_callback_that_exits_is_reported_and_harmless(broker, start):
    process = start("""
        producer.send_nowait(message(1), lambda receipt: sys.exit(1)).result()
        print(producer.send(message(2)).outcome.value)
    """)
    out, err = process.communicate(timeout=30)
    assert out.split() == ["stored"] and "on_done raised SystemExit(1)" in err
    assert numbers(broker.messages("s")) == [1, 2]


def test_client_after_the_main_thread_works_or_is_refused(broker, run):
    """From Python 3.12 on, no thread begins once the interpreter ends, which is a moment after the main thread."""
    out = run(
        """
        def work():
            threading.main_thread().join()
            try:
                producer.send(message(0))
            except qmq.ClientClosed as error:
                print(error)
        threading.Thread(target=work).start()
        """,
    )
    stored = numbers(broker.messages("s"))
    if sys.version_info >= (3, 12) and not stored:
        assert " ".join(out).startswith("the program is ending")
    else:
        assert stored == [0] and out == []


@pytest.mark.parametrize(
    "code, text",
    [
        (
            """
            producer = qmq.blocking.Producer(metaserver=metaserver, app="test", timeout_s=0.5)
            for n in range(5): producer.send_nowait(message(n))
            """,
            "messages are not known to be stored as the process ends messages=5 app=test reason=test: readonly",
        ),
        (
            """
            qmq.blocking.producer.EXIT_S = 0.1
            producer = qmq.blocking.Producer(metaserver=metaserver, app="test", timeout_s=0.1)
            async def hang(): await asyncio.Event().wait()  # as a database that does not answer
            producer._session().producer.outbox.drain = hang
            """,
            "messages stay in the outbox as the process ends app=test",
        ),
        (
            "asyncio.run(leave_open(5))",
            "messages are not known to be stored messages=5: the event loop ended before the producer was closed.",
        ),
        (
            """
            loop = asyncio.new_event_loop()
            loop.run_until_complete(leave_open(5))
            loop.close()
            """,
            "messages are not known to be stored messages=5: the process ended before the producer was closed.",
        ),
    ],
    ids=["blocking", "outbox", "asyncio.run", "closed loop"],
)
def test_unsent_messages_are_counted_in_the_log(broker, start, code, text):
    broker.readonly()
    began = time.monotonic()
    process = start(LEAVE_OPEN + textwrap.dedent(code))
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (0, "") and text in err
    assert time.monotonic() - began < 25, "a message has 30 s by default, and five more at the end"
    assert broker.messages("s") == []


LEAVE_OPEN = """
import asyncio
async def leave_open(count):
    producer = await qmq.Producer(metaserver=metaserver, app="test").__aenter__()
    for n in range(count): producer.send_nowait(message(n), lambda receipt: None)
"""


# Forks.

FORKS = 30
"""Where gRPC's fork handlers were on, two of three children crashed."""


@pytest.mark.parametrize(
    "imports, warning",
    [("", ""), ("import qmq, grpc", ""), ("import grpc.aio", "Import qmq before grpc")],
    ids=["no grpc", "grpc second", "grpc first"],
)
def test_no_child_crashes_or_hangs_while_its_parent_sends(broker, launch, imports, warning):
    code = f"""
channel = grpc.insecure_channel(metaserver.removeprefix("http://")) if {imports == "import qmq, grpc"} else None
if channel:
    grpc.channel_ready_future(channel)
producer.send(message(0)).check()
is_over = threading.Event()
def send():
    while not is_over.is_set(): producer.send(message(1)).check()
threads = [threading.Thread(target=send) for _ in range(2)]
for thread in threads: thread.start()
pids = []
for n in range({FORKS}):
    if not (pid := os.fork()):
        if n % 2:
            producer.send(message(2)).check()
            sys.exit()
        time.sleep(0.02)
        os._exit(0)
    pids.append(pid)
codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
is_over.set()
print(*codes)
"""
    process = launch("-c", imports + HEAD + code, broker.metaserver)
    out, err = process.communicate(timeout=120)
    assert out.split() == ["0"] * FORKS, err
    assert process.returncode == 0 and (warning in err if warning else err == "")
    stored = broker.messages("s")
    assert numbers(stored).count(2) == FORKS // 2
    assert len({message.id for message in stored}) == len(stored)


def test_forked_workers_get_separate_producers(broker, run):
    """Regression: brokers took the first batch of each worker for a repetition, and stored one message of four."""
    run(
        """
        import asyncio
        producer = qmq.Producer(metaserver=metaserver, app="test")
        async def work(n):
            async with producer:
                assert (await producer.send(message(n))).is_stored
        pids = []
        for n in range(4):
            if not (pid := os.fork()):
                asyncio.run(work(n))
                os._exit(0)
            pids.append(pid)
        assert not any(os.waitpid(pid, 0)[1] for pid in pids)
        """
    )
    assert sorted(numbers(broker.messages("s"))) == [0, 1, 2, 3]
    assert len({message.id for message in broker.messages("s")}) == 4


def test_forked_workers_get_separate_consumers(broker, producer, start):
    process = start(
        """
        import asyncio
        consumer = qmq.Consumer(metaserver=metaserver, app="test")
        @consumer.listen("s", group="g", start="earliest")
        async def on_message(message): ...
        @consumer.listen("s", broadcast=True, start="earliest")
        async def on_broadcast(message):
            line = f"{consumer.id} {consumer.listeners['s', consumer.id].group}\\n"
            os.write(1, line.encode())  # one write, so that lines of both workers do not mix
        pids = []
        for _ in range(2):
            if not (pid := os.fork()):
                asyncio.run(consumer.run())
                os._exit(0)
            pids.append(pid)
        sys.stdin.readline()
        for pid in pids: os.kill(pid, signal.SIGTERM)
        assert not any(os.waitpid(pid, 0)[1] for pid in pids)
        """,
    )
    broker.wait_until_subscribed("s", "g", consumers=2, timeout=120)
    producer.send(message(0))
    (first, group), (second, other_group) = (process.stdout.readline().split() for _ in range(2))
    assert first == group != second == other_group
    out, err = process.communicate("\n", timeout=120)
    assert (process.returncode, err) == (0, "")


def test_inherited_clients_are_refused_in_a_child(run):
    out = run(
        """
        import asyncio
        async def refused(work):
            try:
                await work
            except qmq.ClientClosed as error:
                print(error)
        async def parent():
            consumer = qmq.Consumer(metaserver=metaserver, app="test")
            async with qmq.Producer(metaserver=metaserver, app="test") as producer, consumer.pull("s", group="g"):
                if not (pid := os.fork()):
                    asyncio.run(child(producer, consumer))
                    sys.stdout.flush()
                    os._exit(0)
                assert not os.waitpid(pid, 0)[1]
                assert (await producer.send(message(0))).is_stored
        async def child(producer, consumer):
            await refused(producer.send(message(1)))
            await refused(producer.send_many([message(1)]))
            await refused(producer.flush())
            await refused(consumer.run())
            await producer.close()
        asyncio.run(parent())
        """
    )
    assert " ".join(out).count("before this process was forked: ") == 4


@pytest.mark.parametrize("module", ["qmq", "qmq.blocking"])
def test_sigterm_to_a_child_leaves_its_parent_running(broker, producer, start, module):
    process = start(
        f"""
        import asyncio, {module}
        consumer = {module}.Consumer(metaserver=metaserver, app="test")
        @consumer.listen("s", group="g", start="earliest")
        def on_message(message):
            child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(100,))
            child.start()
            child.terminate()
            child.join()
            print(child.exitcode, flush=True)
        run = consumer.run()
        if run is not None: asyncio.run(run)
        """
    )
    for n in range(2):
        producer.send(message(n))
        assert process.stdout.readline() == f"{-signal.SIGTERM}\n"
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err) == (0, "", "")


# Pools.

POOLS = """
import contextlib, sqlite3
from concurrent.futures import ProcessPoolExecutor
from qmq.outbox import dbapi, schema
outbox = f"{sys.argv[0]}.db"
def execute(statement):
    with contextlib.closing(sqlite3.connect(outbox)) as connection: return connection.execute(statement).fetchall()
def commit(n):
    with dbapi.Database(lambda: sqlite3.connect(outbox)).transaction() as transaction:
        producer.send_many([message(20 * n + i) for i in range(20)], session=transaction)
def send(n, producer=producer):
    for i in range(20): producer.send_nowait(message(20 * n + i))
def send_and_skip_atexit(n, end):
    send(n)
    end()
    os._exit(0)
def run_all(context, target, *rest, workers=10):
    workers = [context.Process(target=target, args=(n, *rest)) for n in range(workers)]
    for worker in workers: worker.start()
    for worker in workers: worker.join()
    assert not any(worker.exitcode for worker in workers)
def run_pool(pool, work=send):
    pool.map(work, range(10), chunksize=1)
    pool.close()
    pool.join()
if __name__ == "__main__":
    fork, spawn, server = map(multiprocessing.get_context, ["fork", "spawn", "forkserver"])
"""


@pytest.mark.parametrize(
    "code",
    [
        "run_all(fork, send)",
        "run_pool(fork.Pool(2))",
        "run_pool(fork.Pool(2, maxtasksperchild=1))",
        pytest.param(
            "for line in schema.create_statements('sqlite'): execute(line)\n"
            "    run_pool(fork.Pool(2, maxtasksperchild=1), commit)\n"
            "    assert execute('SELECT * FROM qmq_msg_queue') == []",
            id="outbox",
        ),
        "with ProcessPoolExecutor(2, mp_context=fork) as pool: list(pool.map(send, range(10)))",
        "with ProcessPoolExecutor(2, mp_context=server) as pool: list(pool.map(send, range(10)))",
        "producer.send(qmq.Message('t', {})); run_all(spawn, send, producer, workers=2)",
        "run_all(fork, send_and_skip_atexit, multiprocessing.util._exit_function)",
        "run_all(fork, send_and_skip_atexit, celery_signals.worker_process_shutdown.send)",
    ],
)
def test_workers_send_everything_before_they_end(broker, launch, tmp_path, code):
    program = tmp_path / "program.py"
    program.write_text(HEAD + CELERY + POOLS + f"    {code}\n")
    process = launch(program, broker.metaserver)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, "")
    assert sorted(numbers(broker.messages("s"))) == list(range(40 if "spawn" in code else 200))


CELERY = """
class Signal:
    def connect(self, receiver, weak, dispatch_uid): self.receiver = receiver
    def send(self): self.receiver(sender=None, pid=os.getpid(), exitcode=0)
class celery_signals:
    worker_process_shutdown = Signal()
sys.modules["celery.signals"] = celery_signals
"""


def test_forked_process_repeats_nothing_of_its_parent(broker, start):
    broker.readonly()
    process = start(
        """
        future = producer.send_nowait(message(0))
        time.sleep(0.3)
        pid = os.fork()
        if pid:
            print("forked", flush=True)
            assert os.waitpid(pid, 0)[1] == 0
            print(future.result().outcome)
        else:
            try:
                future.result()
            except qmq.ClientClosed:
                producer.flush()
                producer.close()
        """,
    )
    assert process.stdout.readline() == "forked\n"
    broker.writable()
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err) == (0, "stored\n", "")
    assert numbers(broker.messages("s")) == [0]


def test_ctrl_c_ends_a_wait_and_the_program(broker, start):
    broker.readonly()
    process = start(
        """
        producer = qmq.blocking.Producer(metaserver=metaserver, app="test", timeout_s=5.0)
        print("ready", flush=True)
        try:
            producer.send(message(0))
        except KeyboardInterrupt:
            print("interrupted")
        """,
    )
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.3)  # by then it most likely waits
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err) == (0, "interrupted\n", "")


LISTEN = """
@consumer.listen("s", group="g", start="earliest")
def on_message(message):
    print("begun", flush=True)
    if waits:
        sys.stdin.readline()
    time.sleep(0.5)
    print("done", flush=True)
"""


@pytest.mark.parametrize(
    "number, ends", [(signal.SIGTERM, "ended\n"), (signal.SIGINT, "interrupted\n")], ids=["SIGTERM", "Ctrl-C"]
)
def test_a_signal_ends_run_after_the_handler_that_runs(broker, producer, number, ends, start):
    process = start(
        "waits = True\n"
        + LISTEN
        + """
try:
    consumer.run()
    print("ended")
except KeyboardInterrupt:
    print("interrupted")
""",
    )
    producer.send_many([message(0), message(1)])
    assert process.stdout.readline() == "begun\n"
    process.send_signal(number)
    out, err = process.communicate("\n", timeout=120)
    assert (process.returncode, out, err) == (0, "done\n" + ends, "")
    broker.wait_until_subscribed("s", "g", consumers=0)
    with pytest.raises(TimeoutError, match="1 messages to be delivered, 0 wait for their retry, 0 are held"):
        broker.wait_until_consumed("s", "g", timeout=0.1)


def test_consumer_in_a_daemon_thread_is_drained_at_exit(broker, producer, start):
    producer.send(message(0))
    process = start(
        "waits = False\n"
        + LISTEN
        + """
threading.Thread(target=consumer.run, daemon=True).start()
time.sleep(0.2)
sys.stdin.readline()
""",
    )
    assert process.stdout.readline() == "begun\n"
    out, err = process.communicate("\n", timeout=120)
    assert (process.returncode, out, err) == (0, "done\n", "")
    broker.wait_until_consumed("s", "g", timeout=60)


def test_forked_workers_are_consumers_of_their_own(broker, producer, start):
    process = start(
        """
        @consumer.listen("s", group="g", start="earliest")
        def on_message(message):
            producer.send(qmq.Message("out", {"n": message["n"], "by": consumer.id}))

        producer.send(message(0))
        context = multiprocessing.get_context("fork")
        workers = [context.Process(target=consumer.run) for _ in range(2)]
        for worker in workers: worker.start()
        sys.stdin.readline()
        for worker in workers: worker.terminate()
        for worker in workers:
            worker.join()
            assert worker.exitcode == 0
        """,
    )
    broker.wait_until_subscribed("s", "g", consumers=2, timeout=120)
    producer.send_many(message(n) for n in range(1, 100))
    broker.wait_until_consumed("s", "g", timeout=120)
    out, err = process.communicate("\n", timeout=120)
    assert (process.returncode, out) == (0, ""), err
    assert sorted(numbers(broker.messages("out"))) == list(range(100))


# Programs of docs/blocking.md.

PAGE = Path(__file__).parents[2] / "docs" / "blocking.md"


def test_programs_of_the_page_run_as_printed(broker, tmp_path, launch):
    files = dict(re.findall(r"^```python (\S+\.py)\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL))
    assert list(files) == ["shop.py", "billing.py", "report.py", "quote.py"]

    def begin(name):
        (tmp_path / name).write_text(files[name].replace("http://127.0.0.1:8080", broker.metaserver))
        return launch(tmp_path / name)

    def end(process):
        out, err = process.communicate(timeout=120)
        assert (process.returncode, err) == (0, "")
        return out

    end(begin("shop.py"))
    orders = [message["order"] for message in broker.messages("order.paid")]
    assert (len(orders), orders[-2:]) == (1_003, ["C-1", "D-1"])
    billing = begin("billing.py")
    assert sum(map(int, end(begin("report.py")).split())) == 1_003
    broker.wait_until_consumed("order.paid", "billing", timeout=120)
    billing.send_signal(signal.SIGTERM)
    out = end(billing)
    assert sorted(re.findall(r"paid ([ABCD]-\d+)", out)) == sorted(orders) and out.endswith("ended\n")
    assert end(begin("quote.py")) == "42\n"
