"""Shell. Tokens on a real cluster: rights of each role on a broker's ports, also without the metaserver."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest

import qmq
from qmq.deploy import plan
from qmq.deploy.control import manage
from qmq.deploy.plan import write_atomically
from qmq.errors import ErrorCode, OperatorError
from qmq.proto import qmq_pb2 as pb
from qmq.remoting import commands
from qmq.remoting.commands import Command
from qmq.rights import TokenRole, includes
from qmq.server.access import CONTROL_ROLES
from tests.integration.cluster_world import WAIT_S, Wire, produce_body, running, shared_cluster, until
from tests.support.http import ask

HOST = "127.0.0.1"
SERVICE = pb.DESCRIPTOR.services_by_name["Broker"]


cluster = shared_cluster()


@pytest.fixture(scope="module")
def tokens(cluster):
    """One token of each role."""
    made = {role: make(cluster, role, f"plain {role}") for role in set(TokenRole) - {TokenRole.CLUSTER}}
    return made | {TokenRole.CLUSTER: cluster.token}


def make(cluster, role, name, **words):
    return cluster.manage("AddToken", name=name, role=role, **words)["token"]


def log_in(port, token):
    with Wire(port) as wire:
        answer = wire.ask(Command.AUTHENTICATE, commands.encode_json(token=token, app="test"))
        return answer.code, bytes(answer.body).decode()


def subscribe(wire, subject):
    body = commands.encode_subscribe(subject=subject, group="g", consumer="c", start="earliest")
    return wire.ask(Command.SUBSCRIBE, body)


def call(plan, method, token):
    """Call a control method by its name, with an empty request; return how it ends, OK as soon as it answers."""
    return call_with_words(plan, method, token, b"")[0]


def call_with_words(plan, method, token, request):
    metadata = [("x-api-token", token)] if token else []
    with grpc.insecure_channel(f"{HOST}:{plan.control_port}") as channel:
        path = f"/{SERVICE.full_name}/{method}"
        stream = channel.unary_stream(path)(request, metadata=metadata, timeout=WAIT_S)
        try:
            next(stream, None)  # HoldLog lasts until the caller ends it
            return grpc.StatusCode.OK, ""
        except grpc.RpcError as error:
            return error.code(), error.details()


def test_each_port_admits_its_roles_only(cluster, tokens):
    """Weakness 27: every caller was admitted."""
    master = cluster.broker("g1", "master")
    for role, token in tokens.items():
        for port, needed in ((master.serve_port, "client"), (master.sync_port, "broker")):
            code, text = log_in(port, token)
            if includes(role, TokenRole(needed)):
                assert code == ErrorCode.SUCCESS, (role, needed, text)
            else:
                assert code == ErrorCode.MISSING_RIGHT and f"this needs {needed}" in text


def requests(term, subject):
    """Return a request for each method that would change or return something."""
    nothing = pb.Nothing()
    return {
        "ReplicaStatus": nothing,
        "Rates": nothing,
        "Settings": nothing,
        "PrepareSwap": pb.PrepareSwapRequest(term=term, hold_ms=60_000, timeout_ms=1000),
        "CancelSwap": nothing,
        "PrepareFailover": pb.PrepareFailoverRequest(term=term, hold_ms=60_000, master_gone=True),
        "DescribeLog": nothing,
        "ReadLog": pb.ReadLogRequest(begin=0, end=1 << 40),
        "ReadDerived": pb.ReadDerivedRequest(base=0),
        "HoldLog": nothing,
        "Quarantine": pb.QuarantineRequest(cleared=["all"]),
        "MarkGroups": pb.MarkGroupsRequest(mark="m", groups=[pb.NewGroup(subject=subject, group="new")]),
        "Consumers": pb.ConsumersRequest(),
        "ResetOffset": pb.ResetOffsetRequest(subject=subject, group="g", to="latest"),
        "Browse": pb.BrowseRequest(subject=subject),
        "DelayStats": pb.DelayStatsRequest(),
        "ListDelayed": pb.ListDelayedRequest(),
        "CancelDelayed": pb.CancelDelayedRequest(subject=subject, ids=["m"]),
    }


def test_every_control_method_requires_its_role(cluster, tokens):
    """A refused call changes nothing."""
    master, subject = cluster.broker("g1", "master"), "wrong.roles"
    with Wire(master.serve_port, token=cluster.token) as wire:
        assert wire.ask(Command.PRODUCE, produce_body(subject, {"a": 1})).code == ErrorCode.SUCCESS
        assert subscribe(wire, subject).code == ErrorCode.SUCCESS
    until(lambda: cluster.state(master).log_end == cluster.state(master).high_watermark, "all is in sync")
    questions = requests(cluster.state(master).term, subject)
    assert questions.keys() == {method.name for method in SERVICE.methods}, "each method has its question"
    before = unchanged(cluster, master, subject)
    for name, request in questions.items():
        for wrong in ("", "wrong"):
            assert call(master, name, wrong) == grpc.StatusCode.UNAUTHENTICATED, name
        for role, token in tokens.items():
            if any(includes(role, needed) for needed in CONTROL_ROLES[name]):
                if role != TokenRole.CLUSTER:
                    assert call(master, name, token) != grpc.StatusCode.PERMISSION_DENIED, (name, role)
                continue
            code, words = call_with_words(master, name, token, request.SerializeToString())
            assert code == grpc.StatusCode.PERMISSION_DENIED, (name, role)
            assert words.startswith(f"token 'plain {role}' has the role {role}; this needs "), words
            assert all(needed in words.partition("needs")[2] for needed in CONTROL_ROLES[name]), words
    assert call(master, "Nothing", cluster.token) == grpc.StatusCode.PERMISSION_DENIED
    assert unchanged(cluster, master, subject) == before
    changes = questions["ResetOffset"].SerializeToString()
    assert call_with_words(master, "ResetOffset", cluster.token, changes)[0] == grpc.StatusCode.OK
    assert unchanged(cluster, master, subject) != before


def unchanged(cluster, master, subject):
    """Return the state that refused calls must not change."""
    now = cluster.state(master)
    return now.role, now.term, now.writable, now.log_end, cluster.manage("Consumers")["groups"]


def test_scope_limits_produced_and_consumed_subjects(cluster):
    token = make(cluster, "client", "scoped", subjects="produce:order,consume:paid.*")
    master = cluster.broker("g1", "master")
    end_before = cluster.state(master).log_end
    with Wire(master.serve_port, token=token) as wire:
        for subject in ("paid.card", "other"):
            answer = wire.ask(Command.PRODUCE, produce_body(subject, {"a": 1}))
            assert answer.code == ErrorCode.MISSING_RIGHT
            assert bytes(answer.body).decode().startswith(f"token 'scoped' may not produce to '{subject}'")
        assert cluster.state(master).log_end == end_before, "nothing was stored"
        assert wire.ask(Command.PRODUCE, produce_body("order", {"a": 1})).code == ErrorCode.SUCCESS
        answer = subscribe(wire, "order")
        assert answer.code == ErrorCode.MISSING_RIGHT and b"may not consume from 'order'" in bytes(answer.body)
        assert subscribe(wire, "paid.card").code == ErrorCode.SUCCESS


def test_token_with_subjects_cannot_read_the_whole_log(cluster):
    token, master = make(cluster, "operator", "limited", subjects="order"), cluster.broker("g1", "master")
    assert call(master, "ReadLog", token) == grpc.StatusCode.PERMISSION_DENIED
    assert call(master, "HoldLog", token) == grpc.StatusCode.PERMISSION_DENIED
    assert call(master, "DescribeLog", token) == grpc.StatusCode.OK


def test_token_of_another_group_is_refused(cluster):
    code, text = log_in(cluster.broker("g1", "master").serve_port, make(cluster, "client", "elsewhere", groups="g2,h*"))
    assert code == ErrorCode.MISSING_RIGHT and "may not use broker group 'g1'" in text


def test_producer_error_names_the_missing_right(cluster):
    token = make(cluster, "client", "narrow", subjects="mine.*")

    async def send(subject, timeout_s):
        async with qmq.Producer(
            metaserver=cluster.metaserver, app="test", token=token, timeout_s=timeout_s
        ) as producer:
            return await producer.send(qmq.Message(subject, {"a": "1"}))

    assert asyncio.run(send("mine.a", WAIT_S)).outcome == qmq.Outcome.STORED
    receipt = asyncio.run(send("yours", 10.0))  # retried to the timeout: the right may be granted meanwhile
    assert receipt.outcome == qmq.Outcome.REFUSED and "may not produce to 'yours'" in receipt.reason


def test_old_tokens_work_while_the_metaserver_is_away(cluster):
    known, new = make(cluster, "client", "known"), make(cluster, "client", "not seen yet")
    port = cluster.broker("g1", "master").serve_port
    with Wire(port, token=known) as wire:
        cluster.end("metaserver")
        try:
            assert wire.ask(Command.PRODUCE, produce_body("order", {"a": 1})).code == ErrorCode.SUCCESS
            assert log_in(port, known)[0] == log_in(port, cluster.token)[0] == ErrorCode.SUCCESS
            code, text = log_in(port, new)
            assert code == ErrorCode.NOT_SERVED and "cannot be checked" in text
        finally:
            cluster.begin("metaserver")
    until(lambda: log_in(port, new)[0] == ErrorCode.SUCCESS, "the new token is checked")


def test_revoked_token_ends_its_connections(cluster):
    made = cluster.manage("AddToken", name="leaving", role="client")
    with Wire(cluster.broker("g1", "master").serve_port, token=made["token"]) as wire:
        cluster.manage("RevokeToken", id=made["id"])
        wire.socket.settimeout(60)
        assert wire.is_closed()


def test_key_is_rotated_without_restarts(tmp_path, monkeypatch):
    """Processes read the files of the key again; only the slave restarts, to open a link."""
    old, new, files = "old" * 16, "new" * 16, {}
    for name in ("METASERVER_CLUSTER_TOKEN", "METASERVER_CLUSTER_TOKEN_BEFORE", "BROKER_TOKEN"):
        files[name] = tmp_path / name
        write_atomically(files[name], old)
        monkeypatch.setenv(f"QMQ_{name}_FILE", str(files[name]))
    monkeypatch.setattr(plan, "secrets", SimpleNamespace(token_hex=lambda _: old, token_bytes=secrets.token_bytes))
    with running(tmp_path / "cluster") as cluster:
        master, slave = cluster.pair()
        client = make(cluster, "client", "shop")
        for name in ("METASERVER_CLUSTER_TOKEN", "BROKER_TOKEN", "METASERVER_CLUSTER_TOKEN_BEFORE"):
            write_atomically(files[name], new)
        assert manage(cluster.metaserver, new, "ListBrokers")
        with pytest.raises(OperatorError, match="token is not valid"):
            manage(cluster.metaserver, old, "ListBrokers")
        cluster.end(slave.hostname)
        cluster.begin(slave.hostname)

        async def send() -> qmq.Receipt:
            async with qmq.Producer(metaserver=cluster.metaserver, app="shop", token=client, timeout_s=WAIT_S) as shop:
                return await shop.send(qmq.Message("order", {"n": "1"}))

        assert asyncio.run(send()).is_stored
        assert log_in(master.serve_port, new)[0] == ErrorCode.SUCCESS
        assert log_in(master.serve_port, old)[0] == ErrorCode.UNAUTHORIZED


def test_broker_metrics_require_a_token(cluster, tokens):
    url = f"http://{HOST}:{cluster.broker('g1', 'master').metrics_port}"
    answers = {
        (path, role): ask(url + path, token=tokens.get(role, role)).status_code
        for path in ("/metrics", "/", "/nothing")
        for role in ("", "wrong", "client", "viewer")
    }
    assert [answers["/metrics", role] for role in ("", "wrong", "client", "viewer")] == [401, 401, 403, 200]
    assert {status for (path, _), status in answers.items() if path != "/metrics"} == {404}, "no other address exists"


def test_tokens_are_not_in_process_lists(cluster):
    """Weakness 29: passwords on the command line, visible in process lists."""
    pids = [cluster.service("metaserver").pid, *(cluster.service(plan.hostname).pid for plan in cluster.plan.brokers)]
    for pid in pids:
        assert cluster.token.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    for path in cluster.run_dir.rglob("*"):
        if path.is_file() and path.suffix in (".json", ".toml") and cluster.token in path.read_text():
            assert path.stat().st_mode & 0o077 == 0, f"{path} may be read by others"
    for log in (cluster.run_dir / "logs").iterdir():
        assert cluster.token not in log.read_text(), log
