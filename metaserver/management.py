"""Shell. Operators' actions: words in, JSON out. What may be done is decided in `metaserver.roles`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy.exc import SQLAlchemyError

from metaserver import roles
from metaserver.metrics import Metrics
from metaserver.model import ALL_SUBJECTS, Broker, Group, ReadonlyMark, ReplicaState
from metaserver.registry import Registry
from metaserver.rpc.broker_client import Brokers
from metaserver.swap import Swaps
from qmq.errors import OperatorError, OutcomeUnknown, QmqError
from qmq.subjects import check_name

log = logging.getLogger("qmq.metaserver")

Words = Mapping[str, str]
DONE, REFUSED, UNKNOWN = 0, -1, -2
"""The field `status` of an answer: QMQ's two, and ours for a change that may or may not have been made."""


@dataclass(frozen=True, slots=True)
class Action:
    """One operator's action."""

    run: Callable[[Words], Awaitable[Any]]
    needs_token: bool = True
    """QMQ's lists may be asked for without a token. A wrong one is refused all the same."""
    raw: bool = False
    """The answer is the bare result, without an envelope."""


class Management:
    """All actions by name. Created by main."""

    def __init__(self, registry: Registry, swaps: Swaps, brokers: Brokers, metrics: Metrics) -> None:
        self._registry = registry
        self._swaps = swaps
        self._brokers = brokers
        self._metrics = metrics
        self.actions = {
            "AddBroker": Action(self._add_broker),
            "ReplaceBroker": Action(self._replace_broker),
            "SwapRoles": Action(self._swap_roles),
            "MarkReadonlyBrokerGroup": Action(lambda words: self._mark(words, readonly=True)),
            "UnMarkReadonlyBrokerGroup": Action(lambda words: self._mark(words, readonly=False)),
            "ListBrokers": Action(self._list_brokers, needs_token=False),
            "ListBrokerGroups": Action(self._list_broker_groups, needs_token=False, raw=True),
            "ReplicaStatus": Action(self._replica_status, needs_token=False),
        }

    async def run(self, name: str, words: Words) -> Any:
        """Carry out an action that exists; return its answer as JSON values. Refusals are answers, not exceptions."""
        action = self.actions[name]
        try:
            data = await action.run(words)
        except OutcomeUnknown as error:
            return self._answer(name, UNKNOWN, "unknown", str(error))
        except QmqError as error:
            return self._answer(name, REFUSED, "refused", str(error))
        except SQLAlchemyError as error:
            text = f"the database failed ({type(error).__name__}); the change may be stored or not: look, then repeat"
            log.error("management action=%s database failed: %s", name, error)
            return self._answer(name, UNKNOWN, "unknown", text)
        return data if action.raw else self._answer(name, DONE, "done", "", data)

    def _answer(self, name: str, status: int, result: str, message: str, data: Any = None) -> dict[str, Any]:
        self._metrics.actions.labels(name, result).inc()
        if status != DONE:
            log.warning("management action=%s %s: %s", name, result, message)
        return {"status": status, "message": message, "data": data}

    async def _add_broker(self, words: Words) -> Any:
        broker = _broker(words)
        await self._registry.change_roles(lambda directory: roles.add_broker(directory, broker))
        return self._broker_json(broker)

    async def _replace_broker(self, words: Words) -> Any:
        return self._broker_json(await self._registry.replace_broker(_broker(words)))

    async def _swap_roles(self, words: Words) -> Any:
        swapped = await self._swaps.swap(_group_name(words))
        group = swapped.group
        return {
            "brokerGroup": group.name,
            "term": group.term,
            "master": group.master and self._broker_json(group.master),
            "slave": group.slave and self._broker_json(group.slave),
            "logEnd": swapped.at_end.log_end,
            "chain": f"{swapped.at_end.chain:016x}",
            "writable": swapped.writable,
            "durationMs": swapped.duration_ms,
        }

    async def _mark(self, words: Words, *, readonly: bool) -> Any:
        name, subject = _group_name(words), words.get("subject") or ALL_SUBJECTS
        if subject != ALL_SUBJECTS:
            check_name("subject", subject)
        self._find_group(name)
        await self._registry.mark(ReadonlyMark(subject, name), readonly=readonly)
        return "success"

    async def _list_brokers(self, words: Words) -> Any:
        wanted = words.get("brokerGroup", "")
        await self._registry.reload()
        brokers = sorted(self._registry.directory.brokers(), key=lambda broker: (broker.group, broker.role))
        return [self._broker_json(broker) for broker in brokers if wanted in ("", broker.group)]

    async def _list_broker_groups(self, words: Words) -> Any:
        await self._registry.reload()
        return [self._group_json(group) for _, group in sorted(self._registry.directory.groups.items())]

    async def _replica_status(self, words: Words) -> Any:
        if words.get("brokerGroup"):
            groups = [self._find_group(_group_name(words))]
        else:
            groups = [group for _, group in sorted(self._registry.directory.groups.items())]
        return list(await asyncio.gather(*(self._status_json(group) for group in groups)))

    def _find_group(self, name: str) -> Group:
        group = self._registry.directory.groups.get(name)
        if group is None:
            raise OperatorError(f"there is no broker group {name}; ListBrokerGroups names them")
        return group

    def _broker_json(self, broker: Broker) -> dict[str, Any]:
        return {
            "group": broker.group,
            "role": broker.role.name,
            "hostname": broker.hostname,
            "ip": broker.ip,
            "servePort": broker.serve_port,
            "syncPort": broker.sync_port,
            "controlPort": broker.control_port,
            "metricsPort": broker.metrics_port,
            "up": self._registry.is_up(broker),
        }

    def _group_json(self, group: Group) -> dict[str, Any]:
        state = self._registry.state(group.master) if group.master else None
        writable = self._registry.is_writable(group)
        return {
            "groupName": group.name,
            "master": f"{group.master.ip}:{group.master.serve_port}" if group.master else "",
            "slaves": [f"{group.slave.ip}:{group.slave.serve_port}"] if group.slave else [],
            "updateTime": group.update_time_ms,
            "brokerState": "RW" if writable else "R" if state else "NRW",
            "tag": "",
            "kind": "NORMAL",
            "ext": None,
            "term": group.term,
            "writable": writable,
            "readonlySubjects": self._registry.directory.readonly_subjects(group.name),
            "readonlyReasons": list(state.readonly_reasons) if state else [],
            "halfSwapped": group.half_swapped,
        }

    async def _status_json(self, group: Group) -> dict[str, Any]:
        replicas = await asyncio.gather(*(self._replica_json(broker) for broker in group.brokers))
        asked = [replica for replica in replicas if replica["reachable"]]
        ends, chains = [replica["logEnd"] for replica in asked], {replica["chain"] for replica in asked}
        both, comparable = len(asked) == 2, len(asked) == 2 and ends[0] == ends[1]
        return {
            "brokerGroup": group.name,
            "term": group.term,
            "writable": self._registry.is_writable(group),
            "readonlySubjects": self._registry.directory.readonly_subjects(group.name),
            "equal": len(chains) == 1 if comparable else None,  # chains of different ends say nothing
            "lagBytes": max(ends[0] - ends[1], 0) if both else None,
            "replicas": replicas,
        }

    async def _replica_json(self, broker: Broker) -> dict[str, Any]:
        """What the broker says now; when it does not answer, what its last heartbeat said, or nulls."""
        state, error = self._registry.state(broker), ""
        reachable = False
        if not broker.control_port:
            error = "it never registered"
        else:
            try:
                state, reachable = await self._brokers.replica_status(broker), True
            except QmqError as refused:
                error = str(refused)
        return {
            "role": broker.role.name,
            "hostname": broker.hostname,
            "ip": broker.ip,
            "servePort": broker.serve_port,
            "up": self._registry.is_up(broker),
            "reachable": reachable,
            "error": error,
            **_state_json(state),
        }


def _state_json(state: ReplicaState | None) -> dict[str, Any]:
    return {
        "term": state and state.term,
        "boot": state and state.boot,
        "logStart": state and state.log_start,
        "logEnd": state and state.log_end,
        "flushedEnd": state and state.flushed_end,
        "matchedEnd": state and state.matched_end,
        "highWatermark": state and state.high_watermark,
        "chain": state and f"{state.chain:016x}",  # text: JSON readers cut numbers of 64 bits
        "writable": state and state.writable,
        "readonlyReasons": state and list(state.readonly_reasons),
        "durability": state and state.durability,
    }


def _broker(words: Words) -> Broker:
    given = [words.get(name, "") for name in ("brokerGroup", "role", "hostname", "ip", "servePort", "syncPort")]
    return roles.parse_broker(*given)


def _group_name(words: Words) -> str:
    return check_name("brokerGroup", words.get("brokerGroup", ""))
