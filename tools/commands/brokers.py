"""Core. Commands for brokers and broker groups: members, roles, copies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from qmq.tools.command import GROUP, Command, Kind, Option, bad, good, listing, of_action, warning
from qmq.tools.table import Block, Cell, Column, Table, good_or_bad, moment, span


def _added(broker: Any) -> Iterable[Block]:
    yield good(f"{broker['hostname']}:{broker['servePort']} is now the {broker['role']} of {broker['group']}")


def _replaced(before: Any) -> Iterable[Block]:
    yield good(
        f"{before['hostname']}:{before['servePort']} was the {before['role']} of {before['group']} and is replaced"
    )


def _removed(data: Any) -> Iterable[Block]:
    yield good(f"{data['hostname']}:{data['servePort']} is removed from {data['group']}")


def _new_master(data: Any) -> Iterable[Block]:
    group, master = data["brokerGroup"], data["master"]
    yield good(f"{group}: {master['hostname']}:{master['servePort']} is the master in term {data['term']}")


def _not_yet_writable() -> Block:
    return warning("the group is still readonly; ListBrokerGroups shows why")


def _swapped(data: Any) -> Iterable[Block]:
    master, slave = data["master"], data["slave"]
    yield (
        f"{data['brokerGroup']}: term {data['term']}, master {master['hostname']}:{master['servePort']}, "
        f"slave {slave['hostname']}:{slave['servePort']}"
    )
    yield f"logs equal up to {data['logEnd']} (chain {data['chain']}); took {span(data['durationMs'])}"
    if data["writable"]:
        yield good("the group accepts produces")
    else:
        yield _not_yet_writable()


def _failed_over(data: Any) -> Iterable[Block]:
    yield from _new_master(data)
    yield (
        f"its log ends at {data['logEnd']}, acknowledged was {data['acknowledged']}; promised: "
        f"{', '.join(data['promised'])}"
    )
    if not data["writable"]:
        yield _not_yet_writable()


def _loss_acknowledged(data: Any) -> Iterable[Block]:
    if data["lostTerm"]:
        yield good(f"{data['brokerGroup']}: the loss of term {data['lostTerm']} is acknowledged; AuditTrail keeps it")
    else:
        yield f"{data['brokerGroup']}: no loss was accepted that is not acknowledged"


def _failover_set(data: Any) -> Iterable[Block]:
    how = {"on": "automatically", "off": "only by Failover"}.get(data["failover"], "by the metaservers' setting")
    yield good(f"{data['brokerGroup']} fails over {how}")


def _copies(data: Any) -> Iterable[Block]:
    yield good(f"{data['brokerGroup']}: {data['minCopies']} of {data['copies']} copies acknowledge")
    if data["syncMode"] == "manual":
        yield "a slave that has to be filled waits for SyncReplica"


def _fill_ordered(data: Any) -> Iterable[Block]:
    broker = f"{data['hostname']}:{data['servePort']} of {data['group']}"
    if data["filling"] == "allowed":
        yield good(f"{broker} is filled; ReplicaStatus shows its progress")
    else:
        yield good(f"{broker} is not filled until SyncReplica; it keeps its data")


def _quarantine(data: Any) -> Iterable[Block]:
    columns = (
        Column("PART", "name"),
        Column("BYTES", "bytes"),
        Column("MESSAGES", "messages"),
        Column("EVIDENCE", lambda row: "yes" if row["evidence"] else ""),
        Column("WHY", "why", fold=20),
    )
    for copy in data["brokers"]:
        broker = f"{copy['hostname']}:{copy['servePort']}"
        if why := data["unasked"].get(broker):
            yield warning(f"{broker}: no answer, {why}")
            continue
        title = f"\n{broker}: {copy['bytes']:,} of at most {copy['bytesMax']:,} bytes"
        yield Table(columns, copy["parts"], title=title, empty=f"{broker} keeps nothing")
    if any(part["evidence"] for copy in data["brokers"] for part in copy["parts"]):
        yield "evidence may be the last copy of acknowledged messages: it is cleared by name only"


def _cleared(data: Any) -> Iterable[Block]:
    yield good(f"{data['broker']}: {len(data['cleared'])} parts cleared, {data['bytes']:,} bytes")


def _rates(data: Any) -> Iterable[Block]:
    columns = (
        Column("UNTIL", moment("at")),
        Column("TAKEN/S", lambda row: round(row.get("taken", 0), 1)),
        Column("DELIVERED/S", lambda row: round(row.get("delivered", 0), 1)),
    )
    yield Table(columns, data["rates"][-12:], empty="its master has just begun, or does not answer")
    for name, why in data["unasked"].items():
        yield warning(f"{name}: no answer, {why}")


def _brokers(brokers: Any) -> Table:
    return Table(
        (
            Column("GROUP", "group"),
            Column("ROLE", "role"),
            Column("HOSTNAME", "hostname"),
            Column("IP", "ip", drop=1),
            Column("SERVE", "servePort"),
            Column("SYNC", "syncPort", drop=3),
            Column("CONTROL", "controlPort", drop=4),
            Column("METRICS", "metricsPort", drop=5),
            Column("UP", good_or_bad("up")),
        ),
        brokers,
        empty="no broker is added yet; AddBroker adds one",
    )


def _groups(groups: Any) -> Table:
    return Table(
        (
            Column("GROUP", "groupName"),
            Column("TERM", "term", drop=5),
            Column("ACCEPTS", _accepts),
            Column("MASTER", "master"),
            Column("SLAVES", lambda group: group.get("slaves")),
            Column("WHY NOT", _reasons, fold=12),
            Column("READONLY SUBJECTS", lambda group: group.get("readonlySubjects"), drop=2, fold=20),
            Column("TAG", "tag", drop=4),
            Column("KIND", lambda group: "" if group.get("kind") == "NORMAL" else group.get("kind"), drop=1),
        ),
        groups,
        empty="no broker group; AddBroker makes one",
    )


def _accepts(group: Mapping[str, Any]) -> Cell:
    if group.get("draining"):
        return warning("draining")
    if group.get("full"):
        return warning("old subjects")
    if group.get("writable"):
        return good("produces")
    return warning("pulls only") if group.get("brokerState") == "R" else bad("nothing")


def _reasons(group: Mapping[str, Any]) -> list[str]:
    half = ["half swapped"] if group.get("halfSwapped") else []
    return half + list(group.get("readonlyReasons") or [])


_VERDICT = {True: good("logs are equal"), False: bad("LOGS DIFFER: stop producing, run the audit")}


def _replica_status(groups: Any) -> Iterable[Block]:
    for place, group in enumerate(groups):
        if place:
            yield ""
        yield Cell(f"{group['brokerGroup']}  term {group['term']}  {'writable' if group['writable'] else 'readonly'}")
        yield _verdict(group)
        yield Table(
            _REPLICA, [row | {"isMaster": row["role"] in ("MASTER", "DELAY_MASTER")} for row in group["replicas"]]
        )
    if not groups:
        yield "no broker group; AddBroker makes one"


def _verdict(group: Mapping[str, Any]) -> Cell:
    if group["equal"] is not None:
        return _VERDICT[group["equal"]]
    if group["lagBytes"] is not None:
        return warning(f"ends differ now, a slave lags by {group['lagBytes']} bytes")
    return bad("not every copy answered")


def _epoch(replica: Mapping[str, Any]) -> str:
    return "" if replica.get("term") is None else f"{replica['term']}.{replica['boot']}"


_REPLICA = (
    Column("ROLE", "role"),
    Column("BROKER", lambda row: f"{row['hostname']}:{row['servePort']}"),
    Column("UP", good_or_bad("up")),
    Column("EPOCH", _epoch, drop=1),
    Column("LOG END", "logEnd"),
    Column("FLUSHED", "flushedEnd", drop=5),
    # Only a master compares ends.
    Column("MATCHED", lambda row: row["matchedEnd"] if row["isMaster"] else None, drop=4),
    Column("HIGH WATERMARK", "highWatermark", drop=6),
    Column("CHAIN", "chain"),
    Column("WHY NOT", lambda row: row.get("error") or row.get("readonlyReasons"), fold=20),
)

BROKERS = (
    of_action(
        "AddBroker",
        "--brokerGroup=g1 --role=0 --hostname=mq1 --ip=10.0.0.1 --servePort=20881 --syncPort=20882",
        _added,
        look="ListBrokers --brokerGroup={brokerGroup}",
    ),
    of_action(
        "ReplaceBroker",
        "--brokerGroup=g1 --role=1 --hostname=mq3 --ip=10.0.0.3 --servePort=20881 --syncPort=20882",
        _replaced,
        look="ListBrokers --brokerGroup={brokerGroup}",
    ),
    of_action("RemoveBroker", "--hostname=mq3 --servePort=20881", _removed, look="ListBrokers"),
    of_action(
        "SetCopies",
        "--brokerGroup=g1 --minCopies=2 --syncMode=manual",
        _copies,
        look="ReplicaStatus --brokerGroup={brokerGroup}",
    ),
    of_action(
        "SyncReplica", "--brokerGroup=g1 --host=mq2", _fill_ordered, look="ReplicaStatus --brokerGroup={brokerGroup}"
    ),
    of_action(
        "CancelSync", "--brokerGroup=g1 --host=mq2", _fill_ordered, look="ReplicaStatus --brokerGroup={brokerGroup}"
    ),
    of_action("ListQuarantine", "--brokerGroup=g1", _quarantine),
    of_action(
        "ClearQuarantine", "--brokerGroup=g1 --host=mq2", _cleared, look="ListQuarantine --brokerGroup={brokerGroup}"
    ),
    of_action("SwapRoles", "--brokerGroup=g1 --to=mq2", _swapped, look="ReplicaStatus --brokerGroup={brokerGroup}"),
    of_action("Failover", "--brokerGroup=g1", _failed_over, look="ReplicaStatus --brokerGroup={brokerGroup}"),
    of_action("SetFailover", "--brokerGroup=g1 --failover=off", _failover_set, look="ListBrokerGroups"),
    of_action("AcknowledgeLoss", "--brokerGroup=g1", _loss_acknowledged, look="AuditTrail --brokerGroup={brokerGroup}"),
    of_action("AdoptRoles", "--brokerGroup=g1 --hostname=mq1 --servePort=20881", _new_master, look="ListBrokerGroups"),
    Command(
        "RecoverGroup",
        "choose the copy of a group to keep, show the losses, make it the master",
        "--brokerGroup=g1 --gone=mq1:20881 --reports=mq2.json",
        (
            GROUP,
            Option(
                "gone", "hostname:servePort of brokers with disks that never return, separated by commas", default=""
            ),
            Option("reports", "output files of `qmq inspect DIR --json`, separated by commas", default=""),
            Option(
                "acceptLoss",
                "accept the loss of messages that no remaining copy has",
                default="",
                kind=Kind.FLAG,
                alone="true",
            ),
        ),
        runs="qmq.tools.recover_group:run",
        changes=True,
        look="ListBrokers --brokerGroup={brokerGroup}",
    ),
    of_action("ListBrokers", "--brokerGroup=g1", listing(_brokers)),
    of_action("ListBrokerGroups", "--brokerGroup=g1", listing(_groups)),
    of_action("ReplicaStatus", "--brokerGroup=g1", _replica_status),
    of_action("Rates", "--brokerGroup=g1", _rates),
)
