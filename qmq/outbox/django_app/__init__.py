"""Shell. Django app that creates the outbox's table: add "qmq.outbox.django_app" to INSTALLED_APPS, then migrate."""
