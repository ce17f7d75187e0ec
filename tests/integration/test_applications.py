"""Shell. The applications of docs/examples/applications, as their docstrings start them."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import signal
import subprocess
import sys
import urllib.request
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

import qmq
import qmq.blocking
from tests.support.ports import free_ports
from tests.support.waiting import until

FOLDER = Path(__file__).parents[2] / "docs" / "examples" / "applications"
LINES = {"fastapi_shop.py": 60, "django_shop.py": 60, "worker.py": 30}
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


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
    assert sum(bool(line.strip()) for line in (FOLDER / name).read_text().splitlines()) <= most


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
        order = {"number": 1}
        await producer.send_many([qmq.Message("order.placed", order, order_key="ada") for _ in range(2)])
    await qmq_broker.wait_until_consumed("order.placed", "billing")
    assert [message["number"] for message in qmq_broker.delayed("order.unpaid")] == [1]
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


def ask(url, method="GET"):
    try:
        with OPENER.open(urllib.request.Request(url, method=method), timeout=60) as answer:
            return json.load(answer)
    except urllib.error.HTTPError:
        raise
    except OSError:
        return None


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
        until(lambda: ask(f"{url}/0") is not None, "gunicorn serves")
        for number in range(1, 9):
            assert ask(f"{url}/{number}", "POST") == {}
        until(lambda: all(ask(f"{url}/{number}")["invoiced"] for number in range(1, 9)), "all orders are invoiced")
        qmq_blocking_broker.wait_until_consumed("order.placed", "billing")
