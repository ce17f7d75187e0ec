"""Orders with Django in one file: an order and its message commit together.

python django_shop.py migrate; gunicorn django_shop:application; python django_shop.py runconsumer django_shop:consumer
"""

import os
import sys
from dataclasses import dataclass

from django.conf import settings
from django.core.management import execute_from_command_line
from django.core.wsgi import get_wsgi_application
from django.db import connection, transaction
from django.http import HttpRequest, JsonResponse
from django.urls import path

import qmq
import qmq.blocking

if not settings.configured:
    database = {"ENGINE": "django.db.backends.sqlite3", "NAME": os.environ.get("SHOP_DATABASE", "shop.db")}
    settings.configure(
        DATABASES={"default": database | {"OPTIONS": {"timeout": 20, "transaction_mode": "IMMEDIATE"}}},
        INSTALLED_APPS=["qmq.django"],
        ROOT_URLCONF="django_shop",
        ALLOWED_HOSTS=["127.0.0.1"],
        USE_TZ=True,
    )
application = get_wsgi_application()
producer = qmq.blocking.Producer(outbox="default")
consumer = qmq.blocking.Consumer()


@dataclass
class Placed:
    number: int


def order(request: HttpRequest, number: int) -> JsonResponse:
    if request.method == "POST":
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute("INSERT INTO orders VALUES (%s, 0)", [number])
            producer.send("order.placed", Placed(number), session=connection)
        return JsonResponse({}, status=201)
    with connection.cursor() as cursor:
        cursor.execute("SELECT invoiced FROM orders WHERE number = %s", [number])
        return JsonResponse({"invoiced": cursor.fetchone() == (1,)})


@consumer.listen("order.placed", group="billing", concurrency=2, start="earliest")
def invoice(placed: Placed) -> None:
    with connection.cursor() as cursor:
        cursor.execute("UPDATE orders SET invoiced = 1 WHERE number = %s", [placed.number])


urlpatterns = [path("orders/<int:number>", order)]

if __name__ == "__main__":
    with connection.cursor() as made:
        made.execute("CREATE TABLE IF NOT EXISTS orders (number INTEGER PRIMARY KEY, invoiced INTEGER)")
    execute_from_command_line(sys.argv)
