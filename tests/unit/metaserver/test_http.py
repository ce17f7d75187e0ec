"""Shell. HTTP side: closed by default, limited in size and time, typed errors without internals."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace

import pytest
from sqlalchemy.exc import OperationalError
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from qmq.metaserver.actions import ACTIONS, Answer, Status
from qmq.metaserver.http import endpoints, models
from qmq.rights import Caller, TokenRole
from tests.unit.metaserver.http_world import CLUSTER, OPEN, HttpWorld

MASTER = {"brokerGroup": "g", "role": "0", "hostname": "h", "ip": "1.2.3.4", "servePort": 1, "syncPort": 2}


def is_typed(answer):
    error = answer.json()["error"]
    assert answer.headers["content-type"] == "application/json"
    assert set(error) <= {"code", "message", "action", "details"} and models.STATUS[error["code"]] == answer.status_code
    return error["code"]


def everything(http):
    """Return every (path, method) of the application."""
    for route in http.app.routes:
        assert isinstance(route, Route) and "{" not in route.path, f"{route}: this test cannot call it"
        for method in sorted(route.methods - {"HEAD"}):
            yield route.path, method


async def test_each_address_requires_a_token(http):
    """Weakness 26: /onoffline changed state by GET without a token; lists were open."""
    seen = 0
    for path, method in everything(http):
        for headers in ({}, {"X-Api-Token": "wrong"}, {"Authorization": "Bearer wrong"}):
            answer = await http.client.request(method, path, headers=headers)
            if path in OPEN:
                assert answer.status_code == 200
            elif path == "/management":
                assert answer.status_code == 200 and answer.text.startswith('{"status":-1,"message":"')
                assert answer.text.endswith('","data":null}\n'), "as QMQ answers"
            else:
                assert (path, method, answer.status_code, is_typed(answer)) == (path, method, 401, "UNAUTHORIZED")
                assert answer.headers["www-authenticate"].startswith("Bearer")
            seen += 1
    assert seen > 3 * len(ACTIONS) and http.actions.ran == []
    assert (await http.client.head("/metrics")).status_code == 401
    bearer = {"Authorization": f"bearer {http.tokens['viewer']}"}
    assert "qmq_metaserver" in (await http.client.get("/metrics", headers=bearer)).text
    for path in (*OPEN, "/metrics"):
        assert (await http.client.head(path, headers=bearer)).status_code == 200, path


ALLOWED = {"viewer": {"viewer", "operator", "admin"}, "operator": {"operator", "admin"}, "admin": {"admin"}}


async def test_each_action_runs_for_its_roles_only(http):
    """Weaknesses 26 and 28: QMQ's tokens have all rights, and a GET changes state."""
    for name, action in ACTIONS.items():
        for role in TokenRole:
            http.actions.ran.clear()
            answer = await http.client.post(f"/api/v1/{name}", json={}, headers=http.headers(role))
            if role in ALLOWED[action.role] or role == "cluster":
                assert answer.status_code in (200, 400), (name, role)
            else:
                assert (is_typed(answer), http.actions.ran) == ("MISSING_RIGHT", []), (name, role)
        http.actions.ran.clear()
        answer = await http.client.get(f"/api/v1/{name}", headers=http.headers("cluster"))
        if action.changes:
            assert (is_typed(answer), answer.headers["allow"]) == ("METHOD_NOT_ALLOWED", "POST")
            assert http.actions.ran == [], name


async def test_missing_address_is_reported_to_token_holders_only(http):
    for path in ("/", "/nothing", "/api/v1/Nothing", "/management/", "/onoffline", "/docs", "/openapi.json"):
        assert is_typed(await http.client.get(path)) == "UNAUTHORIZED"
        assert is_typed(await http.client.get(path, headers=http.headers("viewer"))) == "NOT_FOUND"
    answer = await http.client.delete("/metrics", headers=http.headers("viewer"))
    assert is_typed(answer) == "METHOD_NOT_ALLOWED" and "GET" in answer.headers["allow"]


async def test_route_without_role_is_refused():
    async def forgotten(request):
        return PlainTextResponse("secret")

    http = HttpWorld(more=[Route("/forgotten", forgotten)])
    for role in TokenRole:
        assert is_typed(await http.client.get("/forgotten", headers=http.headers(role))) == "MISSING_RIGHT"


async def test_management_merges_words_of_form_and_address(http):
    words = {"action": "ListBrokers", "brokerGroup": "from the form"}
    answer = await http.client.post("/management?brokerGroup=g&x=1", data=words, headers=http.headers("admin"))
    assert answer.json()["status"] == -1 and "x" in answer.json()["message"]
    answer = await http.client.post("/management?brokerGroup=g&details=true", data=words, headers=http.headers("admin"))
    assert answer.json() == {"status": 0, "message": "", "data": {"did": "ListBrokers"}}
    [(name, given, caller)] = http.actions.ran
    assert (name, given["brokerGroup"], caller.name, caller.peer) == (*words.values(), "admin", "10.0.0.9")
    http.actions.ran.clear()
    answer = await http.client.post("/management", data={"action": "AddBroker"}, headers=http.headers("viewer"))
    assert answer.json()["status"] == -1 and "needs admin" in answer.json()["message"] and http.actions.ran == []


async def test_long_form_is_parsed_in_a_thread(http, monkeypatch):
    """A backup with 100,000 subjects takes three to nine seconds, which would block all others."""
    read, threads = endpoints.parse_qsl, []

    def noted(*words, **more):
        threads.append(threading.current_thread())
        return read(*words, **more)

    monkeypatch.setattr(endpoints, "parse_qsl", noted)
    for backup in ('{"x":1}', json.dumps({"x": "y" * endpoints.LONG_BYTES})):
        words = {"action": "Restore", "backup": backup}
        answer = await http.client.post("/management", data=words, headers=http.headers("admin"))
        assert answer.json()["status"] == 0
    assert [given["backup"][:4] for _, given, _ in http.actions.ran] == ['{"x"', '{"x"']
    assert [thread is threading.main_thread() for thread in threads] == [True, False]


async def test_open_lists_are_the_three_of_qmq():
    http = HttpWorld(open_lists=True)
    http.actions.answer = Answer(Status.DONE, data=[])
    for name in ACTIONS:
        http.actions.ran.clear()
        await http.client.post("/management", data={"action": name})
        assert bool(http.actions.ran) is (name in ("ListBrokers", "ListBrokerGroups", "ListSubjectRoutes")), name
    wrong = await http.client.post("/management", data={"action": "ListBrokers"}, headers={"X-Api-Token": "x"})
    assert wrong.json()["status"] == -1


@pytest.mark.parametrize(
    "content, headers",
    [
        pytest.param(b"x" * 1001, {}, id="long body"),
        pytest.param(b"x" * 1001, {"content-length": "5"}, id="longer than it says"),
    ],
)
@pytest.mark.parametrize("path", ["/management", "/api/v1/ListBrokers"])
async def test_oversized_body_is_refused(http, path, content, headers):
    """Weakness 31: no limit of size."""
    sent = headers | http.headers("operator")
    answer = await http.client.post(path, content=content, headers=sent)
    assert is_typed(answer) == "TOO_LARGE" and answer.headers["connection"] == "close" and http.actions.ran == []
    backup = {"backup": {"x": "y" * 5000}}
    answer = await http.client.post("/api/v1/Restore", json=backup, headers=http.headers("admin"))
    assert answer.status_code == 200, "an admin's backup is longer"


@pytest.mark.parametrize("path", ["/management", "/api/v1/ListBrokers", "/health/live", "/nothing"])
async def test_missing_body_times_out(http, path):
    """Weakness 31: no idle time-out."""
    sent = []

    async def receive():
        await asyncio.Event().wait()

    async def send(message):
        sent.append(message)

    headers = [(b"x-api-token", CLUSTER.encode())]
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "headers": headers,
        "query_string": b"",
        "client": None,
    }
    await asyncio.wait_for(http.app(scope, receive, send), 60)
    assert sent[0]["status"] in (404, 405, 408)


@pytest.mark.parametrize("role", ["viewer", "cluster"])
@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("the secret of the inside"),
        OperationalError("SELECT secret FROM api_token", {"password": "secret"}, Exception("secret")),
        RecursionError("secret"),
    ],
)
async def test_internal_failure_reveals_no_internals(http, error, role, caplog):
    """Weakness 30: stack traces and SQL texts in answers."""
    http.actions.answer = error
    for path in ("/api/v1/ListBrokers", "/management?action=ListBrokers"):
        answer = await http.client.post(path, headers=http.headers(role))
        assert is_typed(answer) == "INTERNAL"
        assert not any(word in answer.text for word in ("secret", "Traceback", "SELECT", "Error", ".py"))
        reference = answer.json()["error"]["message"].rpartition(" ")[2]
        assert reference in caplog.text, "the log has the cause under this reference"


@pytest.mark.parametrize(
    "answer, status, code",
    [
        pytest.param(Answer(Status.REFUSED, "no", code="OperatorError"), 409, "REFUSED", id="refused"),
        pytest.param(Answer(Status.REFUSED, "no", code="InvalidName"), 400, "INVALID_REQUEST", id="wrong word"),
        pytest.param(Answer(Status.REFUSED, "no", code="MissingRight"), 403, "MISSING_RIGHT", id="scope"),
        pytest.param(Answer(Status.UNKNOWN, "perhaps"), 504, "OUTCOME_UNKNOWN", id="unknown"),
        pytest.param(Answer(Status.WAIT, "later", {"half": 1}), 503, "NOT_SERVED", id="database away"),
    ],
)
async def test_outcomes_have_status_and_code(http, answer, status, code):
    http.actions.answer = answer
    got = await http.client.post("/api/v1/DrainGroup", json={"brokerGroup": "g"}, headers=http.headers("operator"))
    assert (got.status_code, is_typed(got), got.json()["error"]["message"]) == (status, code, answer.message)
    assert (got.json()["error"].get("details", {}).get("data") == {"half": 1}) is (answer.data is not None)


@pytest.mark.parametrize(
    "name, content, problem",
    [
        pytest.param("AddBroker", b"{", "no JSON", id="cut"),
        pytest.param("AddBroker", b"[" * 900, "no JSON", id="deep"),
        pytest.param("AddBroker", b"\xff{}", "no JSON", id="no text"),
        pytest.param("AddBroker", b"[]", "no JSON object", id="array"),
        pytest.param("AddBroker", b"null", "no JSON object", id="null"),
        pytest.param("AddBroker", b"", "body is missing", id="no body"),
        pytest.param("ListBrokers", b"null", "no JSON object", id="null where nothing is required"),
        pytest.param("AddBroker", b"1" * 900, "no JSON object", id="long number"),
        pytest.param("AddBroker", b"{}", "brokerGroup, role, hostname, ip, servePort, syncPort: missing", id="empty"),
        pytest.param("AddBroker", json.dumps(MASTER | {"servePort": "1"}).encode(), "must be integer", id="text"),
        pytest.param("AddBroker", json.dumps(MASTER | {"servePort": True}).encode(), "must be integer", id="bool"),
        pytest.param("AddBroker", json.dumps(MASTER | {"servePort": 1e400}).encode(), "must be integer", id="infinite"),
        pytest.param("AddBroker", json.dumps(MASTER | {"servePort": 0}).encode(), "from 1 to 65535", id="range"),
        pytest.param("AddBroker", json.dumps(MASTER | {"hostname": 5}).encode(), "must be string", id="number"),
        pytest.param("AddBroker", json.dumps(MASTER | {"dryRun": "true"}).encode(), "must be boolean", id="flag"),
        pytest.param("AddBroker", json.dumps(MASTER | {"serveport": 1}).encode(), "did you mean servePort", id="typo"),
        pytest.param("AddBroker", json.dumps(MASTER | {"hostname": None}).encode(), "must be string", id="null word"),
        pytest.param("AddBroker", json.dumps(MASTER | {"hostname": ""}).encode(), "of 1 to 100", id="empty word"),
        pytest.param("ResetOffset", b'{"subject":"s","group":"g","code":"3"}', "must be one of 1, 2", id="choice"),
        pytest.param("AddBroker", json.dumps(MASTER | {"hostname": "\ud800"}).encode(), "not valid", id="surrogate"),
    ],
)
async def test_wrong_body_is_refused(http, name, content, problem):
    answer = await http.client.post(f"/api/v1/{name}", content=content, headers=http.headers("admin"))
    assert is_typed(answer) == "INVALID_REQUEST" and problem in answer.json()["error"]["message"]
    assert http.actions.ran == []


async def test_request_reaches_the_action_as_text(http):
    body = MASTER | {"servePort": 20881.0, "dryRun": True}
    answer = await http.client.post("/api/v1/AddBroker", json=body, headers=http.headers("admin"))
    assert answer.json() == {"data": {"did": "AddBroker"}, "message": ""}
    _, words, _ = http.actions.ran[0]
    assert words == {key: str(value) for key, value in MASTER.items()} | {"servePort": "20881", "dryRun": "true"}


async def test_query_parameters_are_checked(http):
    headers = http.headers("viewer")
    assert (await http.client.get("/api/v1/Lag?subject=a", headers=headers)).status_code == 200
    assert http.actions.ran[0][1] == {"subject": "a"}
    for wrong in ("Lag?subject=a&subject=b", "Lag?nothing=1", "Clients?limit=", "Clients?limit=x", "Clients?limit=0"):
        assert is_typed(await http.client.get(f"/api/v1/{wrong}", headers=headers)) == "INVALID_REQUEST", wrong
    answer = await http.client.post("/api/v1/Lag?subject=a", json={}, headers=headers)
    assert is_typed(answer) == "INVALID_REQUEST"


async def test_openapi_describes_each_action(http):
    document = (await http.client.get("/api/v1/openapi.json", headers=http.headers("client"))).json()
    assert {path.rpartition("/")[2] for path in document["paths"] if path.startswith("/api/v1/")} >= set(ACTIONS)
    for name, action in ACTIONS.items():
        operations = document["paths"][f"/api/v1/{name}"]
        assert set(operations) == ({"post"} if action.changes else {"get", "post"})
        schema = operations["post"]["requestBody"]["content"]["application/json"]["schema"]
        schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        assert set(schema["properties"]) == {parameter.name for parameter in action.all_parameters}


async def test_openapi_has_types_and_bounds(http):
    document = (await http.client.get("/api/v1/openapi.json", headers=http.headers("viewer"))).json()
    add = document["components"]["schemas"]["AddBroker"]
    assert add["required"] == [*MASTER] and add["additionalProperties"] is False
    port, name, flag = (add["properties"][name] for name in ("servePort", "hostname", "dryRun"))
    assert (port["type"], port["minimum"], port["maximum"]) == ("integer", 1, 65535)
    assert (name["type"], name["minLength"], name["maxLength"]) == ("string", 1, 100)
    assert (flag["type"], flag["default"]) == ("boolean", False)
    assert document["components"]["schemas"]["ResetOffset"]["properties"]["code"]["enum"] == ["1", "2"]
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert (path in OPEN) is ("security" not in operation), path
            assert set(operation["responses"]) <= {"200"} | {str(status) for status in models.STATUS.values()}
    assert set(document["components"]["schemas"]) == {*ACTIONS, "Done", "Error", "ErrorBody"}


async def test_health_reports_the_database(http):
    assert (await http.client.get("/health/ready")).json() == {"ready": True, "database": True}
    assert (await http.client.get("/health/live")).text == "ok"
    assert (await http.client.get("/meta/address")).text == "10.0.0.1:8081"


# The time limit of an action.


class Slow:
    """Actions that end at an event."""

    def __init__(self):
        self.may_end, self.was_cancelled = asyncio.Event(), False

    async def run(self, name, words, caller):
        try:
            await self.may_end.wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        raise TimeoutError("planted")


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(endpoints, "GRACE_MS", 0)
    return Slow(), replace(ACTIONS["DrainGroup"], wait_ms=1)


async def test_late_change_goes_on_and_logs_its_error(impatient, caplog):
    """Weakness 34: the operator saw a failure while the change happened."""
    slow, action = impatient
    answer = await endpoints.run_within(slow, action, {}, Caller("ann", TokenRole.ADMIN))
    assert answer.status is Status.UNKNOWN and "continues" in answer.message
    slow.may_end.set()
    while endpoints._running:
        await asyncio.sleep(0)
    assert "action failed after its caller left: TimeoutError('planted')" in caplog.text


async def test_late_reading_is_cancelled(impatient):
    slow, action = impatient
    answer = await endpoints.run_within(slow, replace(action, changes=False), {}, Caller("ann", TokenRole.ADMIN))
    assert answer.status is Status.WAIT
    while endpoints._running:
        await asyncio.sleep(0)
    assert slow.was_cancelled


async def test_error_of_an_action_in_time_passes_through(impatient, caplog):
    slow, action = impatient
    slow.may_end.set()
    with pytest.raises(TimeoutError, match="planted"):
        await endpoints.run_within(slow, replace(action, wait_ms=60_000), {}, Caller("ann", TokenRole.ADMIN))
    assert not caplog.text
