"""Core. What a metaserver has in memory as a dump of the tables: for a database that has lost it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from qmq.metaserver.db.dumps import FORMAT, VERSION
from qmq.metaserver.db.rows import to_json
from qmq.metaserver.model import Directory, Group, Route, TokenRow

IN_NO_MEMORY = ("consumer_group", "datasource_config", "audit_trail")
"""What only the database has: it stays as it is there."""

Rows = list[dict[str, Any]]


def dump_of(
    directory: Directory,
    routes: Iterable[Route],
    tokens: Iterable[TokenRow],
    terms: Mapping[str, int],
    present: Mapping[str, Any],
) -> dict[str, Any]:
    """Make a dump that `RestoreAll` takes.

    Args:
        terms: of each group the newest term that was ever reported or given out.
        present: a dump of what the database has.
    """
    now = int(present["time"])
    groups = list(directory.groups.values())
    tables = {
        "broker_group": [_group(group, max(group.term, terms.get(group.name, 0)), now) for group in groups],
        "broker": [row for group in groups for row in _brokers(group, now)],
        "readonly_broker_group_setting": [
            {"subject": mark.subject, "broker_group": mark.group, "create_time": now}
            for mark in sorted(directory.marks)
        ],
        "subject_info": [
            {"name": info.name, "tag": info.tag, "create_time": now, "update_time": info.update_time_ms}
            for info in directory.subjects.values()
        ],
        "subject_route": [_route(route, now) for route in routes],
        "client_offline_state": [
            {"client_id": one.consumer, "subject_info": one.subject, "consumer_group": one.group, "state": 1}
            for one in sorted(directory.offline)
        ],
        "operator_limits": [
            {
                "subject_info": one.subject,
                "consumer_group": one.group,
                "expires_after_s": one.expires_after_s,
                "expired_die": one.expired_die,
                "per_second": one.per_second,
                "messages_max": one.messages_max,
                "drops_oldest": one.drops_oldest,
                "bytes_max": one.bytes_max,
                "dead_letters_to": one.dead_letters_to,
            }
            for one in sorted(directory.limits)
        ],
        "api_token": [_token(token) for token in tokens],
        **{name: present["tables"][name] for name in IN_NO_MEMORY},
    }
    return {"format": FORMAT, "version": VERSION, "schema": present["schema"], "time": now, "tables": tables}


def _group(group: Group, term: int, now: int) -> dict[str, Any]:
    return {
        "group_name": group.name,
        "kind": group.kind,
        "term": term,
        "half_swapped": group.half_swapped,
        "tag": group.tag,
        "draining": group.draining,
        "is_full": group.full,
        "min_copies": group.min_copies,
        "lost_term": group.lost_term,
        "failover": group.failover,
        "sync_mode": group.sync_mode,
        "create_time": now,
        "update_time": group.update_time_ms,
    }


def _brokers(group: Group, now: int) -> Rows:
    return [
        {
            "group_name": group.name,
            "role": int(broker.role),
            "hostname": broker.hostname,
            "ip": broker.ip,
            "serve_port": broker.serve_port,
            "sync_port": broker.sync_port,
            "control_port": broker.control_port,
            "metrics_port": broker.metrics_port,
            "incarnation": broker.incarnation,
            "complete": False,
            "fill_id": broker.fill_id,
            "fill_allowed": broker.fill_allowed,
            "instance": broker.instance,
            "create_time": now,
            "update_time": now,
        }
        for broker in group.brokers
    ]


def _route(route: Route, now: int) -> dict[str, Any]:
    return {
        "subject_info": route.subject,
        "broker_group_json": to_json(list(route.groups)),
        "version": route.version,
        "changed": 0,
        "create_time": now,
        "update_time": route.update_time_ms,
    }


def _token(token: TokenRow) -> dict[str, Any]:
    return {
        "id": token.id,
        "name": token.name,
        "role": token.role,
        "salt": token.salt,
        "hash": token.hash,
        "subjects_json": to_json(list(token.subjects)),
        "groups_json": to_json(list(token.groups)),
        "create_time": token.created_ms,
        "expire_time": token.expires_ms,
        "revoke_time": token.revoked_ms,
    }
