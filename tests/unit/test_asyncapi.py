"""Shell. AsyncAPI document of declared handlers."""

from __future__ import annotations

import dataclasses
import json
import sys
from decimal import Decimal

import pydantic
import pytest

import qmq
from qmq import asyncapi


class Order(pydantic.BaseModel):
    id: int
    price: Decimal


@dataclasses.dataclass
class Invoice:
    order: Order


consumer = qmq.Consumer(app="a", metaserver="http://127.0.0.1:9", producer=qmq.Producer(app="a", metaserver="x"))


@consumer.listen("order.placed", group="billing", reply_to="invoice.made")
async def on_order(order: Order) -> Invoice:
    """Make an invoice.

    The rest of the docstring is left out.
    """
    return Invoice(order)


@consumer.listen("order.placed", group="report", batch=10)
def on_orders(orders: list[Order]) -> None: ...


@consumer.listen("news")
async def on_news(message: qmq.ReceivedMessage) -> None: ...


def test_document_lists_handlers_and_replies():
    found = asyncapi.document([consumer], title="shop")
    assert (found["asyncapi"], sorted(found["channels"])) == ("3.0.0", ["invoice.made", "news", "order.placed"])
    billing = found["operations"]["order.placed.billing"]
    assert billing == {
        "action": "receive",
        "channel": {"$ref": "#/channels/order.placed"},
        "summary": "Make an invoice.",
        "messages": [{"$ref": "#/channels/order.placed/messages/order.placed.Order"}],
        "x-qmq-group": "billing",
    }
    assert found["operations"]["order.placed.billing.reply"]["action"] == "send"
    assert found["operations"]["order.placed.report"]["messages"] == billing["messages"]
    assert found["components"]["messages"]["order.placed.Order"]["payload"]["required"] == ["id", "price"]
    assert "Order" in found["components"]["schemas"]


def _references(value: object) -> list[str]:
    if isinstance(value, dict):
        own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
        return own + [reference for part in value.values() for reference in _references(part)]
    return [reference for part in value for reference in _references(part)] if isinstance(value, list) else []


def test_every_reference_has_its_target():
    found = json.loads(json.dumps(asyncapi.document([consumer], title="shop")))
    references = _references(found)
    assert len(references) > 6
    for reference in references:
        target = found
        for part in reference.removeprefix("#/").split("/"):
            target = target[part.replace("~1", "/").replace("~0", "~")]


def test_page_loads_nothing_from_elsewhere():
    page = asyncapi.html(asyncapi.document([consumer], title="<shop>"))
    assert "&lt;shop&gt;" in page and "receive order.placed, group billing" in page and "Invoice" in page
    assert not any(word in page for word in ("<script", "src=", "href=", "http"))


def test_command_prints_document_and_page(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "shop_handlers", sys.modules[__name__])
    assert asyncapi.main(["shop_handlers:consumer"]) == 0
    assert json.loads(capsys.readouterr().out)["info"]["title"] == "shop_handlers"
    assert asyncapi.main(["shop_handlers:consumer", "--html", "--title", "shop"]) == 0
    assert "<h1>shop</h1>" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("path", "remedy"),
    [
        ("no_such_module:consumer", "cannot be imported"),
        ("json:nothing", "has no consumer"),
    ],
)
def test_wrong_consumer_is_refused_with_a_remedy(capsys, path, remedy):
    assert asyncapi.main([path]) == 2
    assert remedy in capsys.readouterr().err
