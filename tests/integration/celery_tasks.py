"""Shell. Application of Celery; its tasks note their number in a file: for test_celery."""

from __future__ import annotations

import os
import time

import celery

import qmq.kombu  # noqa: F401  # registers qmq://

app = celery.Celery("shop", broker=os.environ["BROKER"])
app.conf.update(
    task_acks_late=True,
    worker_prefetch_multiplier=1,
    worker_hijack_root_logger=False,
    broker_connection_retry_on_startup=True,
    broker_transport_options={"timeout_s": 20.0},
)


@app.task
def note(number):
    time.sleep(0.02)
    with open(os.environ["NOTES"], "a") as notes:
        notes.write(f"{number}\n")


@app.task(bind=True, max_retries=3)
def fail_once(self, number):
    if self.request.retries == 0:
        raise self.retry(countdown=0.5)
    note(f"{number} after {self.request.retries}")
