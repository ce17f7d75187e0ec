"""Shell. What several metaservers share, operators' further changes, who may do what, the audit trail.

On MariaDB names become case-sensitive. Rows of the version before stay as they are. There is no way back: the version
before could not use what came since, so a downgrade is a restored copy.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

OPTIONS = {
    f"{dialect}_{key}": value
    for dialect in ("mysql", "mariadb")
    for key, value in {"engine": "InnoDB", "charset": "utf8mb4", "collate": "utf8mb4_bin"}.items()
}


def name(chars=100):
    exact = mysql.VARCHAR(chars, charset="utf8mb4", collation="utf8mb4_bin")
    return sa.String(chars).with_variant(exact, "mysql", "mariadb")


def long_text():
    exact = mysql.LONGTEXT(charset="utf8mb4", collation="utf8mb4_bin")
    return sa.Text().with_variant(exact, "mysql", "mariadb")


def upgrade() -> None:
    if op.get_bind().dialect.name in ("mysql", "mariadb"):
        for table in ("broker", "broker_group", "subject_route", "readonly_broker_group_setting"):
            op.execute(sa.text(f"ALTER TABLE {table} CONVERT TO CHARACTER SET utf8mb4 COLLATE utf8mb4_bin"))
        op.alter_column("subject_route", "broker_group_json", type_=long_text(), existing_nullable=False)
    extend_tables()
    create_shared()
    create_operators()


def extend_tables() -> None:
    for column in (
        sa.Column("tag", name(), nullable=False, server_default=""),
        sa.Column("draining", sa.Boolean, nullable=False, server_default=sa.false()),
        sa.Column("is_full", sa.Boolean, nullable=False, server_default=sa.false()),
    ):
        op.add_column("broker_group", column)
    op.add_column("subject_route", sa.Column("changed", sa.BigInteger, nullable=False, server_default="0"))
    op.create_index("route_changed", "subject_route", ["changed"])
    with op.batch_alter_table("broker") as broker:
        broker.create_foreign_key("broker_of_group", "broker_group", ["group_name"], ["group_name"])
    marks = sa.table("readonly_broker_group_setting", sa.column("broker_group"))
    groups = sa.table("broker_group", sa.column("group_name"))
    # Marks of groups that do not exist never had an effect.
    op.execute(sa.delete(marks).where(marks.c.broker_group.not_in(sa.select(groups.c.group_name))))
    with op.batch_alter_table("readonly_broker_group_setting") as mark:
        mark.create_foreign_key("mark_of_group", "broker_group", ["broker_group"], ["group_name"])


def create_shared() -> None:
    versions = op.create_table(
        "meta_version",
        sa.Column("name", name(20), primary_key=True),
        sa.Column("version", sa.BigInteger, nullable=False),
        **OPTIONS,
    )
    op.bulk_insert(versions, [{"name": what, "version": 1} for what in ("directory", "routes", "sightings")])
    op.create_table(
        "broker_sighting",
        sa.Column("hostname", name(), primary_key=True),
        sa.Column("serve_port", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("session", name(), nullable=False),
        sa.Column("metaserver", name(), nullable=False),
        sa.Column("incarnation", name(), nullable=False),
        sa.Column("up", sa.Boolean, nullable=False),
        sa.Column("state_json", long_text(), nullable=False),
        sa.Column("changed", sa.BigInteger, nullable=False),
        sa.Index("sighting_changed", "changed"),
        **OPTIONS,
    )
    op.create_table(
        "metaserver",
        sa.Column("id", name(), primary_key=True),
        sa.Column("http_address", name(), nullable=False),
        sa.Column("grpc_address", name(), nullable=False),
        sa.Column("beat", sa.BigInteger, nullable=False),
        sa.Column("version", name(), nullable=False),
        sa.Column("update_time", sa.BigInteger, nullable=False),
        **OPTIONS,
    )


def create_operators() -> None:
    op.create_table(
        "subject_info",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("name", name(), nullable=False),
        sa.Column("tag", name(), nullable=False),
        sa.Column("create_time", sa.BigInteger, nullable=False),
        sa.Column("update_time", sa.BigInteger, nullable=False),
        sa.UniqueConstraint("name", name="uniq_name"),
        **OPTIONS,
    )
    op.create_table(
        "client_offline_state",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("client_id", name(), nullable=False),
        sa.Column("subject_info", name(), nullable=False),
        sa.Column("consumer_group", name(), nullable=False),
        sa.Column("state", sa.Integer, nullable=False),
        sa.UniqueConstraint("client_id", "subject_info", "consumer_group", name="uniq_offline"),
        **OPTIONS,
    )
    op.create_table(
        "datasource_config",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("url", name(250), nullable=False),
        sa.Column("user_name", name(), nullable=False),
        sa.Column("password", name(250), nullable=False),
        sa.Column("status", sa.Integer, nullable=False),
        sa.Column("room", name(), nullable=False),
        sa.Column("create_time", sa.BigInteger, nullable=False),
        sa.Column("update_time", sa.BigInteger, nullable=False),
        sa.UniqueConstraint("url", name="uniq_idx_name"),
        **OPTIONS,
    )
    op.create_table(
        "api_token",
        sa.Column("id", name(), primary_key=True),
        sa.Column("name", name(), nullable=False),
        sa.Column("role", name(20), nullable=False),
        sa.Column("salt", name(), nullable=False),
        sa.Column("hash", name(250), nullable=False),
        sa.Column("subjects_json", long_text(), nullable=False),
        sa.Column("groups_json", long_text(), nullable=False),
        sa.Column("create_time", sa.BigInteger, nullable=False),
        sa.Column("expire_time", sa.BigInteger, nullable=False),
        sa.Column("revoke_time", sa.BigInteger, nullable=False),
        **OPTIONS,
    )
    op.create_table(
        "audit_trail",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
        sa.Column("time", sa.BigInteger, nullable=False),
        sa.Column("who", name(250), nullable=False),
        sa.Column("peer", name(250), nullable=False),
        sa.Column("action", name(), nullable=False),
        sa.Column("parameters_json", long_text(), nullable=False),
        sa.Column("before_json", long_text(), nullable=False),
        sa.Column("after_json", long_text(), nullable=False),
        sa.Column("result", long_text(), nullable=False),
        sa.Index("audit_time", "time"),
        **OPTIONS,
    )
