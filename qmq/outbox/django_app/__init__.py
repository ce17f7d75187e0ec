"""Shell. Name of the Django app until 0.3, which settings of applications still have; the app is `qmq.django`."""
