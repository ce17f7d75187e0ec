"""Shell. Requests generated from the OpenAPI document, valid and invalid, by each role and with a failing database.

Each error has a type, each answer is described, forbidden requests are refused, and refused calls change nothing.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from contextlib import contextmanager

import pytest
import requests
import schemathesis
from hypothesis import given
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)
from sqlalchemy import Engine, event
from sqlalchemy.exc import OperationalError

from qmq.metaserver.routes import hub
from qmq.rights import TokenRole, includes
from tests.integration.metaserver_world import TOKEN, WAIT_S, World
from tests.support.effort import generated

VOLATILE = {"metaserver", "broker_sighting", "sqlite_sequence"}
"""Tables that change by themselves."""
CHECKS = [content_type_conformance, response_schema_conformance, status_code_conformance]
ROLES = [None, *TokenRole]
REFUSED_EXAMPLES, EXAMPLES = 2, 10


class Running:
    """A metaserver with a broker group, on a thread of its own, and a token of each role."""

    def __init__(self, folder):
        self.database = folder / "metaserver.db"
        self.tokens = {None: "", TokenRole.CLUSTER: TOKEN}
        self._ready, self._stop = threading.Event(), None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    def __enter__(self):
        self._thread.start()
        assert self._ready.wait(WAIT_S)
        self.document = self.call("GET", "/api/v1/openapi.json", TokenRole.VIEWER).json()
        del self.document["components"]["securitySchemes"]  # each test sends its token itself
        for operations in self.document["paths"].values():
            for operation in operations.values():
                operation.pop("security", None)
        self.schema = schemathesis.openapi.from_dict(self.document)
        return self

    def __exit__(self, *_):
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()

    async def _run(self):
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        world = await World(self.database).start()
        try:
            self.url = world.url
            await world.add("g1", 0, "a", 20001)
            await world.add("g1", 1, "b", 20003)
            for role in set(TokenRole) - {TokenRole.CLUSTER}:
                self.tokens[role] = (await world.done("AddToken", name=f"my {role}", role=role))["token"]
            self._ready.set()
            await self._stop.wait()
        finally:
            await world.close()

    def call(self, method, path, role):
        return requests.request(method, self.url + path, headers={"X-Api-Token": self.tokens[role]}, timeout=WAIT_S)

    def facts(self):
        """All that is stored."""
        with sqlite3.connect(f"file:{self.database}?mode=ro", uri=True) as database:
            tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            found = {name: database.execute(f"SELECT * FROM {name}").fetchall() for name in tables - VOLATILE}
        database.close()
        return found

    def operations(self):
        """Return all operations but /management, which answers 200 in all cases, as QMQ does."""
        found = [result.ok() for result in self.schema.get_all_operations()]
        return [operation for operation in found if operation.path != "/management"]


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch, Running(tmp_path_factory.mktemp("metaserver")) as started:
        patch.setattr(hub, "STORE_WAIT_S", 20)  # no new subject is stored during the next request
        yield started


@contextmanager
def failing_sql():
    """Let every statement of this process fail, as when the database is gone."""

    def fail(connection, cursor, statement, *_):
        raise OperationalError(statement, {}, Exception("the server has gone away"))

    event.listen(Engine, "before_cursor_execute", fail)
    try:
        yield
    finally:
        event.remove(Engine, "before_cursor_execute", fail)


def requests_of(operation):
    positive = operation.as_strategy(generation_mode=GenerationMode.POSITIVE)
    return positive | operation.as_strategy(generation_mode=GenerationMode.NEGATIVE)


TOO_LONG = 413


def is_wrong(case):
    return case.meta.generation.mode is GenerationMode.NEGATIVE


def make_likely(case):
    """Use existing names and no waits; otherwise all requests would be refused for their names."""
    if is_wrong(case):
        return
    for words in (case.body, case.query):
        if isinstance(words, dict):
            if isinstance(words.get("brokerGroup"), str) and len(words["brokerGroup"]) % 2:
                words["brokerGroup"] = "g1"
            words.pop("waitMs", None)


def is_typed(answer):
    error = answer.json()["error"]
    return set(error) <= {"code", "message", "action", "details"} and "Traceback" not in answer.text


def try_all(running, operations, role, examples, check):
    for operation in operations:

        @generated(examples)
        @given(case=requests_of(operation))
        def send(case):
            make_likely(case)
            answer = case.call(base_url=running.url, headers={"X-Api-Token": running.tokens[role]}, timeout=WAIT_S)
            case.validate_response(answer, checks=CHECKS)
            assert answer.status_code == 200 or is_typed(answer), answer.text
            check(case, answer)

        send()


def refuses_only(*statuses):
    def check(case, answer):
        assert answer.status_code in statuses, (case.operation.label, answer.status_code, answer.text)

    return check


def allowed_for(operation, role):
    needed = operation.definition.raw.get("x-role")
    return needed is None or (role is not None and includes(role, TokenRole(needed)))


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role or "anonymous")
def test_forbidden_action_changes_nothing(running, role):
    before = running.facts()
    denied = [operation for operation in running.operations() if not allowed_for(operation, role)]
    try_all(running, denied, role, REFUSED_EXAMPLES, refuses_only(403 if role else 401))
    assert running.facts() == before
    assert bool(denied) is (role != TokenRole.CLUSTER)


@pytest.mark.parametrize("role", [TokenRole.CLIENT, TokenRole.VIEWER, TokenRole.OPERATOR, TokenRole.ADMIN])
def test_allowed_action_answers_as_documented(running, role):
    allowed = [operation for operation in running.operations() if allowed_for(operation, role)]
    facts, seen = running.facts(), set()

    def check(case, answer):
        nonlocal facts
        case.validate_response(answer, checks=[not_a_server_error] if answer.status_code < 503 else [])
        seen.add(answer.status_code)
        if is_wrong(case) and answer.status_code != TOO_LONG:  # the check lacks this refusal
            case.validate_response(answer, checks=[negative_data_rejection])
        now = running.facts()
        makes_routes = case.operation.path == "/meta/routes"  # as a client that watches does
        if answer.status_code != 200 or (case.method == "GET" and not makes_routes):
            assert now == facts, (case.operation.label, answer.text)
        facts = now

    try_all(running, allowed, role, EXAMPLES, check)
    assert {200, 400} | ({409} if role != TokenRole.CLIENT else set()) <= seen, "right and wrong requests were made"


@pytest.mark.parametrize("role", [None, TokenRole.VIEWER, TokenRole.CLUSTER], ids=lambda role: role or "anonymous")
def test_failing_database_gives_typed_errors(running, role):
    before = running.facts()
    with failing_sql():
        try_all(running, running.operations(), role, REFUSED_EXAMPLES, refuses_only(200, 400, 401, 403, 409, 503, 504))
    assert running.facts() == before
