"""Core. Describes the JSON API as an OpenAPI document, made from the list of actions, and holds requests against it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from metaserver.actions import Action, Kind, Parameter
from metaserver.actions.words import unknown_word
from metaserver.http import errors
from qmq.errors import InvalidRequest

PREFIX = "/api/v1"
NUMBER_MAX = 2**53
"""Larger ones do not survive every JSON reader."""

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["code", "message", "action"],
            "properties": {
                "code": {"type": "string", "enum": sorted(errors.STATUS)},
                "message": {"type": "string"},
                "action": {"type": "string"},
                "details": {"type": "object"},
            },
        }
    },
}
_SECURITY: list[dict[str, Any]] = [{"token": []}, {"bearer": []}]
_DONE = {
    "type": "object",
    "required": ["data", "message"],
    "properties": {"data": {}, "message": {"type": "string"}},
}


def describe(actions: Iterable[Action], *, version: str) -> dict[str, Any]:
    """Return the document."""
    paths: dict[str, Any] = {path: {"get": operation} for path, operation in _others()}
    paths["/management"] = {"post": _management()}
    for action in actions:
        operations = {"post": _operation(action, with_body=True)}
        if not action.changes:
            operations["get"] = _operation(action, with_body=False)
        paths[f"{PREFIX}/{action.name}"] = operations
    return {
        "openapi": "3.1.0",
        "info": {"title": "qmq metaserver", "version": version},
        "paths": paths,
        "components": {
            "securitySchemes": {
                "token": {"type": "apiKey", "in": "header", "name": "X-Api-Token"},
                "bearer": {"type": "http", "scheme": "bearer"},
            },
            "schemas": {"Error": _ERROR, "Done": _DONE},
        },
        "security": _SECURITY,
    }


def _others() -> Iterable[tuple[str, dict[str, Any]]]:
    """What is asked for by others than operators: who is open to all, who is not."""
    yield "/health/live", _plain("whether the process runs")
    ready = _plain("whether it serves, and whether its database answers", kind="application/json")
    yield "/health/ready", ready | {"responses": ready["responses"] | {"503": {"description": "it stops"}}}
    address = _plain("ip:port of the gRPC service")
    yield "/meta/address", address | {"responses": address["responses"] | {"503": {"description": "it stops"}}}
    yield (
        "/metrics",
        _plain("metrics for Prometheus") | {"security": _SECURITY, "x-role": "viewer"} | _errors("metrics"),
    )
    words = {
        "subject": {"type": "array", "items": {"type": "string"}, "minItems": 1},
        "held": {"type": "array", "items": {"type": "string"}, "description": "subject:version in hexadecimal"},
        "app": {"type": "string"},
        "clientId": {"type": "string"},
        "produces": {"type": "string", "enum": ["true", "false"]},
    }
    yield (
        "/meta/routes",
        _plain("routes of subjects, for clients without gRPC")
        | {
            "security": _SECURITY,
            "x-role": "client",
            "parameters": [
                {"name": name, "in": "query", "required": name == "subject", "schema": schema}
                for name, schema in words.items()
            ],
        }
        | _errors("routes", kind="application/json"),
    )


def _plain(summary: str, kind: str = "text/plain") -> dict[str, Any]:
    return {
        "summary": summary,
        "security": [],
        "responses": {"200": {"description": summary, "content": {kind: {"schema": {}}}}},
    }


def _errors(summary: str, kind: str = "text/plain") -> dict[str, Any]:
    done = {"200": {"description": summary, "content": {kind: {"schema": {}}}}}
    return {"responses": done | _error_responses()}


def _error_responses() -> dict[str, Any]:
    by_status = sorted(errors.STATUS.items(), key=lambda item: item[1])
    return {str(status): _content("Error", code) for code, status in by_status}


def _management() -> dict[str, Any]:
    schema = {"type": "object", "required": ["action"], "properties": {"action": {"type": "string"}}}
    content: dict[str, Any] = {"application/json": {"schema": {}}, "text/plain": {"schema": {}}}
    return {
        "summary": "as QMQ's tools ask: `action` and its parameters in a form or the address; 200 in all cases",
        "security": _SECURITY,
        "requestBody": {"content": {"application/x-www-form-urlencoded": {"schema": schema}}},
        "responses": {"200": {"description": "QMQ's three styles", "content": content}} | _error_responses(),
    }


def _operation(action: Action, *, with_body: bool) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": action.name if with_body else f"get{action.name}",
        "summary": action.summary,
        "description": f"Needs a token with the role {action.role}.",
        "x-role": str(action.role),
        "responses": {"200": _content("Done", "the answer")} | _error_responses(),
    }
    if with_body:
        schema = {
            "type": "object",
            "properties": {one.name: schema_of(one) for one in action.all_parameters},
            "required": [one.name for one in action.all_parameters if one.required],
            "additionalProperties": False,
        }
        required = bool(schema["required"])
        operation["requestBody"] = {"required": required, "content": {"application/json": {"schema": schema}}}
    else:
        operation["parameters"] = [
            {"name": one.name, "in": "query", "required": one.required, "schema": schema_of(one)}
            for one in action.all_parameters
        ]
    return operation


def _content(schema: str, description: str) -> dict[str, Any]:
    reference = {"$ref": f"#/components/schemas/{schema}"}
    return {"description": description, "content": {"application/json": {"schema": reference}}}


def schema_of(parameter: Parameter) -> dict[str, Any]:
    """The JSON schema of a parameter. What the rules of names forbid beyond it is refused with a reason."""
    schema: dict[str, Any] = {"description": parameter.description}
    match parameter.kind:
        case Kind.FLAG:
            schema["type"] = "boolean"
        case Kind.PORT:
            schema |= {"type": "integer", "minimum": 1, "maximum": 65535}
        case Kind.NUMBER:
            most = min(parameter.most, NUMBER_MAX)
            schema |= {"type": "integer", "minimum": parameter.least, "maximum": most}
        case Kind.CHOICE:
            schema |= {"type": "string", "enum": list(parameter.choices)}
        case Kind.JSON:
            schema["type"] = "object"
        case _:
            schema |= {"type": "string", "maxLength": parameter.chars_max}
            if parameter.required:
                schema["minLength"] = 1
    return schema


def read_body(action: Action, body: bytes) -> dict[str, str]:
    """Turn a JSON body into the words of an action.

    Raises:
        InvalidRequest: it is no JSON object, or a value has another type than the document says.
    """
    if not body.strip():
        return {}
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the body is no JSON: {error}") from None
    if not isinstance(given, dict):
        raise InvalidRequest("the body is no JSON object")
    return {name: _as_text(_parameter(action, name), value) for name, value in given.items()}


def read_query(action: Action, pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Turn a query string into the words of an action; raises InvalidRequest for a word it has not, or has twice."""
    words: dict[str, str] = {}
    for name, text in pairs:
        parameter = _parameter(action, name)
        if name in words:
            raise InvalidRequest(f"{name} is given twice")
        if not text and parameter.kind not in (Kind.TEXT, Kind.NAME, Kind.NAMES, Kind.PATTERN):
            raise InvalidRequest(f"{name} is empty")
        if parameter.kind is Kind.FLAG and text not in ("true", "false"):
            raise InvalidRequest(f"{name} is neither true nor false")
        words[name] = text
    return words


def _parameter(action: Action, name: str) -> Parameter:
    parameter = action.parameter(name)
    if parameter is None:
        known = [one.name for one in action.all_parameters]
        raise InvalidRequest(unknown_word(f"parameter of {action.name}", name, known))
    return parameter


def _as_text(parameter: Parameter, value: object) -> str:
    match parameter.kind:
        case Kind.FLAG if isinstance(value, bool):
            return "true" if value else "false"
        case Kind.NUMBER | Kind.PORT if _is_whole(value):
            return str(int(value))  # type: ignore[call-overload]
        case Kind.JSON if isinstance(value, dict):
            return json.dumps(value)
        case Kind.FLAG | Kind.NUMBER | Kind.PORT | Kind.JSON:
            raise InvalidRequest(f"{parameter.name} must be {schema_of(parameter)['type']}")
        case _ if isinstance(value, str):
            return value
    raise InvalidRequest(f"{parameter.name} must be string")


def _is_whole(value: object) -> bool:
    """JSON knows one kind of numbers: 1.0 is a whole one."""
    if isinstance(value, bool):
        return False
    return isinstance(value, int) or (isinstance(value, float) and abs(value) < NUMBER_MAX and value.is_integer())


def missing(action: Action, words: Mapping[str, str]) -> list[str]:
    """Parameters that are required and not given."""
    return [one.name for one in action.all_parameters if one.required and not words.get(one.name)]
