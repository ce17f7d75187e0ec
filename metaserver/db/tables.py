"""Shell. The tables. Names and meaning follow QMQ's; times are milliseconds since 1970.

A later column or table is a new file in `migrations/versions`, never an edit of an old one.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Integer, String, Text, UniqueConstraint
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

NAME_CHARS_MAX = 100
"""`qmq.subjects` allows 100 bytes, so no name is ever cut."""


class Base(DeclarativeBase):
    """All tables of the metaserver."""


class BrokerRow(Base):
    """Who may be a broker, with which role."""

    __tablename__ = "broker"
    __table_args__ = (
        UniqueConstraint("hostname", "serve_port", name="uniq_broker"),
        UniqueConstraint("group_name", "role", name="uniq_group_role"),
    )

    id: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=True)
    group_name: Mapped[str] = mapped_column(String(NAME_CHARS_MAX))
    role: Mapped[int] = mapped_column(Integer)
    hostname: Mapped[str] = mapped_column(String(NAME_CHARS_MAX))
    ip: Mapped[str] = mapped_column(String(45))
    serve_port: Mapped[int] = mapped_column(Integer)
    sync_port: Mapped[int] = mapped_column(Integer)
    control_port: Mapped[int] = mapped_column(Integer, default=0)
    metrics_port: Mapped[int] = mapped_column(Integer, default=0)
    incarnation: Mapped[str] = mapped_column(String(NAME_CHARS_MAX), default="")
    complete: Mapped[bool] = mapped_column(Boolean, default=False)
    create_time: Mapped[int] = mapped_column(BigInteger)
    update_time: Mapped[int] = mapped_column(BigInteger)


class GroupRow(Base):
    """Broker groups. With the rows of `broker` that name it: (group, term, master, slave)."""

    __tablename__ = "broker_group"
    __table_args__ = (UniqueConstraint("group_name", name="uniq_group_name"),)

    id: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=True)
    group_name: Mapped[str] = mapped_column(String(NAME_CHARS_MAX))
    kind: Mapped[int] = mapped_column(Integer)
    term: Mapped[int] = mapped_column(BigInteger)
    half_swapped: Mapped[bool] = mapped_column(Boolean, default=False)
    create_time: Mapped[int] = mapped_column(BigInteger)
    update_time: Mapped[int] = mapped_column(BigInteger)


class RouteRow(Base):
    """Broker groups of a subject, as a JSON array of names. `version` is compared and raised by each change."""

    __tablename__ = "subject_route"
    __table_args__ = (UniqueConstraint("subject_info", name="uniq_subject"),)

    id: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=True)
    subject_info: Mapped[str] = mapped_column(String(NAME_CHARS_MAX))
    broker_group_json: Mapped[str] = mapped_column(Text)
    version: Mapped[int] = mapped_column(Integer)
    create_time: Mapped[int] = mapped_column(BigInteger)
    update_time: Mapped[int] = mapped_column(BigInteger)


class ReadonlyRow(Base):
    """Operators' marks: producers of `subject`, or of all with `*`, keep away from the group."""

    __tablename__ = "readonly_broker_group_setting"
    __table_args__ = (UniqueConstraint("subject", "broker_group", name="uniq_subject_group"),)

    id: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=True)
    subject: Mapped[str] = mapped_column(String(NAME_CHARS_MAX))
    broker_group: Mapped[str] = mapped_column(String(NAME_CHARS_MAX))
    create_time: Mapped[int] = mapped_column(BigInteger)
