"""Core. Table of all actions: QMQ's thirteen with QMQ's parameters, QMQ's QuerySubjectRoute, and qmq's own."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from qmq.codec import EXPIRES_S_MAX
from qmq.commands.action import Action, Kind, Parameter, Style, Typed
from qmq.rights import TokenRole

VIEWER, OPERATOR, ADMIN = TokenRole.VIEWER, TokenRole.OPERATOR, TokenRole.ADMIN

MANY_WAIT_MS = 60_000
"""Wait for changes of up to 100,000 routes, which take ten seconds."""

BROKER_FIELDS = ("group", "role", "hostname", "ip", "servePort", "syncPort")
GROUP_FIELDS = ("groupName", "master", "slaves", "updateTime", "brokerState", "tag", "kind", "ext")
ROUTE_FIELDS = ("subject", "brokerGroups", "version", "updateTime")
SUBJECT_FIELDS = ("name", "tag", "updateTime")

_GROUP = Parameter("brokerGroup", "name of the broker group", required=True, kind=Kind.NAME)
_ANY_GROUP = Parameter("brokerGroup", "only this broker group", kind=Kind.NAME)
_HERE = Parameter("here", "only facts that the answering metaserver has alone", kind=Kind.FLAG, default="false")
_SUBJECT = Parameter("subject", "name of the subject", required=True, kind=Kind.NAME)
_ANY_SUBJECT = Parameter("subject", "only this subject", kind=Kind.NAME)
_SUBJECTS = Parameter("subject", "one subject, or * for all", kind=Kind.PATTERN, default="*")
_EVERY_SUBJECT = Parameter("subject", "one subject, or * for all", required=True, kind=Kind.PATTERN)
_CONSUMER_GROUP = Parameter("group", "name of the consumer group", required=True, kind=Kind.NAME)
_ANY_CONSUMER_GROUP = Parameter("group", "only this consumer group", kind=Kind.NAME)
_FORCE = Parameter("force", "carry it out despite the objections", kind=Kind.FLAG, default="false")
_WAIT = Parameter(
    "waitMs",
    "wait at most this long until no client uses the old route",
    kind=Kind.NUMBER,
    default="0",
    most=600_000,
    option="wait",
    typed=Typed.SECONDS,
)
_BROKER = (
    _GROUP,
    Parameter("role", "0 for the master, 1 for a slave; for delay servers 5 and 6", required=True),
    Parameter("hostname", "setting `hostname` of the broker", required=True, kind=Kind.NAME),
    Parameter("ip", "host name or IP address at which clients and other processes reach the broker", required=True),
    Parameter("servePort", "port for producers and consumers", required=True, kind=Kind.PORT),
    Parameter("syncPort", "port for slaves", required=True, kind=Kind.PORT),
)
_SLAVE_HOST = Parameter("host", "hostname, or hostname:port, of the slave", required=True)
_PAGE = (
    Parameter("limit", "at most this many rows", kind=Kind.NUMBER, default="100", least=1, most=1000),
    Parameter("before", "only rows with a smaller id: the next page", kind=Kind.NUMBER),
)


def _result(data: Any) -> Any:
    return data["result"]


_BROKERS = (
    Action(
        "AddBroker",
        "add a broker or delay server to a group, before its first start",
        ADMIN,
        _BROKER,
        changes=True,
        result_fields=BROKER_FIELDS,
    ),
    Action(
        "ReplaceBroker",
        "replace a stopped broker; to exchange two stopped brokers, use swap=true, or two calls: role"
        " 0 with the slave's addresses, then role 1 with the master's",
        ADMIN,
        (
            *_BROKER,
            Parameter("swap", "exchange master and slave, both stopped, in one step", kind=Kind.FLAG, default="false"),
            Parameter(
                "acceptLoss",
                "the other copy is lost for good: continue with this one",
                kind=Kind.FLAG,
                default="false",
            ),
        ),
        changes=True,
        result_fields=BROKER_FIELDS,
    ),
    Action(
        "RemoveBroker",
        "remove a stopped broker from its group; the group goes with its last broker",
        ADMIN,
        (
            Parameter("hostname", "setting `hostname` of the broker", required=True, kind=Kind.NAME),
            Parameter("servePort", "port for producers and consumers", required=True, kind=Kind.PORT),
            _FORCE,
        ),
        changes=True,
        wait_ms=MANY_WAIT_MS,
    ),
    Action(
        "SetCopies",
        "set the copies that a message needs, the master's included, and whether slaves are filled automatically",
        ADMIN,
        (
            _GROUP,
            Parameter(
                "minCopies",
                "copies that must have a message on disk, the master's included; more than half of all",
                kind=Kind.NUMBER,
                least=2,
                most=5,
            ),
            Parameter(
                "syncMode",
                "manual: SyncReplica starts the fill of a slave that is new or incomplete",
                kind=Kind.CHOICE,
                choices=("automatic", "manual"),
            ),
        ),
        changes=True,
    ),
    Action(
        "SyncReplica",
        "start the fill of a waiting slave",
        ADMIN,
        (_GROUP, _SLAVE_HOST),
        changes=True,
    ),
    Action(
        "CancelSync",
        "stop the fill of a slave until SyncReplica; slaves in sync are not affected",
        ADMIN,
        (_GROUP, _SLAVE_HOST),
        changes=True,
    ),
    Action(
        "ListQuarantine",
        "list parts of logs in quarantine, and which of them may be the last copy of messages",
        OPERATOR,
        (_GROUP,),
    ),
    Action(
        "ClearQuarantine",
        "delete parts of one copy's quarantine: the named ones, or all that are no evidence",
        ADMIN,
        (
            _GROUP,
            Parameter("host", "hostname, or hostname:port, of the broker", required=True),
            Parameter(
                "parts", "names of parts, separated by commas; default: all that are no evidence", chars_max=60_000
            ),
        ),
        changes=True,
    ),
    Action(
        "SwapRoles",
        "exchange master and slave of a group while both run",
        ADMIN,
        (
            _GROUP,
            Parameter(
                "to", "hostname, or hostname:port, of the slave; default: the slave with the smallest lag", default=""
            ),
        ),
        changes=True,
        wait_ms=60_000,
    ),
    Action(
        "Failover",
        "promote the best slave of a group once, when its master is gone; the setting failover does this automatically",
        ADMIN,
        (
            _GROUP,
            Parameter(
                "masterGone",
                "the master never returns: accept slaves that restarted since, if no disk was restored; acks "
                "that only the master stored are lost",
                kind=Kind.FLAG,
                default="false",
            ),
        ),
        changes=True,
        wait_ms=60_000,
    ),
    Action(
        "SetFailover",
        "turn automatic failover of a group on or off",
        ADMIN,
        (
            _GROUP,
            Parameter(
                "failover",
                "default: the metaservers' setting `failover` decides",
                required=True,
                kind=Kind.CHOICE,
                choices=("on", "off", "default"),
            ),
        ),
        changes=True,
    ),
    Action(
        "AcknowledgeLoss",
        "close finding and alert of an accepted loss; the audit trail keeps it",
        ADMIN,
        (_GROUP,),
        changes=True,
    ),
    Action(
        "AdoptRoles",
        "choose the master of a group with a stale row; its brokers report a newer term than the database",
        ADMIN,
        (
            _GROUP,
            Parameter("hostname", "setting `hostname` of the new master", required=True, kind=Kind.NAME),
            Parameter("servePort", "its port for producers and consumers", required=True, kind=Kind.PORT),
            _FORCE,
        ),
        changes=True,
    ),
    Action(
        "ListBrokers",
        "list brokers: role, address, up or down",
        VIEWER,
        (_ANY_GROUP,),
        needs_token=False,
        result_fields=BROKER_FIELDS,
    ),
    Action(
        "ListBrokerGroups",
        "list broker groups: term, master, slaves, and why a group is readonly",
        VIEWER,
        (_ANY_GROUP,),
        style=Style.RAW,
        needs_token=False,
        result_fields=GROUP_FIELDS,
    ),
    Action("ReplicaStatus", "compare the log ends of master and slaves", VIEWER, (_ANY_GROUP,)),
    Action(
        "Rates", "list messages per second of a group, stored and delivered, in the last minutes", VIEWER, (_GROUP,)
    ),
)

_ROUTES = (
    Action(
        "AddNewSubject",
        "create a subject with its tag, before its first message",
        OPERATOR,
        (_SUBJECT, Parameter("tag", "broker groups with this tag are preferred", required=True, kind=Kind.NAME)),
        changes=True,
        style=Style.MAP,
        result_fields=SUBJECT_FIELDS,
    ),
    Action(
        "ListSubjectRoutes",
        "list the broker groups of each subject",
        VIEWER,
        (
            Parameter("prefix", "only subjects with this prefix", kind=Kind.NAME),
            _ANY_GROUP,
            Parameter("after", "only subjects after this one: the next page", kind=Kind.NAME),
            Parameter("limit", "at most this many routes; 0: all", kind=Kind.NUMBER, default="0"),
        ),
        style=Style.RAW,
        needs_token=False,
        result_fields=ROUTE_FIELDS,
    ),
    Action(
        "QuerySubjectRoute",
        "show the route of one subject, as stored and as clients get it",
        VIEWER,
        (_SUBJECT,),
        result_fields=ROUTE_FIELDS,
    ),
    Action(
        "AddSubjectBrokerGroup",
        "add a broker group to the route of a subject",
        OPERATOR,
        (_SUBJECT, _GROUP),
        changes=True,
        style=Style.RAW,
        result_fields=ROUTE_FIELDS,
    ),
    Action(
        "RemoveSubjectBrokerGroup",
        "remove a broker group from the route of a subject, or of all; refused while messages wait there",
        OPERATOR,
        (_EVERY_SUBJECT, _GROUP, _FORCE),
        changes=True,
        wait_ms=MANY_WAIT_MS,
        qmq_data=lambda _: {},
    ),
    Action(
        "ExtendSubjectRoute",
        "add a broker group to the routes of another one",
        OPERATOR,
        (
            Parameter("relatedSubject", "one subject, or * for all", required=True, kind=Kind.PATTERN),
            Parameter("relatedBrokerGroup", "broker group that serves them now", required=True, kind=Kind.NAME),
            Parameter("newBrokerGroup", "broker group to add", required=True, kind=Kind.NAME),
        ),
        changes=True,
        wait_ms=MANY_WAIT_MS,
        qmq_data=lambda data: f"added {data['newBrokerGroup']} to {data['changed']} subjects",
    ),
    Action(
        "RemoveSubject",
        "remove the route of an unused subject",
        OPERATOR,
        (_SUBJECT, _FORCE),
        changes=True,
    ),
)

_GROUPS = (
    Action(
        "MarkReadonlyBrokerGroup",
        "route producers away from a broker group; consumers continue",
        OPERATOR,
        (_SUBJECTS, _GROUP, _WAIT),
        changes=True,
        wait_ms=MANY_WAIT_MS,
        qmq_data=_result,
    ),
    Action(
        "UnMarkReadonlyBrokerGroup",
        "let producers use a broker group again; with the same subject as the mark",
        OPERATOR,
        (_SUBJECTS, _GROUP),
        changes=True,
        qmq_data=_result,
    ),
    Action("ListReadonly", "list readonly marks, and the number of clients with an older route", VIEWER, (_ANY_GROUP,)),
    Action(
        "DrainGroup",
        "stop new subjects and producers of a group, and list the messages left in it",
        OPERATOR,
        (_GROUP, _WAIT),
        changes=True,
        wait_ms=MANY_WAIT_MS,
    ),
    Action(
        "UndrainGroup",
        "end the drain of a group; it takes subjects and producers again",
        OPERATOR,
        (_GROUP,),
        changes=True,
    ),
    Action(
        "SetGroupTag",
        "set the tag of a broker group: subjects with the same tag prefer it",
        OPERATOR,
        (_GROUP, Parameter("tag", "new tag; empty: none", kind=Kind.NAME)),
        changes=True,
    ),
)

_CONSUMERS = (
    Action(
        "ResetOffset",
        "set the position of a consumer group; on all brokers of the subject",
        OPERATOR,
        (
            _SUBJECT,
            _CONSUMER_GROUP,
            Parameter("code", "QMQ's: 1 latest, 2 earliest", kind=Kind.CHOICE, choices=("1", "2"), option="action"),
            Parameter("to", "new position", kind=Kind.CHOICE, choices=("earliest", "latest", "sequence", "time")),
            Parameter("value", "sequence or time of the new position", kind=Kind.NUMBER, typed=Typed.MOMENT),
            Parameter("brokerGroup", "only on this broker group; required for a sequence", kind=Kind.NAME),
        ),
        changes=True,
        qmq_data=_result,
        wait_ms=30_000,
    ),
    Action(
        "RemoveConsumerGroup",
        "remove a consumer group that has no consumers",
        OPERATOR,
        (_SUBJECT, _CONSUMER_GROUP),
        changes=True,
        wait_ms=30_000,
    ),
    Action(
        "Consumers",
        "list consumer groups: consumers, positions, unacked messages",
        VIEWER,
        (_ANY_SUBJECT, _ANY_CONSUMER_GROUP),
    ),
    Action(
        "Lag",
        "list the lag of each consumer group: messages, age of the oldest, causes",
        VIEWER,
        (
            _ANY_SUBJECT,
            _ANY_CONSUMER_GROUP,
            Parameter(
                "limit",
                "only groups with a lag, the largest first, at most this many per broker group; 0: all groups",
                kind=Kind.NUMBER,
                default="0",
                most=10_000,
            ),
        ),
    ),
    Action(
        "OnOffline",
        "switch consumers on or off",
        OPERATOR,
        (
            Parameter("state", "new state", required=True, kind=Kind.CHOICE, choices=("online", "offline")),
            _EVERY_SUBJECT,
            Parameter("consumerGroup", "one consumer group, or * for all", kind=Kind.PATTERN, default="*"),
            Parameter("clientId", "one consumer, or * for all", kind=Kind.PATTERN, default="*"),
        ),
        changes=True,
    ),
    Action("ListOffline", "list consumers that are switched off", VIEWER, (_ANY_SUBJECT,)),
    Action(
        "SetLimits",
        "limit a subject: expiry of messages, size of the backlog",
        OPERATOR,
        (
            _SUBJECT,
            Parameter(
                "expiresAfterS",
                "seconds after which a stored message expires; 0: never",
                kind=Kind.NUMBER,
                most=EXPIRES_S_MAX,
            ),
            Parameter(
                "expired",
                "fate of expired messages: drop, or deadLetter, one per consumer group",
                kind=Kind.CHOICE,
                choices=("drop", "deadLetter"),
            ),
            Parameter(
                "messagesMax",
                "messages of a broker group that may wait for a consumer group; 0: no limit",
                kind=Kind.NUMBER,
                most=1_000_000_000_000,
            ),
            Parameter(
                "bytesMax",
                "bytes of a broker group that may wait for a consumer group; 0: no limit",
                kind=Kind.NUMBER,
                most=1_000_000_000_000_000,
            ),
            Parameter(
                "whenFull",
                "at the limit: refuse producers, or dropOldest for that consumer group",
                kind=Kind.CHOICE,
                choices=("refuse", "dropOldest"),
            ),
        ),
        changes=True,
    ),
    Action(
        "LimitGroup",
        "limit the rate of a consumer group, or set the subject of its dead letters",
        OPERATOR,
        (
            _SUBJECT,
            _CONSUMER_GROUP,
            Parameter("perSecond", "messages per second; 0: no limit", kind=Kind.NUMBER, most=1_000_000_000),
            Parameter(
                "deadLettersTo",
                "subject for its dead letters; %DEAD_RETRY: the group's own",
                kind=Kind.NAME,
            ),
        ),
        changes=True,
    ),
    Action("ListLimits", "list the limits of subjects and consumer groups", VIEWER, (_ANY_SUBJECT,)),
    Action(
        "Clients",
        "list clients that are connected to a metaserver",
        VIEWER,
        (
            _ANY_SUBJECT,
            Parameter("app", "only clients of this application"),
            _HERE,
            Parameter("limit", "at most this many", kind=Kind.NUMBER, default="1000", least=1, most=100_000),
        ),
    ),
)

_PLACE = (
    Parameter("type", "type of the database: mmm, mysql, mariadb, postgresql, sqlite", default="mmm", kind=Kind.NAME),
    Parameter("host", "its server; none for SQLite", kind=Kind.NAME),
    Parameter("port", "port of the server; default 3306, for PostgreSQL 5432", kind=Kind.PORT),
    Parameter(
        "database", "its name on the server, default qmq_produce; for SQLite the path of the file", chars_max=150
    ),
)
_OUTBOX = Parameter("database", "only this database, as ListDbs shows it", chars_max=250)
_DELAYS = (
    Action(
        "DelayStats",
        "count delayed messages: pending, due, being sent",
        VIEWER,
        (
            _ANY_GROUP,
            _ANY_SUBJECT,
            Parameter(
                "hours",
                "also count messages per hour, this many hours ahead",
                kind=Kind.NUMBER,
                default="24",
                most=26_280,
            ),
        ),
    ),
    Action(
        "ListDelayed",
        "list delayed messages by due time",
        OPERATOR,
        (
            _ANY_SUBJECT,
            _ANY_GROUP,
            Parameter("since", "only messages due at this time or later", kind=Kind.NUMBER, typed=Typed.MOMENT),
            Parameter("until", "only messages due before this time", kind=Kind.NUMBER, typed=Typed.MOMENT),
            Parameter("limit", "at most this many messages", kind=Kind.NUMBER, default="100", least=1, most=1000),
        ),
        installation=True,
    ),
    Action(
        "ListSchedules",
        "list recurring schedules: owner, expression, next time",
        OPERATOR,
        (
            _ANY_SUBJECT,
            _ANY_GROUP,
            Parameter("owner", "only schedules of this application"),
            Parameter("limit", "at most this many schedules", kind=Kind.NUMBER, default="1000", least=1, most=1000),
        ),
        installation=True,
    ),
    Action(
        "CancelDelayed",
        "cancel delayed messages; the answer shows for each whether it was in time",
        OPERATOR,
        (
            _SUBJECT,
            Parameter("ids", "ids of messages, separated by commas", chars_max=60_000),
            Parameter("keys", "keys given by their senders, separated by commas", chars_max=60_000),
            _ANY_GROUP,
        ),
        changes=True,
    ),
)

_DATABASES = (
    Action(
        "AddDb",
        "register an application's database for the watchdog",
        ADMIN,
        (
            *_PLACE,
            Parameter("username", "its user; none for SQLite", kind=Kind.NAME),
            Parameter("password", "the user's password; stored encrypted", secret=True, chars_max=1000),
            Parameter(
                "tls",
                "TLS of its connections; default: as the driver does",
                kind=Kind.CHOICE,
                choices=("disable", "require", "verify-ca", "verify-full"),
            ),
            Parameter("tlsCa", "file, on the watchdog's machines, with the authority's certificate"),
            Parameter("tlsCert", "file with the watchdog's own certificate, if the server asks for one"),
            Parameter("tlsKey", "file with the key of that certificate"),
            Parameter("room", "namespace of its watchdog", default="default", kind=Kind.NAME),
            Parameter("table", "name of the outbox: table, or schema.table", default="qmq_msg_queue", chars_max=130),
            Parameter(
                "rate",
                "rows per second at most",
                default="10000",
                kind=Kind.NUMBER,
                least=1,
                most=1_000_000,
            ),
            Parameter(
                "age",
                "seconds until the watchdog sends a row that its application left",
                default="60",
                kind=Kind.NUMBER,
                most=86_400,
            ),
        ),
        changes=True,
        qmq_data=_result,
    ),
    Action(
        "RemoveDb",
        "remove a registered database",
        ADMIN,
        (*_PLACE,),
        changes=True,
    ),
    Action("ListDbs", "list registered databases, without passwords", VIEWER, installation=True),
    Action("ListWatchdogs", "list namespaces of watchdogs, and the active watchdog of each", VIEWER),
    Action(
        "OutboxStuck",
        "list stuck rows of outboxes: parked, or waiting too long",
        VIEWER,
        (
            Parameter("room", "only this namespace of watchdogs", kind=Kind.NAME),
            _OUTBOX,
            Parameter(
                "older",
                "seconds after which a waiting row counts as stuck",
                default="600",
                kind=Kind.NUMBER,
                most=10**9,
            ),
            Parameter(
                "limit", "at most this many rows of each database", default="20", kind=Kind.NUMBER, least=1, most=1000
            ),
        ),
        installation=True,
        wait_ms=30_000,
    ),
    Action(
        "OutboxRetry",
        "send parked rows of outboxes again: the given ids, or all",
        OPERATOR,
        (
            Parameter("room", "namespace of the watchdog", default="default", kind=Kind.NAME),
            _OUTBOX,
            Parameter("ids", "only these rows, as OutboxStuck shows them: 1,2", chars_max=60_000),
        ),
        changes=True,
        wait_ms=MANY_WAIT_MS,
    ),
)

CONTENT_CHARS_MAX = 4_000
"""Limit of the properties, and of the body, of a message that an operator types. The audit trail keeps them."""
BODY_BYTES_SHOWN_MAX = 1 << 20
_MESSAGES = (
    Action(
        "Browse",
        "list stored messages of a subject, or dead letters of a consumer group; consumers are not affected",
        OPERATOR,
        (
            _SUBJECT,
            Parameter("deadLettersOf", "list the dead letters of this consumer group instead", kind=Kind.NAME),
            Parameter("brokerGroup", "only messages of this broker group", kind=Kind.NAME),
            Parameter("id", "only the message with this id"),
            Parameter("tag", "only messages with all these tags", kind=Kind.NAMES),
            Parameter("property", "only messages with these properties, as name=value,name=value", chars_max=1000),
            Parameter("sequence", "first sequence, counted per broker group", kind=Kind.NUMBER),
            Parameter("since", "only messages stored at this time or later", kind=Kind.NUMBER, typed=Typed.MOMENT),
            Parameter("until", "only messages stored before this time", kind=Kind.NUMBER, typed=Typed.MOMENT),
            Parameter("limit", "at most this many messages", kind=Kind.NUMBER, default="50", least=1, most=1000),
            Parameter(
                "bodyBytes",
                "show at most this many bytes of each body",
                kind=Kind.NUMBER,
                default="2000",
                most=BODY_BYTES_SHOWN_MAX,
            ),
        ),
    ),
    Action(
        "Produce",
        "send one message to a subject with a route",
        OPERATOR,
        (
            _SUBJECT,
            Parameter(
                "properties",
                'its properties, as JSON: {"orderNo": "4711"}',
                chars_max=CONTENT_CHARS_MAX,
            ),
            Parameter("body", "its body, as text", chars_max=CONTENT_CHARS_MAX),
            Parameter("contentType", "media type of the body; default: application/json for a JSON object or list"),
            Parameter("tags", "its tags, separated by commas", kind=Kind.NAMES),
        ),
        changes=True,
    ),
    Action(
        "Redrive",
        "return dead letters to their consumer group, or send them to another subject",
        OPERATOR,
        (
            _SUBJECT,
            _CONSUMER_GROUP,
            Parameter("from", "subject with the dead letters, if LimitGroup --deadLettersTo set one", kind=Kind.NAME),
            Parameter(
                "to", "subject with a route for the messages; default: back to their consumer group", kind=Kind.NAME
            ),
            Parameter("reason", "only dead letters with this text in their reason", chars_max=1000),
            Parameter("id", "only the message with this id"),
            Parameter("brokerGroup", "only messages of this broker group", kind=Kind.NAME),
            Parameter("limit", "at most this many", kind=Kind.NUMBER, default="1000", least=1, most=10_000),
        ),
        changes=True,
        wait_ms=MANY_WAIT_MS,
    ),
)

_TOKENS = (
    Action(
        "AddToken",
        "create an API token; its text is shown once",
        ADMIN,
        (
            Parameter(
                "name",
                "owner of the token; two tokens of one name may be valid, for rotation",
                required=True,
                kind=Kind.NAME,
            ),
            Parameter(
                "role",
                "rights of the token",
                required=True,
                kind=Kind.CHOICE,
                choices=("viewer", "operator", "admin", "client", "broker"),
            ),
            Parameter(
                "subjects",
                "only these subjects (prefix*, produce:…, consume:…, redrive:…), separated by commas",
                chars_max=4000,
            ),
            Parameter("groups", "only these broker groups (prefix*), separated by commas", chars_max=4000),
            Parameter("days", "days until it expires; 0: never", kind=Kind.NUMBER, default="0", most=36_500),
        ),
        changes=True,
    ),
    Action(
        "RevokeToken",
        "revoke a token immediately",
        ADMIN,
        (Parameter("id", "id of the token, as ListTokens shows it", required=True, kind=Kind.NAME),),
        changes=True,
    ),
    Action("ListTokens", "list tokens: name, role, scope, expiry; never their texts", ADMIN, installation=True),
)

_UPKEEP = (
    Action(
        "AuditTrail",
        "list changes and their authors, newest first",
        VIEWER,
        (
            Parameter("who", "only changes by this token name"),
            Parameter("name", "only this action"),
            Parameter("request", "only this request number"),
            _ANY_GROUP,
            _ANY_SUBJECT,
            Parameter("since", "only changes at this time or later", kind=Kind.NUMBER, typed=Typed.MOMENT),
            Parameter("until", "only changes before this time", kind=Kind.NUMBER, typed=Typed.MOMENT),
            *_PAGE,
        ),
        installation=True,
    ),
    Action(
        "Backup",
        "write all metadata as one JSON document; secrets stay hashed or encrypted",
        ADMIN,
        installation=True,
        wait_ms=60_000,
    ),
    Action(
        "Restore",
        "replace all metadata by a backup; the metaserver must be empty, or use force",
        ADMIN,
        (
            Parameter(
                "backup", "document written by Backup", required=True, kind=Kind.JSON, chars_max=2**30, option="file"
            ),
            _FORCE,
        ),
        changes=True,
        decides_database=True,
        wait_ms=120_000,
    ),
    Action(
        "AdoptDatabase",
        "choose database or memory after a loss; for a database that lacks groups with registered brokers",
        ADMIN,
        (
            Parameter(
                "keep",
                "memory: write this metaserver's groups to the database; database: forget the lost groups",
                required=True,
                kind=Kind.CHOICE,
                choices=("memory", "database"),
            ),
        ),
        changes=True,
        decides_database=True,
        wait_ms=120_000,
    ),
    Action(
        "ExportDefinitions",
        "write operators' settings as JSON, for another cluster; without brokers and secrets",
        ADMIN,
        installation=True,
        wait_ms=60_000,
    ),
    Action(
        "ImportDefinitions",
        "add and set the entries of an export; it removes nothing",
        ADMIN,
        (
            Parameter(
                "definitions",
                "document written by ExportDefinitions",
                required=True,
                kind=Kind.JSON,
                chars_max=2**26,
                option="file",
            ),
        ),
        changes=True,
        wait_ms=MANY_WAIT_MS,
    ),
    Action("ListMetaservers", "list metaservers of this installation: address, version, up or down", VIEWER),
    Action(
        "Settings",
        "list the settings in force of all processes, without secrets",
        OPERATOR,
        (_ANY_GROUP, _HERE),
        installation=True,
    ),
    Action("Doctor", "check the metaservers and their brokers", VIEWER, (_HERE,), wait_ms=30_000),
)

ACTIONS: Mapping[str, Action] = MappingProxyType(
    {
        action.name: action
        for action in (
            *_BROKERS,
            *_ROUTES,
            *_GROUPS,
            *_CONSUMERS,
            *_MESSAGES,
            *_DELAYS,
            *_DATABASES,
            *_TOKENS,
            *_UPKEEP,
        )
    }
)
"""Action by name, in the order of the help."""
