"""Shell. Gateway process on a real cluster: crashes, tokens, the examples of its page, generated requests."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
from collections import Counter
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import httpx
import pytest
import schemathesis
from hypothesis import given
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.integration import cluster_world
from tests.integration.cluster_world import WAIT_S, shared_cluster
from tests.integration.installation_world import start_nginx
from tests.integration.watchdog_world import HttpProcess
from tests.support.certificates import make_certificates
from tests.support.effort import generated
from tests.support.http import is_served
from tests.support.ports import free_ports
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples" / "gateway"
SENT = 30


def authorization(token):
    return {"Authorization": f"Bearer {token}"} if token else {}


class Gateway(HttpProcess):
    """Gateway process; its requests have the token of the cluster, unless another is given."""

    program = ("qmq", "gateway")

    def __init__(self, cluster, directory, name="gateway", **settings):
        super().__init__(cluster, directory, name, **{"session_idle_s": 3600} | settings)

    def __enter__(self):
        super().__enter__()
        until(lambda: is_served(f"{self.url}/ready"), "the gateway is ready")
        return self

    def post(self, path, body=None, token=None, **headers):
        headers |= authorization(self.token if token is None else token)
        return httpx.post(f"{self.url}/v1/subjects/{path}", json=body, headers=headers, trust_env=False, timeout=WAIT_S)

    def pull(self, subject, count, **query):
        """Return `count` messages of the group g."""
        messages = []

        def is_complete():
            words = "".join(f"&{name}={value}" for name, value in query.items())
            answer = self.post(f"{subject}/groups/g/pull?start=earliest&wait_s=5{words}&max={count - len(messages)}")
            assert answer.status_code == 200, answer.text
            messages.extend(answer.json()["messages"])
            return len(messages) == count

        until(is_complete, f"{count} messages are delivered")
        return messages

    def ack(self, subject, messages):
        return self.post(f"{subject}/groups/g/ack", {"handles": [message["handle"] for message in messages]})


cluster = shared_cluster(lease_ms=5000)


@pytest.fixture
def gateway(cluster, tmp_path):
    with Gateway(cluster, tmp_path, send_s=5) as started:
        yield started


def send(gateway, subject, count):
    messages = [{"properties": {"n": str(number)}, "id": f"m-{number}"} for number in range(count)]
    answer = gateway.post(f"{subject}/messages:batch", {"messages": messages})
    assert answer.status_code == 201, answer.text


def ids(messages):
    return Counter(message["id"] for message in messages)


ALL = Counter(f"m-{number}" for number in range(SENT))


def test_killed_gateway_loses_no_message(cluster, tmp_path):
    with Gateway(cluster, tmp_path) as first:
        send(first, "killed", SENT)
        pulled = first.pull("killed", SENT)
        acked, held = pulled[:10], pulled[10:]
        assert first.ack("killed", acked).status_code == 200
        first.process.kill()
        first.process.wait(WAIT_S)
    with Gateway(cluster, tmp_path) as second:
        assert second.ack("killed", held).status_code == 410
        again = second.pull("killed", len(held))
        assert ids(again) == ids(held) and all(message["is_suspected"] for message in again)
        assert second.ack("killed", again).status_code == 200


def test_terminated_gateway_returns_messages_at_once(cluster, tmp_path):
    with Gateway(cluster, tmp_path) as first:
        send(first, "ended", SENT)
        assert first.ack("ended", first.pull("ended", SENT)[:10]).status_code == 200
        first.process.send_signal(signal.SIGTERM)
        assert first.process.wait(WAIT_S) == 0, first.log.read_text()
    left = cluster.consume_all("ended", "g", SENT - 10)
    assert Counter(id for _, id in left) == Counter(f"m-{number}" for number in range(10, SENT))


def test_producer_gets_its_outcome_after_an_outage(cluster, gateway):
    key = {"Idempotency-Key": "the-key-of-one-order"}
    send(gateway, "outage", 1)
    cluster.end(cluster.broker("g1", "slave").hostname)
    answer = gateway.post("outage/messages", {"properties": {"n": "1"}}, **key)
    assert (answer.status_code, answer.json()["outcome"]) in ((503, "refused"), (504, "unknown"))
    cluster.begin(cluster.broker("g1", "slave").hostname)
    until(lambda: gateway.post("outage/messages", {"properties": {"n": "1"}}, **key).status_code == 201)
    repeated = gateway.post("outage/messages", {"properties": {"n": "1"}}, **key)
    assert repeated.headers["Idempotent-Replayed"] == "true"
    found = Counter(id for _, id in cluster.consume_all("outage", "g", 2))
    assert set(found) == {"m-0", key["Idempotency-Key"]}


def test_rights_are_those_of_the_token(cluster, gateway):
    words = {"role": "client", "subjects": "produce:mine,consume:other*"}
    token = cluster.manage("AddToken", name="limited", **words)["token"]
    assert gateway.post("mine/messages", {}, token=token).status_code == 201
    for path, body in (("other.a/messages", {}), ("mine/groups/g/pull?wait_s=5", None)):
        answer = gateway.post(path, body, token=token)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "MISSING_RIGHT"), answer.text
    viewer = cluster.manage("AddToken", name="viewer", role="viewer")["token"]
    assert gateway.post("mine/messages", {}, token=viewer).status_code == 403
    assert gateway.post("mine/messages", {}, token="wrong").status_code == 401
    assert gateway.post("mine/messages", {}, token="").status_code == 401
    for text, status in ((viewer, 200), (token, 403), ("", 401)):
        assert httpx.get(f"{gateway.url}/metrics", headers=authorization(text), trust_env=False).status_code == status
    assert not any(secret in gateway.log.read_text() for secret in (token, viewer, cluster.token, "wrong"))


def run_example(gateway, *command, **environ):
    """Run an example of the page; return its output."""
    if shutil.which(command[0]) is None:
        pytest.skip(
            f"{command[0]} is not installed: apt-get install {'nodejs' if command[0] == 'node' else command[0]}"
        )
    given = {"GATEWAY": gateway.url, "TOKEN": gateway.token, **environ}
    ran = subprocess.run(
        command, cwd=EXAMPLES, env=os.environ | given, capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed: apt-get install curl")
def test_curl_example_handles_a_message(gateway):
    sent, pulled, acked = (json.loads(line) for line in run_example(gateway, "sh", "orders.sh").splitlines())
    assert sent["outcome"] == "stored" and pulled["messages"][0]["id"] == sent["id"]
    assert acked["results"][0]["outcome"] == "stored"


def test_node_example_handles_each_message(gateway):
    lines = run_example(gateway, "node", "orders.mjs", COUNT="20").splitlines()
    assert sum(line.startswith("stored ") for line in lines) == 20
    assert {f"handled {number} attempt 1" for number in range(20)} <= set(lines)


@contextmanager
def nginx_of_the_page(folder, gateways):
    """Run nginx with the sketch of docs/gateway.md; return its address. Its ports and certificates are replaced."""
    [sketch] = re.findall(
        r"^```nginx\n(.*?)^```$", (ROOT / "docs" / "gateway.md").read_text(), re.MULTILINE | re.DOTALL
    )
    [port], files = free_ports(1), make_certificates(folder, client="unused")
    own = {
        "listen 443": f"listen 127.0.0.1:{port}",
        "/etc/nginx/mq.pem": files.server,
        "/etc/nginx/mq.key": files.server_key,
    }
    own |= {f"10.0.0.{n}:8070": f"127.0.0.1:{gateway.port}" for n, gateway in enumerate(gateways, start=1)}
    for word, value in own.items():
        assert word in sketch, word
        sketch = sketch.replace(word, str(value))
    ran = start_nginx(folder, sketch)
    try:
        until(lambda: ran.poll() is not None or is_open(port), "nginx listens")
        assert ran.poll() is None, (folder / "nginx.log").read_text()
        yield f"https://127.0.0.1:{port}/v1/subjects"
    finally:
        ran.terminate()
        ran.wait(WAIT_S)


def is_open(port):
    with closing(socket.socket()) as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


def test_nginx_of_the_page_passes_events_and_decisions(cluster, tmp_path):
    """Each event comes while the stream is open, and all requests of a client reach the gateway of its session."""
    with ExitStack() as stack:
        gateways = [stack.enter_context(Gateway(cluster, tmp_path, name)) for name in ("first", "second")]
        url = stack.enter_context(nginx_of_the_page(tmp_path, gateways))
        headers = authorization(cluster.token)
        web = stack.enter_context(httpx.Client(verify=False, headers=headers, trust_env=False, timeout=WAIT_S))
        for client in ("c1", "c2", "c3"):
            group, words = f"proxied/groups/{client}", f"client={client}"
            with web.stream("GET", f"{url}/{group}/stream?{words}&start=earliest") as stream:
                assert stream.status_code == 200
                assert web.post(f"{url}/proxied/messages", json={"properties": {"n": client}}).status_code == 201
                data = next(line for line in stream.iter_lines() if line.startswith("data: "))
            handle = json.loads(data.removeprefix("data: "))["handle"]
            for decision in ("renew", "ack"):
                answer = web.post(f"{url}/{group}/{decision}?{words}", json={"handles": [handle]})
                assert answer.status_code == 200, answer.text


def test_generated_requests_get_described_answers(cluster, tmp_path):
    with Gateway(cluster, tmp_path, send_s=1, session_idle_s=1) as gateway:
        try_generated(gateway)
        assert cluster_world.count_lines(gateway.log.read_text(), "request failed") == 0


def make_quick(case):
    """Use one subject and no waits: each new subject waits for its route."""
    if "subject" in (case.path_parameters or {}):
        case.path_parameters["subject"] = "generated"
    if case.path.endswith("/pull"):
        case.query = {**(case.query or {}), "wait_s": 0}
    messages = case.body.get("messages", [case.body]) if isinstance(case.body, dict) else []
    for message in messages if isinstance(messages, list) else []:
        if isinstance(message, dict):
            for name in ("delay_s", "at", "key"):  # this cluster has no delay group
                message.pop(name, None)


def try_generated(gateway):
    document = httpx.get(f"{gateway.url}/openapi.json", trust_env=False).json()
    schema = schemathesis.openapi.from_dict(document)
    checks = [content_type_conformance, response_schema_conformance, status_code_conformance]
    statuses = Counter()
    for result in schema.get_all_operations():
        operation = result.ok()
        if operation.path.endswith("/stream"):
            continue  # it has no end

        @generated(8)
        @given(case=operation.as_strategy())
        def try_one(case):
            make_quick(case)
            headers = authorization(gateway.token)
            answer = case.call(base_url=gateway.url, headers=headers, timeout=WAIT_S)
            case.validate_response(answer, checks=checks, headers=headers)
            if answer.status_code not in (503, 504):
                case.validate_response(answer, checks=[not_a_server_error])
            statuses[answer.status_code] += 1

        try_one()
    assert {200, 201, 400, 410} <= set(statuses), statuses
