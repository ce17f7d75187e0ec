"""Shell. The tables. Names and meaning follow QMQ's; times are milliseconds since 1970.

Names are compared byte by byte on every database, as the program compares them. A change of a column or table after a
release is also a new file in `migrations/versions`; released files never change.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    false,
)
from sqlalchemy.dialects import mysql
from sqlalchemy.types import TypeEngine

NAME_CHARS_MAX = 100
"""`qmq.subjects` allows 100 bytes, so no name is cut."""

LONG_NAME_CHARS_MAX = 250
"""Urls, passwords, operators: longer than names, and short enough for a key on every database."""

ADDRESS_CHARS_MAX = 260
"""A host name has up to 253 characters, a port up to 5."""

REMOVED = 0
"""Kind of a removed group. Its row keeps the term, in case the name is used again."""

metadata = MetaData()


def name(chars: int = NAME_CHARS_MAX) -> TypeEngine[str]:
    """Return a text type that is compared byte by byte: MariaDB would otherwise take `Foo` for `foo`."""
    exact = mysql.VARCHAR(chars, charset="utf8mb4", collation="utf8mb4_bin")
    return String(chars).with_variant(exact, "mysql", "mariadb")


def long_text() -> TypeEngine[str]:
    """Return a type for JSON of any length: MariaDB's TEXT ends at 64 KiB."""
    exact = mysql.LONGTEXT(charset="utf8mb4", collation="utf8mb4_bin")
    return Text().with_variant(exact, "mysql", "mariadb")


def serial() -> TypeEngine[int]:
    """Return the type of an id that the database counts up; SQLite counts only INTEGER."""
    return BigInteger().with_variant(Integer, "sqlite")


_MYSQL = {"engine": "InnoDB", "charset": "utf8mb4", "collate": "utf8mb4_bin"}
OPTIONS: dict[str, Any] = {f"{server}_{key}": value for server in ("mysql", "mariadb") for key, value in _MYSQL.items()}

meta_version = Table(
    "meta_version",  # one row per reading; raised in every changing transaction, whose order its lock decides
    metadata,
    Column("name", name(20), primary_key=True),
    Column("version", BigInteger, nullable=False),
    **OPTIONS,
)

broker_group = Table(
    "broker_group",  # with the rows of `broker` that name it: (group, term, master, slaves)
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("group_name", name(), nullable=False),
    Column("kind", Integer, nullable=False),  # QMQ's numbers, and 0: removed, kept for its term
    Column("term", BigInteger, nullable=False),
    Column("half_swapped", Boolean, nullable=False),
    Column("tag", name(), nullable=False, server_default=""),
    Column("draining", Boolean, nullable=False, server_default=false()),
    Column("is_full", Boolean, nullable=False, server_default=false()),
    Column("min_copies", Integer, nullable=False, server_default="2"),
    Column("lost_term", BigInteger, nullable=False, server_default="0"),
    Column(
        "failover", name(8), nullable=False, server_default="default"
    ),  # on, off, or default: the metaservers' setting applies
    Column("sync_mode", name(16), nullable=False, server_default="automatic"),  # or manual
    Column("create_time", BigInteger, nullable=False),
    Column("update_time", BigInteger, nullable=False),
    UniqueConstraint("group_name", name="uniq_group_name"),
    **OPTIONS,
)

broker = Table(
    "broker",  # brokers and their roles
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("group_name", name(), ForeignKey("broker_group.group_name", name="broker_of_group"), nullable=False),
    Column("role", Integer, nullable=False),
    Column("hostname", name(), nullable=False),
    Column("ip", name(ADDRESS_CHARS_MAX), nullable=False),
    Column("serve_port", Integer, nullable=False),
    Column("sync_port", Integer, nullable=False),
    Column("control_port", Integer, nullable=False),
    Column("metrics_port", Integer, nullable=False),
    Column("incarnation", name(), nullable=False),
    Column("complete", Boolean, nullable=False),
    Column("fill_id", name(120), nullable=False, server_default=""),
    Column("fill_allowed", Boolean, nullable=False, server_default=false()),
    Column("instance", name(), nullable=False, server_default=""),
    Column("create_time", BigInteger, nullable=False),
    Column("update_time", BigInteger, nullable=False),
    UniqueConstraint("hostname", "serve_port", name="uniq_broker"),
    Index("broker_by_group", "group_name"),  # one master and its slaves
    **OPTIONS,
)

broker_sighting = Table(
    "broker_sighting",  # metaserver that receives a broker's heartbeats, and the state they report
    metadata,
    Column("hostname", name(), primary_key=True),
    Column("serve_port", Integer, primary_key=True, autoincrement=False),
    Column("session", name(), nullable=False),
    Column("metaserver", name(), nullable=False),
    Column("incarnation", name(), nullable=False),
    Column("up", Boolean, nullable=False),
    Column("state_json", long_text(), nullable=False),
    Column("changed", BigInteger, nullable=False),
    Index("sighting_changed", "changed"),
    **OPTIONS,
)

acknowledged_point = Table(
    "acknowledged_point",  # newest acknowledged point that a copy of a group reported; only rises
    metadata,
    Column("group_name", name(), primary_key=True),
    Column("incarnation", name(), primary_key=True),  # empty: an operator accepted the loss of older points in `term`
    Column("term", BigInteger, nullable=False),
    Column("boot", BigInteger, nullable=False),
    Column("log_end", BigInteger, nullable=False),
    Column("chain", name(16), nullable=False),  # 16 digits: a number of 64 bits without sign
    Column("update_time", BigInteger, nullable=False),
    **OPTIONS,
)

metaserver = Table(
    "metaserver",  # processes that use this database; `beat` rises while one runs
    metadata,
    Column("id", name(), primary_key=True),
    Column("http_address", name(ADDRESS_CHARS_MAX), nullable=False),
    Column("grpc_address", name(ADDRESS_CHARS_MAX), nullable=False),
    Column("beat", BigInteger, nullable=False),
    Column("version", name(), nullable=False),
    Column("update_time", BigInteger, nullable=False),
    **OPTIONS,
)

subject_info = Table(
    "subject_info",  # subjects that an operator announced, with their tag
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("name", name(), nullable=False),
    Column("tag", name(), nullable=False),
    Column("create_time", BigInteger, nullable=False),
    Column("update_time", BigInteger, nullable=False),
    UniqueConstraint("name", name="uniq_name"),
    **OPTIONS,
)

subject_route = Table(
    "subject_route",  # broker groups of a subject as a JSON array of names; an empty one: removed
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("subject_info", name(), nullable=False),
    Column("broker_group_json", long_text(), nullable=False),
    Column("version", Integer, nullable=False),  # compared and raised by each change
    Column("changed", BigInteger, nullable=False, server_default="0"),
    Column("create_time", BigInteger, nullable=False),
    Column("update_time", BigInteger, nullable=False),
    UniqueConstraint("subject_info", name="uniq_subject"),
    Index("route_changed", "changed"),
    **OPTIONS,
)

readonly_broker_group_setting = Table(
    "readonly_broker_group_setting",  # producers of `subject`, or of all with `*`, avoid the group
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("subject", name(), nullable=False),
    Column("broker_group", name(), ForeignKey("broker_group.group_name", name="mark_of_group"), nullable=False),
    Column("create_time", BigInteger, nullable=False),
    UniqueConstraint("subject", "broker_group", name="uniq_subject_group"),
    **OPTIONS,
)

client_offline_state = Table(
    "client_offline_state",  # consumers that operators switched off; `*` stands for all
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("client_id", name(), nullable=False),
    Column("subject_info", name(), nullable=False),
    Column("consumer_group", name(), nullable=False),
    Column("state", Integer, nullable=False),  # 1: offline; online is the absence of a row
    UniqueConstraint("client_id", "subject_info", "consumer_group", name="uniq_offline"),
    **OPTIONS,
)

operator_limits = Table(
    "operator_limits",  # of a subject (the group is `*`), or of a consumer group of it; no row: no limit
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("subject_info", name(), nullable=False),
    Column("consumer_group", name(), nullable=False),
    Column("expires_after_s", BigInteger, nullable=False),
    Column("expired_die", Boolean, nullable=False),
    Column("per_second", BigInteger, nullable=False),
    Column("messages_max", BigInteger, nullable=False, server_default="0"),
    Column("drops_oldest", Boolean, nullable=False, server_default=false()),
    Column("bytes_max", BigInteger, nullable=False, server_default="0"),
    Column("dead_letters_to", name(), nullable=False, server_default=""),
    UniqueConstraint("subject_info", "consumer_group", name="uniq_limits"),
    **OPTIONS,
)

consumer_group = Table(
    "consumer_group",  # consumer groups of subjects, and their begin on a broker group without a position
    metadata,
    Column("subject", name(), primary_key=True),
    Column("group_name", name(), primary_key=True),
    Column("since_ms", BigInteger, nullable=False),  # for members: first time of delivered messages; 0: all
    Column("mark", name(32), nullable=False),  # name under which members noted the subject's end; empty: none did
    Column("members_json", long_text(), nullable=False),  # broker groups of the route when the consumer group began
    Column("create_time", BigInteger, nullable=False),
    Column("broadcast", Boolean, nullable=False, server_default=false()),  # one broadcast consumer with a fixed id
    **OPTIONS,
)

datasource_config = Table(
    "datasource_config",  # client databases that the watchdog scans
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("url", name(LONG_NAME_CHARS_MAX), nullable=False),
    Column("user_name", name(), nullable=False),
    Column("password", name(LONG_NAME_CHARS_MAX), nullable=False),
    Column("status", Integer, nullable=False),
    Column("room", name(), nullable=False),
    Column("create_time", BigInteger, nullable=False),
    Column("update_time", BigInteger, nullable=False),
    Column("table_name", name(130), nullable=False, server_default="qmq_msg_queue"),
    Column("rate", Integer, nullable=False, server_default="10000"),
    Column("age_s", Integer, nullable=False, server_default="60"),
    UniqueConstraint("url", name="uniq_idx_name"),
    **OPTIONS,
)

lease = Table(
    "lease",  # active one of several processes; changed by compare-and-set on (term, beat)
    metadata,
    Column("name", name(120), primary_key=True),
    Column("node", name(), nullable=False),
    Column("address", name(ADDRESS_CHARS_MAX), nullable=False),
    Column("term", BigInteger, nullable=False),
    Column("beat", BigInteger, nullable=False),
    Column("update_time", BigInteger, nullable=False),
    **OPTIONS,
)

api_token = Table(
    "api_token",  # tokens with their rights, without secrets
    metadata,
    Column("id", name(), primary_key=True),
    Column("name", name(), nullable=False),
    Column("role", name(20), nullable=False),
    Column("salt", name(), nullable=False),
    Column("hash", name(LONG_NAME_CHARS_MAX), nullable=False),
    Column("subjects_json", long_text(), nullable=False),
    Column("groups_json", long_text(), nullable=False),
    Column("create_time", BigInteger, nullable=False),
    Column("expire_time", BigInteger, nullable=False),  # 0: never
    Column("revoke_time", BigInteger, nullable=False),  # 0: valid
    **OPTIONS,
)

audit_trail = Table(
    "audit_trail",  # operators' actions and their changes; rows are only added
    metadata,
    Column("id", serial(), primary_key=True, autoincrement=True),
    Column("time", BigInteger, nullable=False),
    Column("who", name(LONG_NAME_CHARS_MAX), nullable=False),
    Column("peer", name(LONG_NAME_CHARS_MAX), nullable=False),
    Column("action", name(), nullable=False),
    Column("parameters_json", long_text(), nullable=False),
    Column("before_json", long_text(), nullable=False),
    Column("after_json", long_text(), nullable=False),
    Column("result", long_text(), nullable=False),
    Index("audit_time", "time"),
    **OPTIONS,
)
