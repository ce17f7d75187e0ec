"""Shell. AsyncAPI document of declared handlers."""

from __future__ import annotations

import dataclasses
import json
import sys
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Annotated

import jsonschema_rs
import pydantic
import pytest

import qmq
import qmq.blocking
from qmq import asyncapi
from qmq.otel import TracedProducer

SPECIFICATION = jsonschema_rs.validator_for(json.loads((Path(__file__).parent / "asyncapi-3.0.0.json").read_text()))


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


@pytest.fixture
def producer():
    """Return a producer that declares messages; one subject has letters that ids must not have."""
    producer = qmq.blocking.Producer(app="a", metaserver="x")
    producer.declare("order.placed", Order, about="An order was placed.\nThe rest is left out.")
    producer.declare("order.placed", Invoice)
    producer.declare("Über 100% ~", Annotated[int, pydantic.Field(gt=0)])
    producer.declare("Üxer 100% ~")
    return producer


@pytest.fixture
def found(producer):
    document = asyncapi.document([consumer], [producer._outgoing.declared], title="shop")
    return json.loads(json.dumps(document))


def test_document_follows_the_specification(found):
    SPECIFICATION.validate(found)
    found["operations"]["news"]["action"] = "get"
    assert not SPECIFICATION.is_valid(found), "a mistake is seen"


def test_document_lists_declared_messages(found):
    assert found["operations"]["order.placed.send"] == {
        "action": "send",
        "channel": {"$ref": "#/channels/order.placed"},
        "summary": "An order was placed.",
        "messages": [
            {"$ref": f"#/channels/order.placed/messages/order.placed.{name}"} for name in ("Order", "Invoice")
        ],
    }
    channels = {name: channel["address"] for name, channel in found["channels"].items() if "100" in name}
    assert channels == {"_ber_100___": "Über 100% ~", "_xer_100___": "Üxer 100% ~"}
    assert found["components"]["messages"]["_ber_100___.int"]["payload"] == {"type": "integer", "exclusiveMinimum": 0}


def test_equal_names_have_ids_of_their_own():
    other = pydantic.create_model("Order", weight=(int, ...))
    others = pydantic.create_model("Orders", order=(other, ...))
    document = asyncapi.document([consumer], [{"order placed": [asyncapi.Declared(others, "")]}], title="shop")
    both = asyncapi.document(
        [], [{"a b": [asyncapi.Declared(Order, "")], "a_b": [asyncapi.Declared(other, "")]}], title=""
    )
    SPECIFICATION.validate(document)
    orders = [schema for schema in document["components"]["schemas"].values() if schema["title"] == "Order"]
    assert [schema["required"] for schema in orders] == [["id", "price"], ["weight"]]
    assert [channel["address"] for channel in both["channels"].values()] == ["a b", "a_b"]
    schemas = both["components"]["schemas"]
    payloads = [message["payload"]["$ref"] for message in both["components"]["messages"].values()]
    assert [schemas[payload.rpartition("/")[2]]["required"] for payload in payloads] == [["id", "price"], ["weight"]]


def test_document_is_equal_on_each_machine(found):
    assert "news" in found["operations"] and "x-qmq-group" not in found["operations"]["news"], "a broadcast"


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
    payload = found["components"]["messages"]["order.placed.Order"]["payload"]
    assert payload == {"$ref": "#/components/schemas/Order"}
    assert found["components"]["schemas"]["Order"]["required"] == ["id", "price"]


def _references(value: object) -> list[str]:
    if isinstance(value, dict):
        own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
        return own + [reference for part in value.values() for reference in _references(part)]
    return [reference for part in value for reference in _references(part)] if isinstance(value, list) else []


def test_every_reference_has_its_target(found):
    references = _references(found)
    assert len(references) > 6
    for reference in references:
        target = found
        for part in reference.removeprefix("#/").split("/"):
            target = target[part]


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
    ("target", "addresses"),
    [
        ("shop_web", {"order.placed", "traced"}),
        ("shop_web:producer", {"order.placed"}),
        ("shop_handlers:consumer", {"order.placed", "invoice.made", "news", "traced"}),
    ],
)
def test_command_finds_declared_messages(capsys, monkeypatch, target, addresses):
    """Of a target's producers, and of those in other modules of the application."""
    producer, inner = (qmq.Producer(app="a", metaserver="x") for _ in range(2))
    producer.declare("order.placed")
    inner.declare("traced")
    web = ModuleType("shop_web")
    vars(web).update(producer=producer, traced=TracedProducer(inner))
    monkeypatch.setitem(sys.modules, "shop_web", web)
    monkeypatch.setitem(sys.modules, "shop_handlers", sys.modules[__name__])
    assert asyncapi.main([target]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {channel["address"] for channel in found["channels"].values()} == addresses


@pytest.mark.parametrize(
    ("path", "remedy"),
    [
        ("no_such_module:consumer", "cannot be imported"),
        ("json:nothing", "has no consumer"),
        ("json", "Or declare what a producer sends"),
    ],
)
def test_wrong_consumer_is_refused_with_a_remedy(capsys, path, remedy):
    assert asyncapi.main([path]) == 2
    assert remedy in capsys.readouterr().err
