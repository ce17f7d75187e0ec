"""Orders by message with Celery and Redis: retries, a delay, a daily report, each order invoiced once. No order keys.

celery -A celery_worker worker; celery -A celery_worker beat
"""

import celery
import redis
from celery.schedules import crontab

app = celery.Celery("shop", broker="redis://127.0.0.1:6379/0")
app.conf.task_acks_late = True
app.conf.beat_schedule = {"daily": {"task": "report", "schedule": crontab(minute=0, hour=8), "args": ("sales",)}}
keys = redis.Redis()


@app.task(name="invoice", bind=True, autoretry_for=(Exception,), max_retries=4, default_retry_delay=5)
def invoice(self: celery.Task, number: int) -> None:
    if keys.exists(f"invoiced:{number}"):
        return
    print("invoice", number, "attempt", self.request.retries + 1)
    remind.apply_async((number,), countdown=14 * 86_400)
    keys.set(f"invoiced:{number}", 1, ex=30 * 86_400)


@app.task(name="remind")
def remind(number: int) -> None:
    print("order.unpaid", number)


@app.task(name="report")
def report(kind: str) -> None:
    print("report.due", kind)
