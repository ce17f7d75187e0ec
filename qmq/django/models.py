"""Shell. Table of the outbox as a Django model; `qmq.outbox.table` documents the columns."""

from __future__ import annotations

from django.db import models

from qmq.outbox.table import DEFAULT_TABLE


class Row(models.Model):  # type: ignore[misc]
    """Message that waits in the outbox."""

    id = models.BigAutoField(primary_key=True)
    content = models.TextField()
    status = models.SmallIntegerField(default=0)
    error = models.IntegerField(default=0)
    create_time = models.DateTimeField()
    update_time = models.DateTimeField()
    reason = models.CharField(max_length=500, null=True)
    claim = models.CharField(max_length=128, null=True)

    class Meta:
        db_table = DEFAULT_TABLE
        indexes = [
            models.Index(fields=["status", "update_time", "id"], name=f"{DEFAULT_TABLE}_due"),
            models.Index(fields=["claim"], name=f"{DEFAULT_TABLE}_claim"),
        ]
