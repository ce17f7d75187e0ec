"""Shell. The shop of docs/examples, through every kill that its page has a button for."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.cluster_world import WAIT_S, until
from tests.support.http import ask
from tests.support.ports import free_ports, run_of_ports

ROOT = Path(__file__).parents[2]
SHOP = ROOT / "docs" / "examples" / "shop"


class Page:
    """Visitor of the shop's page."""

    def __init__(self, port):
        self._url = f"http://127.0.0.1:{port}"

    def get(self, path):
        return ask(self._url + path)

    def post(self, path):
        assert ask(self._url + path, "POST").is_success

    def state(self):
        return self.get("/state").json()

    def deaths(self):
        return {name: process["deaths"] for name, process in self.state()["processes"].items()}

    def is_up(self):
        answer = self.get("/state")
        return answer and all(process["up"] for process in answer.json()["processes"].values())


@pytest.fixture
def page(tmp_path):
    (port,) = free_ports(1)
    cluster_port = run_of_ports()
    options = ["--dir", str(tmp_path / "shop"), "--port", str(port), "--cluster-port", str(cluster_port)]
    with (tmp_path / "panel.log").open("wb") as log:
        panel = subprocess.Popen([sys.executable, SHOP / "panel.py", *options], cwd=ROOT, stdout=log, stderr=log)
    try:
        page = Page(port)
        until(lambda: page.is_up() or panel.poll() is not None, "the page is there", 2 * WAIT_S)
        assert panel.poll() is None, (tmp_path / "panel.log").read_text()
        yield page
    finally:
        panel.send_signal(signal.SIGINT)
        ended = panel.wait(2 * WAIT_S)
    assert ended == 0


def test_each_paid_order_gets_a_single_ticket(page):
    buttons = re.findall(r'data-post="([^"]+)"', page.get("/").text)
    assert len(buttons) == 7
    deaths = 0
    for button in buttons:
        until(lambda: page.state()["processes"]["shop"]["up"], "the shop is started again")
        page.post(button)
        deaths += "die=" in button or button == "/kill/shop"
        until(lambda died=deaths: page.deaths()["shop"] == died, f"the shop is dead after {button}")
    page.post("/pay")

    def settled():
        state = page.state()
        return state["outbox"] == 0 and state["paid"] == state["tickets"] and state

    until(page.is_up, "all is started again", 2 * WAIT_S)
    state = until(settled, "every order has its ticket", 2 * WAIT_S)
    assert {order["number"]: order["tickets"] for order in state["orders"]} == {1: 1, 2: 0, 3: 1, 4: 1, 5: 1}
    assert page.deaths() == {"shop": 4, "watchdog": 1, "master": 1}
