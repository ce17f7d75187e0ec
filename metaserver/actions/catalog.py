"""Core. All actions: QMQ's thirteen with QMQ's parameters, its unregistered QuerySubjectRoute, and ours."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from qmq.codec import EXPIRES_S_MAX
from qmq.metaserver.actions.action import Action, Kind, Parameter, Style, by_name
from qmq.rights import TokenRole

VIEWER, OPERATOR, ADMIN = TokenRole.VIEWER, TokenRole.OPERATOR, TokenRole.ADMIN

MANY_WAIT_MS = 60_000
"""For what may change 100,000 routes, which takes ten seconds."""

BROKER_FIELDS = ("group", "role", "hostname", "ip", "servePort", "syncPort")
GROUP_FIELDS = ("groupName", "master", "slaves", "updateTime", "brokerState", "tag", "kind", "ext")
ROUTE_FIELDS = ("subject", "brokerGroups", "version", "updateTime")
SUBJECT_FIELDS = ("name", "tag", "updateTime")

_GROUP = Parameter("brokerGroup", "name of the broker group", required=True, kind=Kind.NAME)
_ANY_GROUP = Parameter("brokerGroup", "only this broker group", kind=Kind.NAME)
_SUBJECT = Parameter("subject", "name of the subject", required=True, kind=Kind.NAME)
_ANY_SUBJECT = Parameter("subject", "only this subject", kind=Kind.NAME)
_SUBJECTS = Parameter("subject", "one subject, or * for all", kind=Kind.PATTERN, default="*")
_EVERY_SUBJECT = Parameter("subject", "one subject, or * for all", required=True, kind=Kind.PATTERN)
_CONSUMER_GROUP = Parameter("group", "name of the consumer group", required=True, kind=Kind.NAME)
_ANY_CONSUMER_GROUP = Parameter("group", "only this consumer group", kind=Kind.NAME)
_FORCE = Parameter("force", "do it in spite of the reasons against it", kind=Kind.FLAG, default="false")
_WAIT = Parameter(
    "waitMs", "wait so long, at most, until no client holds the old route", kind=Kind.NUMBER, default="0", most=600_000
)
_BROKER = (
    _GROUP,
    Parameter("role", "0 for the master, 1 for a slave; of a group of delay servers 5 and 6", required=True),
    Parameter("hostname", "the broker's setting hostname", required=True, kind=Kind.NAME),
    Parameter("ip", "IPv4 address at which the broker is reached", required=True),
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
        "give a broker or delay server a place in a group, before its first start",
        ADMIN,
        _BROKER,
        changes=True,
        result_fields=BROKER_FIELDS,
    ),
    Action(
        "ReplaceBroker",
        "put a broker in the place of a stopped one; to swap two stopped brokers: with swap=true at once, or twice, "
        "role 0 with the slave's addresses, then role 1 with the master's",
        ADMIN,
        (
            *_BROKER,
            Parameter("swap", "exchange master and slave, both stopped, in one step", kind=Kind.FLAG, default="false"),
            Parameter(
                "acceptLoss",
                "the other copy is lost for good: make the best of what this one has",
                kind=Kind.FLAG,
                default="false",
            ),
        ),
        changes=True,
        result_fields=BROKER_FIELDS,
    ),
    Action(
        "RemoveBroker",
        "take a stopped broker out of its group; the last one takes the group with it",
        ADMIN,
        (
            Parameter("hostname", "the broker's setting hostname", required=True, kind=Kind.NAME),
            Parameter("servePort", "port for producers and consumers", required=True, kind=Kind.PORT),
            _FORCE,
        ),
        changes=True,
        wait_ms=MANY_WAIT_MS,
    ),
    Action(
        "SetCopies",
        "set how many copies of a group, the master's among them, have a message on disk when it is acknowledged, and "
        "whether slaves are filled by themselves",
        ADMIN,
        (
            _GROUP,
            Parameter("minCopies", "more than half of the copies", kind=Kind.NUMBER, least=2, most=5),
            Parameter(
                "syncMode",
                "manual: a slave that is new, or not whole, is filled once SyncReplica says so",
                kind=Kind.CHOICE,
                choices=("automatic", "manual"),
            ),
        ),
        changes=True,
    ),
    Action(
        "SyncReplica",
        "let a slave be filled that waits for it",
        ADMIN,
        (_GROUP, _SLAVE_HOST),
        changes=True,
    ),
    Action(
        "CancelSync",
        "stop filling a slave, until SyncReplica; never one that is in sync",
        ADMIN,
        (_GROUP, _SLAVE_HOST),
        changes=True,
    ),
    Action(
        "ListQuarantine",
        "list what left the logs of a group's copies and is kept, and what of it may be the last copy of messages",
        OPERATOR,
        (_GROUP,),
    ),
    Action(
        "ClearQuarantine",
        "delete what one copy keeps: the named parts, or all that is no evidence",
        ADMIN,
        (
            _GROUP,
            Parameter("host", "hostname, or hostname:port, of the broker", required=True),
            Parameter(
                "parts", "names of parts, separated by commas; without: all that is no evidence", chars_max=60_000
            ),
        ),
        changes=True,
    ),
    Action(
        "SwapRoles",
        "exchange the master and a slave of a group while both go on running",
        ADMIN,
        (
            _GROUP,
            Parameter("to", "hostname, or hostname:port, of the slave; else the one that lacks least", default=""),
        ),
        changes=True,
        wait_ms=60_000,
    ),
    Action(
        "Failover",
        "make the best slave of a group the master, once, as failover = true does by itself when the master is gone",
        ADMIN,
        (
            _GROUP,
            Parameter(
                "masterGone",
                "the master never returns: slaves that restarted since are good enough, if no disk was put back, and "
                "acks that the master answered alone are taken back",
                kind=Kind.FLAG,
                default="false",
            ),
        ),
        changes=True,
        wait_ms=60_000,
    ),
    Action(
        "SetFailover",
        "say whether a group fails over by itself when its master is gone",
        ADMIN,
        (
            _GROUP,
            Parameter(
                "failover",
                "default: as the metaservers' setting `failover` says",
                required=True,
                kind=Kind.CHOICE,
                choices=("on", "off", "default"),
            ),
        ),
        changes=True,
    ),
    Action(
        "AcknowledgeLoss",
        "end the finding and the alert about a loss that an operator accepted; the audit trail keeps it",
        ADMIN,
        (_GROUP,),
        changes=True,
    ),
    Action(
        "AdoptRoles",
        "choose the master of a group whose row in the database is older than what its brokers report",
        ADMIN,
        (
            _GROUP,
            Parameter("hostname", "setting hostname of the master to be", required=True, kind=Kind.NAME),
            Parameter("servePort", "its port for producers and consumers", required=True, kind=Kind.PORT),
            _FORCE,
        ),
        changes=True,
    ),
    Action(
        "ListBrokers",
        "list brokers: their roles and addresses, and whether they are up",
        VIEWER,
        (_ANY_GROUP,),
        needs_token=False,
        result_fields=BROKER_FIELDS,
    ),
    Action(
        "ListBrokerGroups",
        "list broker groups: term, master and slaves, whether they take messages and why not",
        VIEWER,
        (_ANY_GROUP,),
        style=Style.RAW,
        needs_token=False,
        result_fields=GROUP_FIELDS,
    ),
    Action("ReplicaStatus", "ask master and slaves where their logs end, and compare them", VIEWER, (_ANY_GROUP,)),
    Action("Rates", "say how many messages a second a group took and delivered in the last minutes", VIEWER, (_GROUP,)),
)

_ROUTES = (
    Action(
        "AddNewSubject",
        "make a subject known with its tag, before its first message",
        OPERATOR,
        (_SUBJECT, Parameter("tag", "broker groups with this tag are preferred", required=True, kind=Kind.NAME)),
        changes=True,
        style=Style.MAP,
        result_fields=SUBJECT_FIELDS,
    ),
    Action(
        "ListSubjectRoutes",
        "list which broker groups serve which subjects",
        VIEWER,
        (
            Parameter("prefix", "only subjects that begin with this", kind=Kind.NAME),
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
        "let one more broker group serve a subject",
        OPERATOR,
        (_SUBJECT, _GROUP),
        changes=True,
        style=Style.RAW,
        result_fields=ROUTE_FIELDS,
    ),
    Action(
        "RemoveSubjectBrokerGroup",
        "take a broker group out of the route of a subject, or of all; refused while messages wait there",
        OPERATOR,
        (_EVERY_SUBJECT, _GROUP, _FORCE),
        changes=True,
        wait_ms=MANY_WAIT_MS,
        qmq_data=lambda _: {},
    ),
    Action(
        "ExtendSubjectRoute",
        "let a new broker group serve what another one serves",
        OPERATOR,
        (
            Parameter("relatedSubject", "one subject, or * for all", required=True, kind=Kind.PATTERN),
            Parameter("relatedBrokerGroup", "the group that serves them now", required=True, kind=Kind.NAME),
            Parameter("newBrokerGroup", "the group to add", required=True, kind=Kind.NAME),
        ),
        changes=True,
        wait_ms=MANY_WAIT_MS,
        qmq_data=lambda data: f"added {data['newBrokerGroup']} to {data['changed']} subjects",
    ),
    Action(
        "RemoveSubject",
        "forget the route of a subject that nobody uses any more",
        OPERATOR,
        (_SUBJECT, _FORCE),
        changes=True,
    ),
)

_GROUPS = (
    Action(
        "MarkReadonlyBrokerGroup",
        "keep producers away from a broker group; consumers go on",
        OPERATOR,
        (_SUBJECTS, _GROUP, _WAIT),
        changes=True,
        wait_ms=MANY_WAIT_MS,
        qmq_data=_result,
    ),
    Action(
        "UnMarkReadonlyBrokerGroup",
        "let producers use a broker group again",
        OPERATOR,
        (_SUBJECTS, _GROUP),
        changes=True,
        qmq_data=_result,
    ),
    Action(
        "ListReadonly", "list readonly marks, and how many clients still hold an older route", VIEWER, (_ANY_GROUP,)
    ),
    Action(
        "DrainGroup",
        "give a group no new subjects and no producers, and say what is left in it",
        OPERATOR,
        (_GROUP, _WAIT),
        changes=True,
        wait_ms=MANY_WAIT_MS,
    ),
    Action("UndrainGroup", "let a drained group take subjects and producers again", OPERATOR, (_GROUP,), changes=True),
    Action(
        "SetGroupTag",
        "set the tag of a broker group: subjects with the same tag prefer it",
        OPERATOR,
        (_GROUP, Parameter("tag", "empty: the default tag", kind=Kind.NAME)),
        changes=True,
    ),
)

_CONSUMERS = (
    Action(
        "ResetOffset",
        "set where a consumer group goes on, on all brokers of the subject",
        OPERATOR,
        (
            _SUBJECT,
            _CONSUMER_GROUP,
            Parameter("code", "QMQ's: 1 latest, 2 earliest", kind=Kind.CHOICE, choices=("1", "2")),
            Parameter("to", "where", kind=Kind.CHOICE, choices=("earliest", "latest", "sequence", "time")),
            Parameter("value", "the sequence, or milliseconds since 1970", kind=Kind.NUMBER),
            Parameter("brokerGroup", "only on this broker group; needed for a sequence", kind=Kind.NAME),
        ),
        changes=True,
        qmq_data=_result,
        wait_ms=30_000,
    ),
    Action(
        "Consumers",
        "list consumer groups: their consumers, how far they are, what is un-acked",
        VIEWER,
        (_ANY_SUBJECT, _ANY_CONSUMER_GROUP),
    ),
    Action(
        "Lag",
        "how many messages wait for each consumer group, how old the oldest is, and what the group waits for",
        VIEWER,
        (
            _ANY_SUBJECT,
            _ANY_CONSUMER_GROUP,
            Parameter(
                "limit",
                "only groups that are behind, at most this many of each broker group, the largest lag first; 0: all",
                kind=Kind.NUMBER,
                default="0",
                most=10_000,
            ),
        ),
    ),
    Action(
        "OnOffline",
        "switch consumers off and on",
        OPERATOR,
        (
            Parameter("state", "what they should be", required=True, kind=Kind.CHOICE, choices=("online", "offline")),
            _EVERY_SUBJECT,
            Parameter("consumerGroup", "one consumer group, or * for all", kind=Kind.PATTERN, default="*"),
            Parameter("clientId", "one consumer, or * for all", kind=Kind.PATTERN, default="*"),
        ),
        changes=True,
    ),
    Action("ListOffline", "list which consumers are switched off", VIEWER, (_ANY_SUBJECT,)),
    Action(
        "SetLimits",
        "limit a subject: when messages expire, how many wait",
        OPERATOR,
        (
            _SUBJECT,
            Parameter(
                "expiresAfterS",
                "seconds after which no consumer group gets a stored message any more; 0: never",
                kind=Kind.NUMBER,
                most=EXPIRES_S_MAX,
            ),
            Parameter(
                "expired",
                "what becomes of it: drop, or deadLetter, a dead letter of each group",
                kind=Kind.CHOICE,
                choices=("drop", "deadLetter"),
            ),
            Parameter(
                "messagesMax",
                "how many messages of a broker group may wait for a consumer group; 0: no limit",
                kind=Kind.NUMBER,
                most=1_000_000_000_000,
            ),
            Parameter(
                "bytesMax",
                "how many bytes of messages of a broker group may wait for a consumer group; 0: no limit",
                kind=Kind.NUMBER,
                most=1_000_000_000_000_000,
            ),
            Parameter(
                "whenFull",
                "what happens then: refuse producers, or dropOldest for that consumer group",
                kind=Kind.CHOICE,
                choices=("refuse", "dropOldest"),
            ),
        ),
        changes=True,
    ),
    Action(
        "LimitGroup",
        "limit how fast a consumer group gets messages; say where its dead letters go",
        OPERATOR,
        (
            _SUBJECT,
            _CONSUMER_GROUP,
            Parameter("perSecond", "messages a second; 0: no limit", kind=Kind.NUMBER, most=1_000_000_000),
            Parameter(
                "deadLettersTo",
                "another subject for its dead letters; %DEAD_RETRY: the group's own again",
                kind=Kind.NAME,
            ),
        ),
        changes=True,
    ),
    Action("ListLimits", "list the limits of subjects and consumer groups", VIEWER, (_ANY_SUBJECT,)),
    Action(
        "Clients",
        "list clients that are connected to a metaserver now",
        VIEWER,
        (
            _ANY_SUBJECT,
            Parameter("app", "only clients of this application"),
            Parameter("here", "only clients of the metaserver that is asked", kind=Kind.FLAG, default="false"),
            Parameter("limit", "at most this many", kind=Kind.NUMBER, default="1000", least=1, most=100_000),
        ),
    ),
)

_PLACE = (
    Parameter("type", "kind of the database: mmm, mysql, mariadb, postgresql, sqlite", default="mmm", kind=Kind.NAME),
    Parameter("host", "its server; SQLite has none", kind=Kind.NAME),
    Parameter("port", "the server's port; default 3306, of PostgreSQL 5432", kind=Kind.PORT),
    Parameter("database", "its name on the server, default qmq_produce; of SQLite the path of the file", chars_max=150),
)
_OUTBOX = Parameter("database", "only this database, as ListDbs names it", chars_max=250)
_DELAYS = (
    Action(
        "DelayStats",
        "say how many delayed messages pend, are due and under way",
        VIEWER,
        (
            _ANY_GROUP,
            _ANY_SUBJECT,
            Parameter(
                "hours", "count messages per hour, this many hours ahead", kind=Kind.NUMBER, default="24", most=26_280
            ),
        ),
    ),
    Action(
        "ListDelayed",
        "list delayed messages by when they are due",
        OPERATOR,
        (
            _ANY_SUBJECT,
            _ANY_GROUP,
            Parameter("since", "only what is due then or later, milliseconds since 1970", kind=Kind.NUMBER),
            Parameter("until", "only what is due before", kind=Kind.NUMBER),
            Parameter("limit", "at most this many messages", kind=Kind.NUMBER, default="100", least=1, most=1000),
        ),
        installation=True,
    ),
    Action(
        "ListSchedules",
        "list recurring schedules with their owner, expression and next time",
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
        "cancel delayed messages that are not sent yet; says of each what became of it",
        OPERATOR,
        (
            _SUBJECT,
            Parameter("ids", "ids of messages, separated by commas", chars_max=60_000),
            Parameter("keys", "keys that their senders gave them, separated by commas", chars_max=60_000),
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
            Parameter("username", "its user; SQLite has none", kind=Kind.NAME),
            Parameter("password", "the user's password; stored encrypted", secret=True, chars_max=1000),
            Parameter("room", "namespace of the watchdog that scans it", default="default", kind=Kind.NAME),
            Parameter("table", "name of the outbox: table, or schema.table", default="qmq_msg_queue", chars_max=130),
            Parameter(
                "rate",
                "rows a second that are sent at most",
                default="10000",
                kind=Kind.NUMBER,
                least=1,
                most=1_000_000,
            ),
            Parameter(
                "age", "seconds that a row is left to its application", default="60", kind=Kind.NUMBER, most=86_400
            ),
        ),
        changes=True,
        qmq_data=_result,
    ),
    Action(
        "RemoveDb",
        "forget a database",
        ADMIN,
        (*_PLACE,),
        changes=True,
    ),
    Action("ListDbs", "list registered databases, without passwords", VIEWER, installation=True),
    Action("ListWatchdogs", "list namespaces of watchdogs, and which one is active in each", VIEWER),
    Action(
        "OutboxStuck",
        "list rows of outboxes that are parked, or wait long, as the watchdogs find them",
        VIEWER,
        (
            Parameter("room", "only this namespace of watchdogs", kind=Kind.NAME),
            _OUTBOX,
            Parameter(
                "older", "waiting rows count once they are older, seconds", default="600", kind=Kind.NUMBER, most=10**9
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
        "let parked rows of outboxes be sent again: those with these ids, or all",
        OPERATOR,
        (
            Parameter("room", "the namespace of the watchdog", default="default", kind=Kind.NAME),
            _OUTBOX,
            Parameter("ids", "only these rows, as OutboxStuck shows them: 1,2", chars_max=60_000),
        ),
        changes=True,
        wait_ms=MANY_WAIT_MS,
    ),
)

_MESSAGES = (
    Action(
        "Browse",
        "look at stored messages of a subject, or at the dead letters of a consumer group; consumers notice nothing",
        OPERATOR,
        (
            _SUBJECT,
            Parameter("deadLettersOf", "at the dead letters of this consumer group", kind=Kind.NAME),
            Parameter("brokerGroup", "only in this broker group of its route", kind=Kind.NAME),
            Parameter("id", "only the message with this id"),
            Parameter("tag", "only messages with all these tags", kind=Kind.NAMES),
            Parameter("sequence", "from this sequence of the broker group on", kind=Kind.NUMBER),
            Parameter("since", "only what was stored then or later, milliseconds since 1970", kind=Kind.NUMBER),
            Parameter("until", "only what was stored before", kind=Kind.NUMBER),
            Parameter("limit", "at most this many messages", kind=Kind.NUMBER, default="50", least=1, most=1000),
        ),
    ),
    Action(
        "Redrive",
        "give dead letters back to the consumer group that could not handle them, or to another subject",
        OPERATOR,
        (
            _SUBJECT,
            _CONSUMER_GROUP,
            Parameter("from", "the subject that LimitGroup --deadLettersTo had them go to", kind=Kind.NAME),
            Parameter("to", "a subject, with a route, to whose consumer groups they go instead", kind=Kind.NAME),
            Parameter("reason", "only those whose reason has this text in it", chars_max=1000),
            Parameter("id", "only the message with this id"),
            Parameter("brokerGroup", "only in this broker group of its route", kind=Kind.NAME),
            Parameter("limit", "at most this many", kind=Kind.NUMBER, default="1000", least=1, most=10_000),
        ),
        changes=True,
        wait_ms=MANY_WAIT_MS,
    ),
)

_TOKENS = (
    Action(
        "AddToken",
        "make an API token; its text is shown once",
        ADMIN,
        (
            Parameter("name", "whose token it is; two of one name may be valid", required=True, kind=Kind.NAME),
            Parameter(
                "role",
                "what it is for",
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
            Parameter("days", "days for which it is valid; 0: for ever", kind=Kind.NUMBER, default="0", most=36_500),
        ),
        changes=True,
    ),
    Action(
        "RevokeToken",
        "end a token at once",
        ADMIN,
        (Parameter("id", "its id, as ListTokens shows it", required=True, kind=Kind.NAME),),
        changes=True,
    ),
    Action("ListTokens", "list tokens: name, role, scope, expiry; never their texts", ADMIN, installation=True),
)

_UPKEEP = (
    Action(
        "AuditTrail",
        "list who changed what, newest first",
        VIEWER,
        (
            Parameter("who", "only of this token name"),
            Parameter("name", "only this action"),
            Parameter("request", "only the request of this number"),
            _ANY_GROUP,
            _ANY_SUBJECT,
            Parameter("since", "only from then on, milliseconds since 1970", kind=Kind.NUMBER),
            Parameter("until", "only before then, milliseconds since 1970", kind=Kind.NUMBER),
            *_PAGE,
        ),
        installation=True,
    ),
    Action(
        "Backup",
        "give all metadata as one JSON document, secrets as they are stored",
        ADMIN,
        installation=True,
        wait_ms=60_000,
    ),
    Action(
        "Restore",
        "put the metadata of a backup in place of what there is; only into an empty metaserver, or with force",
        ADMIN,
        (
            Parameter("backup", "the document that Backup gave", required=True, kind=Kind.JSON, chars_max=2**30),
            _FORCE,
        ),
        changes=True,
        decides_database=True,
        wait_ms=120_000,
    ),
    Action(
        "AdoptDatabase",
        "decide about a database that has lost groups whose brokers are registered (Doctor says so)",
        ADMIN,
        (
            Parameter(
                "keep",
                "memory: fill the database with what this metaserver has in memory; database: forget the lost groups",
                required=True,
                kind=Kind.CHOICE,
                choices=("memory", "database"),
            ),
        ),
        changes=True,
        decides_database=True,
        wait_ms=120_000,
    ),
    Action("ListMetaservers", "list metaservers of this installation, and whether they are up", VIEWER),
    Action("Doctor", "what this metaserver knows of its own health and that of its brokers", VIEWER, wait_ms=30_000),
)

ACTIONS: Mapping[str, Action] = MappingProxyType(
    by_name((*_BROKERS, *_ROUTES, *_GROUPS, *_CONSUMERS, *_MESSAGES, *_DELAYS, *_DATABASES, *_TOKENS, *_UPKEEP))
)
"""Action by name, in the order in which people look for them."""
