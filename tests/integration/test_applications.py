"""Shell. The applications of docs/examples/applications, as their docstrings start them."""

from __future__ import annotations

import asyncio
import importlib
import os
import re
import signal
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest

import qmq
import qmq.blocking
from tests.support.http import ask, is_served
from tests.support.ports import free_ports
from tests.support.waiting import until

FOLDER = Path(__file__).parents[2] / "docs" / "examples" / "applications"
LINES = {"fastapi_shop.py": 60, "django_shop.py": 60, "worker.py": 30}


@pytest.fixture
def importing(monkeypatch, tmp_path):
    """Return a function that imports an application anew, in a folder of its own."""
    monkeypatch.setenv("QMQ_METASERVER", "http://metaserver.invalid:8080")
    monkeypatch.setenv("QMQ_APP", "shop")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module
    for name in LINES:
        sys.modules.pop(name.removesuffix(".py"), None)


@pytest.mark.parametrize(("name", "most"), LINES.items())
def test_application_is_short(name, most):
    assert lines_of(FOLDER / name) <= most


async def test_fastapi_shop_invoices_each_order_once(qmq_broker, importing):
    app = importing("fastapi_shop").app
    async with app.router.lifespan_context(app):
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop") as web:
            assert [(await web.post(f"/orders/{number}")).status_code for number in (1, 2)] == [201, 201]
            await qmq_broker.wait_until_stored("order.placed", 2)
            await qmq_broker.wait_until_consumed("order.placed", "billing")
            assert [(await web.get(f"/orders/{number}")).json() for number in (1, 2)] == [{"invoiced": True}] * 2
            assert (await web.get("/orders/3")).status_code == 404
            assert (await web.get("/health")).status_code == 200


async def test_worker_retries_reminds_and_reports(qmq_broker, importing, capsys):
    worker = importing("worker")
    running = asyncio.create_task(worker.main())
    async with qmq.Producer() as producer:
        for _ in range(2):
            await producer.send("order.placed", worker.Order(1), order_key="ada")
    await qmq_broker.wait_until_consumed("order.placed", "billing")
    assert [message.decode(worker.Order).number for message in qmq_broker.delayed("order.unpaid")] == [1]
    qmq_broker.advance(15 * 86_400)
    assert len(await qmq_broker.wait_until_stored("report.due", 15)) == 15
    for subject in ("order.unpaid", "report.due"):
        await qmq_broker.wait_until_consumed(subject, "billing")
    worker.consumer.stop()
    await running
    lines = capsys.readouterr().out.splitlines()
    assert lines.count("invoice 1 attempt 1") == 1
    assert sum(line.startswith("order.unpaid") for line in lines) == 1
    assert sum(line.startswith("report.due") for line in lines) == 15


def lines_of(path):
    return sum(bool(line.strip()) for line in path.read_text().splitlines())


def test_comparison_counts_the_lines_of_each_application():
    page = (FOLDER.parents[1] / "comparison.md").read_text()
    stated = {place: int(count) for count, place in re.findall(r"\| \[(\d+)\]\(examples/(\w+/\w+\.py)\)", page)}
    found = [path for folder in ("applications", "comparison") for path in (FOLDER.parent / folder).glob("*.py")]
    assert stated == {f"{path.parent.name}/{path.name}": lines_of(path) for path in found}


@pytest.fixture
def compared(monkeypatch, tmp_path):
    """Return a function that imports an application of another library, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(FOLDER.parent / "comparison"))
    yield importlib.import_module
    sys.modules.pop("celery_worker", None)


def test_celery_worker_of_the_comparison_runs_its_tasks(compared, monkeypatch, capsys):
    """Eagerly, without a broker; its keys are in a dictionary."""
    worker, keys = compared("celery_worker"), {}
    monkeypatch.setattr(worker.keys, "exists", keys.__contains__)
    monkeypatch.setattr(worker.keys, "set", lambda key, value, ex: keys.update({key: value}))
    worker.app.conf.task_always_eager = True
    for _ in range(2):
        worker.invoice.delay(1)
    worker.report.delay("sales")
    lines = ["invoice 1 attempt 1", "order.unpaid 1", "report.due sales"]
    assert capsys.readouterr().out.splitlines() == lines


CELERY_SHOP = """
import runpy
from django.test import Client
runpy.run_module("celery_shop", run_name="__main__")
import celery_shop
celery_shop.app.conf.task_always_eager = True
web = Client(headers={"host": "127.0.0.1"})
assert web.post("/orders/1").status_code == 201
assert web.get("/orders/1").json() == {"invoiced": False}
celery_shop.relay.delay()
assert web.get("/orders/1").json() == {"invoiced": True}
"""


def test_celery_shop_of_the_comparison_invoices_after_the_relay(tmp_path):
    environment = os.environ | {"SHOP_DATABASE": str(tmp_path / "shop.db"), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", CELERY_SHOP]
    subprocess.run(command, env=environment, cwd=FOLDER.parent / "comparison", check=True, timeout=60)


@pytest.mark.parametrize("name", ["faststream_shop", "faststream_worker"])
def test_faststream_application_of_the_comparison_compiles(name, compared):
    path = FOLDER.parent / "comparison" / f"{name}.py"
    compile(path.read_text(), str(path), "exec")
    if find_spec("faststream"):  # no dependency of the tests
        compared(name)


@contextmanager
def process(environment, *command):
    ran = subprocess.Popen([sys.executable, *command], env=environment, cwd=FOLDER)
    try:
        yield ran
        ran.send_signal(signal.SIGTERM)
        assert ran.wait(60) == 0
    finally:
        ran.kill()
        ran.wait()


def test_django_shop_invoices_orders_under_gunicorn(qmq_blocking_broker, tmp_path):
    [port] = free_ports(1)
    url = f"http://127.0.0.1:{port}/orders"
    environment = os.environ | {
        "QMQ_METASERVER": qmq_blocking_broker.metaserver,
        "QMQ_APP": "shop",
        "SHOP_DATABASE": str(tmp_path / "shop.db"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    subprocess.run([sys.executable, "django_shop.py", "migrate", "-v0"], env=environment, cwd=FOLDER, check=True)
    with ExitStack() as stack:
        serve = ("-m", "gunicorn", "django_shop:application", "-w2", "-b", f"127.0.0.1:{port}", "--log-level", "error")
        stack.enter_context(process(environment, *serve))
        stack.enter_context(process(environment, "django_shop.py", "runconsumer", "django_shop:consumer"))
        until(lambda: is_served(f"{url}/0"), "gunicorn serves")
        for number in range(1, 9):
            assert ask(f"{url}/{number}", "POST").json() == {}
        until(
            lambda: all(ask(f"{url}/{number}").json()["invoiced"] for number in range(1, 9)),
            "all orders are invoiced",
        )
        qmq_blocking_broker.wait_until_consumed("order.placed", "billing")
