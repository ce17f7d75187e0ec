"""Shell. Name and label of the app."""

from __future__ import annotations

from django.apps import AppConfig


class QmqConfig(AppConfig):  # type: ignore[misc]
    name = "qmq.django"
    label = "qmq_outbox"  # of the stored migrations
    verbose_name = "QMQ"
    default_auto_field = "django.db.models.BigAutoField"
