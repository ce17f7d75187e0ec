"""Shell. Requests of the local cluster to its processes: actions at the metaserver, state of a broker."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

import grpc

from qmq.control_plane import CHANNEL_OPTIONS, DIRECT
from qmq.errors import NotServed, OperatorError
from qmq.proto import qmq_pb2, qmq_pb2_grpc

ACTION_S = 60.0
"""Maximum time of an action; actions such as SwapRoles have shorter bounds of their own."""


def answers(url: str) -> bool:
    """Return whether a GET of `url` succeeds."""
    try:
        with DIRECT.open(url, timeout=1.0) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def metrics(url: str, token: str, timeout_s: float = 60.0) -> dict[str, float]:
    """Scrape a process; return "name{labels}" -> value. Raises OSError."""
    request = urllib.request.Request(f"{url}/metrics", headers={"X-Api-Token": token})
    with DIRECT.open(request, timeout=timeout_s) as answer:
        lines = answer.read().decode().splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


def manage(url: str, token: str, action: str, **parameters: object) -> Any:
    """Post an operator's action; return the data of its answer.

    Raises:
        OperatorError: the action was refused, for the reason in the text.
        NotServed: the metaserver does not answer.
    """
    form = urllib.parse.urlencode({"action": action, **parameters}).encode()
    request = urllib.request.Request(f"{url}/management", data=form, headers={"X-Api-Token": token})
    try:
        with DIRECT.open(request, timeout=ACTION_S) as answer:
            text = answer.read().decode()
    except urllib.error.HTTPError as error:
        raise OperatorError(f"{action}: {error.code} {error.read().decode('utf-8', 'replace')}") from None
    except (OSError, http.client.HTTPException) as error:
        raise NotServed(f"{action}: no answer from the metaserver at {url}: {error}") from None
    try:
        result = json.loads(text)
    except ValueError:
        raise OperatorError(f"{action}: {text}") from None
    if isinstance(result, dict) and (result.get("status", 0) != 0 or "error" in result):
        raise OperatorError(f"{action}: {result.get('message') or result.get('error')}")
    return result.get("data", result) if isinstance(result, dict) else result


def broker_state(control_address: str, token: str, *, timeout_s: float = 1.0) -> qmq_pb2.BrokerState | None:
    """Return a broker's state, or None while it does not answer."""
    with grpc.insecure_channel(control_address, options=CHANNEL_OPTIONS) as channel:
        try:
            stub = qmq_pb2_grpc.BrokerStub(channel)
            state: qmq_pb2.BrokerState = stub.ReplicaStatus(
                qmq_pb2.Nothing(), timeout=timeout_s, metadata=[("x-api-token", token)]
            )
        except grpc.RpcError:
            return None
    return state
