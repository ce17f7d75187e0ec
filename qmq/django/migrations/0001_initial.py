"""Shell. Migration that creates the table by the SQL files, unless it exists."""

from __future__ import annotations

from typing import Any

from django.db import migrations, models

from qmq.outbox.schema import create_statements
from qmq.outbox.table import DEFAULT_TABLE


def create(apps: Any, schema_editor: Any) -> None:
    connection = schema_editor.connection
    if DEFAULT_TABLE not in connection.introspection.table_names():
        for statement in create_statements(connection.vendor):
            schema_editor.execute(statement)


def drop(apps: Any, schema_editor: Any) -> None:
    schema_editor.execute(f"DROP TABLE {DEFAULT_TABLE}")


class Migration(migrations.Migration):  # type: ignore[misc]
    initial = True
    dependencies: list[tuple[str, str]] = []
    operations = [
        migrations.SeparateDatabaseAndState(
            database_operations=[migrations.RunPython(create, drop)],
            state_operations=[
                migrations.CreateModel(
                    name="Row",
                    fields=[
                        ("id", models.BigAutoField(primary_key=True, serialize=False)),
                        ("content", models.TextField()),
                        ("status", models.SmallIntegerField(default=0)),
                        ("error", models.IntegerField(default=0)),
                        ("create_time", models.DateTimeField()),
                        ("update_time", models.DateTimeField()),
                        ("reason", models.CharField(max_length=500, null=True)),
                        ("claim", models.CharField(max_length=128, null=True)),
                    ],
                    options={
                        "db_table": DEFAULT_TABLE,
                        "indexes": [
                            models.Index(fields=["status", "update_time", "id"], name=f"{DEFAULT_TABLE}_due"),
                            models.Index(fields=["claim"], name=f"{DEFAULT_TABLE}_claim"),
                        ],
                    },
                ),
            ],
        ),
    ]
