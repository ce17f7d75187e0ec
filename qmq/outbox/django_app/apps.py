"""Shell. Name and label of the app."""

from __future__ import annotations

from django.apps import AppConfig


class OutboxConfig(AppConfig):  # type: ignore[misc]
    name = "qmq.outbox.django_app"
    label = "qmq_outbox"
    verbose_name = "QMQ outbox"
    default_auto_field = "django.db.models.BigAutoField"
