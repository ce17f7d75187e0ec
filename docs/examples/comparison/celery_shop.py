"""Orders with Django and Celery in one file: an order commits with an outbox row, which a task relays.

python celery_shop.py; gunicorn celery_shop:application; celery -A celery_shop worker; celery -A celery_shop beat
"""

import os

import celery
from django.conf import settings
from django.core.wsgi import get_wsgi_application
from django.db import connection, transaction
from django.http import HttpRequest, JsonResponse
from django.urls import path

if not settings.configured:
    database = {"ENGINE": "django.db.backends.sqlite3", "NAME": os.environ.get("SHOP_DATABASE", "shop.db")}
    settings.configure(
        DATABASES={"default": database | {"OPTIONS": {"timeout": 20, "transaction_mode": "IMMEDIATE"}}},
        ROOT_URLCONF="celery_shop",
        ALLOWED_HOSTS=["127.0.0.1"],
        USE_TZ=True,
    )
application = get_wsgi_application()
app = celery.Celery("shop", broker="redis://127.0.0.1:6379/0")
app.conf.task_acks_late = True
app.conf.beat_schedule = {"relay": {"task": "relay", "schedule": 1.0}}


def order(request: HttpRequest, number: int) -> JsonResponse:
    with connection.cursor() as cursor:
        if request.method == "POST":
            with transaction.atomic():
                cursor.execute("INSERT INTO orders VALUES (%s, 0)", [number])
                cursor.execute("INSERT INTO outbox (number) VALUES (%s)", [number])
            return JsonResponse({}, status=201)
        cursor.execute("SELECT invoiced FROM orders WHERE number = %s", [number])
        return JsonResponse({"invoiced": cursor.fetchone() == (1,)})


@app.task(name="relay", ignore_result=True)
def relay() -> None:
    with transaction.atomic(), connection.cursor() as cursor:  # elsewhere: SELECT … FOR UPDATE SKIP LOCKED
        cursor.execute("SELECT id, number FROM outbox ORDER BY id LIMIT 100")
        for row, number in cursor.fetchall():
            invoice.delay(number)
            cursor.execute("DELETE FROM outbox WHERE id = %s", [row])


@app.task(name="invoice")
def invoice(number: int) -> None:
    with connection.cursor() as cursor:
        cursor.execute("UPDATE orders SET invoiced = 1 WHERE number = %s", [number])


urlpatterns = [path("orders/<int:number>", order)]

if __name__ == "__main__":
    with connection.cursor() as made:
        made.execute("CREATE TABLE IF NOT EXISTS orders (number INTEGER PRIMARY KEY, invoiced INTEGER)")
        made.execute("CREATE TABLE IF NOT EXISTS outbox (id INTEGER PRIMARY KEY, number INTEGER)")
