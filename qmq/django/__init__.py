"""Shell. Django app: the outbox's table as a model with migrations, and the command `runconsumer`.

Add "qmq.django" to INSTALLED_APPS, then migrate.
"""
