"""Shell. The app under its name until 0.3: Django installs `qmq.django` for either entry of INSTALLED_APPS."""

from qmq.django.apps import QmqConfig as QmqConfig
