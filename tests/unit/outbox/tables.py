"""Shell. Tables for the tests of the outbox."""

from __future__ import annotations

_MYSQL = """CREATE TABLE qmq_msg_queue (
    id bigint(11) unsigned NOT NULL AUTO_INCREMENT,
    content longtext NOT NULL,
    status smallint(6) NOT NULL DEFAULT 0,
    error int unsigned NOT NULL DEFAULT 0,
    create_time datetime NOT NULL,
    update_time timestamp NOT NULL DEFAULT CURRENT_TIMESTAMP ON UPDATE CURRENT_TIMESTAMP,
    PRIMARY KEY (id)
) ENGINE=InnoDB DEFAULT CHARSET=latin1"""

QMQ_TABLE = {
    "mysql": _MYSQL,
    "mariadb": _MYSQL,
    "postgresql": """CREATE TABLE qmq_msg_queue (
        id bigserial PRIMARY KEY, content text NOT NULL, status smallint NOT NULL DEFAULT 0,
        error integer NOT NULL DEFAULT 0, create_time timestamp NOT NULL, update_time timestamp NOT NULL DEFAULT now()
    )""",
    "sqlite": """CREATE TABLE qmq_msg_queue (
        id INTEGER PRIMARY KEY AUTOINCREMENT, content TEXT NOT NULL, status SMALLINT NOT NULL DEFAULT 0,
        error INTEGER NOT NULL DEFAULT 0, create_time TEXT NOT NULL, update_time TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP
    )""",
}
"""A table with QMQ's columns, as its users have it."""
