"""Shell. Codecs with their real libraries: round trips, errors by field, choice by content type."""

from __future__ import annotations

import dataclasses
import enum
import subprocess
import sys
from datetime import UTC, datetime
from decimal import Decimal
from typing import Annotated, Any
from uuid import UUID

import attrs
import msgspec
import pydantic
import pytest
from google.protobuf import timestamp_pb2

from qmq import payloads
from qmq.errors import InvalidMessage, InvalidPayload, InvalidRequest, UnreadablePayload
from qmq.message import Message
from qmq.payloads import codec as registry
from qmq.payloads.codec import Decoder

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
A_UUID = UUID("8a9a1f0e-5d7c-4e07-9a4e-1f2f3a4b5c6d")


class Color(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class DataOrder:
    id: UUID
    at: datetime
    prices: list[Decimal]
    color: Color = Color.RED
    seal: bytes = b"\xff"


class PydanticOrder(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")
    id: UUID
    at: datetime
    prices: list[Decimal] = pydantic.Field(alias="Prices")
    color: Color = Color.RED


@pydantic.dataclasses.dataclass
class PydanticData:
    prices: list[Annotated[Decimal, pydantic.Field(gt=0)]]


class Struct(msgspec.Struct):
    id: UUID
    at: datetime
    prices: list[Decimal]
    color: Color = Color.RED
    seal: bytes = b"\xff"


@attrs.define
class AttrsOrder:
    id: UUID
    at: datetime
    prices: list[Decimal]
    color: Color = Color.RED
    seal: bytes = b"\xff"


@dataclasses.dataclass
class Mixed:
    models: list[PydanticOrder]
    structs: dict[UUID, Struct]
    attrs: AttrsOrder | None = None


PRICES = [Decimal("1.10"), Decimal(2)]
ORDERS = [
    DataOrder(A_UUID, NOW, PRICES),
    PydanticOrder(id=A_UUID, at=NOW, Prices=PRICES),
    PydanticData(PRICES),
    Struct(A_UUID, NOW, PRICES),
    AttrsOrder(A_UUID, NOW, PRICES),
    Mixed([PydanticOrder(id=A_UUID, at=NOW, Prices=PRICES)], {A_UUID: Struct(A_UUID, NOW, PRICES)}),
    Mixed([], {}, AttrsOrder(A_UUID, NOW, PRICES)),
]
KEYS = {"2026": payloads.Encrypted.new_key(), "2025": payloads.Encrypted.new_key()}


@dataclasses.dataclass
class Content:
    body: bytes | None
    content_type: str | None

    def get_large(self, name: str) -> None: ...


def sent(value: Any, codec: payloads.Codec | None = None) -> Content:
    return Content(*payloads.encode(value, codec))


@pytest.fixture(autouse=True)
def own_codecs(monkeypatch):
    """Forget the codecs that a test registers."""
    monkeypatch.setattr(registry, "_codecs", dict(registry._codecs))
    monkeypatch.setattr(registry, "_own", set(registry._own))
    registry._find.cache_clear()
    yield
    registry._find.cache_clear()


@pytest.mark.parametrize("codec", [None, payloads.Msgpack(), payloads.Encrypted(KEYS, current="2026")])
@pytest.mark.parametrize("order", ORDERS, ids=lambda order: type(order).__name__)
def test_typed_value_survives_every_format(order, codec):
    if isinstance(codec, payloads.Encrypted):
        payloads.register(codec)
    kind: Any = type(order)
    assert payloads.decode(sent(order, codec), kind) == order
    assert payloads.decode(sent([order], codec), list[kind]) == [order]
    assert payloads.decode(sent({"a": order}, codec), dict[str, kind | None]) == {"a": order}


@pytest.mark.parametrize("order", ORDERS[:5], ids=lambda order: type(order).__name__)
def test_wrong_body_names_field_and_reason(order):
    body = payloads.encode(order)[0].replace(b'"1.10"', b'"much"')
    with pytest.raises(InvalidPayload, match=r"(?i)prices\[0\]: \S+"):
        payloads.decode(Content(body, "application/json"), type(order))
    with pytest.raises(InvalidPayload, match="JSON"):
        payloads.decode(Content(b"{", "application/json"), type(order))


def test_many_wrong_fields_are_counted():
    with pytest.raises(InvalidPayload, match="^id: Field required; at: Field required; Prices: Field required$"):
        payloads.decode(Content(b"{}", "application/json"), PydanticOrder)


def test_constraint_of_an_annotation_is_checked():
    kind = Annotated[int, pydantic.Field(gt=0)]
    assert payloads.decode(sent(1), kind) == 1
    with pytest.raises(InvalidPayload, match="greater than 0"):
        payloads.decode(sent(0), kind)


def test_bytes_travel_as_they_are():
    for value in (b"\xff\x00", bytearray(b"a"), memoryview(b"b")):
        assert sent(value) == Content(bytes(value), "application/octet-stream")
    assert payloads.decode(sent({"a": 1}), bytes) == b'{"a":1}'
    assert payloads.decode(Content(b"a", None), bytes) == b"a"
    assert payloads.decode(Content(b"a", "text/plain"), bytes) == b"a"
    with pytest.raises(InvalidPayload, match="bytes without a structure"):
        payloads.decode(sent(b"{}"), DataOrder)


def test_protobuf_message_survives():
    moment = timestamp_pb2.Timestamp(seconds=5)
    assert sent(moment).content_type == "application/protobuf"
    assert payloads.decode(sent(moment), timestamp_pb2.Timestamp) == moment
    with pytest.raises(InvalidPayload, match="it is no Timestamp"):
        payloads.decode(Content(b"\xff", "application/protobuf"), timestamp_pb2.Timestamp)


OLD = {"type": "record", "name": "Order", "namespace": "shop", "fields": [{"name": "price", "type": "long"}]}
NEW = OLD | {"fields": [{"name": "price", "type": "long"}, {"name": "seats", "type": "int", "default": 1}]}


@dataclasses.dataclass
class AvroOrder:
    price: int
    seats: int = 9


def test_avro_resolves_older_schemas():
    new = payloads.register(payloads.Avro(NEW, OLD))
    assert new.content_type == "application/avro;name=shop.Order"
    assert payloads.decode(sent(AvroOrder(3, 4), new), AvroOrder) == AvroOrder(3, 4)
    assert payloads.decode(sent({"price": 3}, payloads.Avro(OLD)), AvroOrder) == AvroOrder(3, 1)


def test_avro_keeps_a_body_of_an_unknown_schema():
    payloads.register(payloads.Avro(OLD))
    with pytest.raises(UnreadablePayload, match="fingerprint [0-9a-f]{16} is unknown"):
        payloads.decode(sent(AvroOrder(3), payloads.Avro(NEW)), AvroOrder)


@pytest.mark.parametrize("model", ORDERS[:2] + ORDERS[3:5], ids=lambda order: type(order).__name__)
def test_avro_encodes_models(model):
    fields: list[dict[str, Any]] = [{"name": "id", "type": {"type": "string", "logicalType": "uuid"}}]
    codec = payloads.register(payloads.Avro({"type": "record", "name": "O", "fields": fields}))
    assert payloads.decode(sent(model, codec), dict[str, UUID]) == {"id": A_UUID}


def test_key_of_a_body_is_found_by_its_id():
    before = payloads.Encrypted({"2025": KEYS["2025"]}, current="2025", codec=payloads.Msgpack())
    body = sent(ORDERS[0], before)
    payloads.register(payloads.Encrypted(KEYS, current="2026"))
    assert payloads.decode(body, DataOrder) == ORDERS[0]
    payloads.register(payloads.Encrypted({"2026": KEYS["2026"]}, current="2026"))
    with pytest.raises(UnreadablePayload, match="key '2025' is unknown here"):
        payloads.decode(body, DataOrder)


def test_encrypted_body_does_not_repeat_or_show():
    codec = payloads.Encrypted(KEYS, current="2026")
    first, second = (sent("secret", codec).body or b"" for _ in range(2))
    assert first != second and b"secret" not in first
    assert len(first) == len(second)


def test_changed_encrypted_body_is_refused():
    codec = payloads.register(payloads.Encrypted(KEYS, current="2026"))
    body = sent("secret", codec).body or b""
    for at in range(len(body)):
        changed = body[:at] + bytes((body[at] ^ 1,)) + body[at + 1 :]
        with pytest.raises((InvalidPayload, UnreadablePayload)):
            payloads.decode(Content(changed, codec.content_type), str)
    with pytest.raises(InvalidPayload, match="no body of version 1"):
        payloads.decode(Content(body[:20], codec.content_type), str)


@pytest.mark.parametrize(
    ("content_type", "found"),
    [
        ("application/json; charset=UTF-8", "application/json"),
        ("Application/JSON", "application/json"),
        ("application/vnd.shop.order.v2+json", "application/json"),
        ("application/x-msgpack", "application/msgpack"),
        ("text/plain", None),
        ("", None),
        (";", None),
    ],
)
def test_codec_is_found_by_content_type(content_type, found):
    codec = registry._find(content_type)
    assert (codec and codec.content_type) == found


class Upper:
    content_type = "text/x-upper"

    def encode(self, value: Any, /) -> bytes:
        return str(value).upper().encode()

    def decode(self, data: bytes, type: Any, /) -> Any:
        return type(data.decode("ascii").lower())


def test_own_codec_is_used_for_its_content_type():
    with pytest.raises(UnreadablePayload, match="no codec for content type 'text/x-upper': .*register"):
        payloads.decode(sent("a", Upper()), str)
    payloads.register(Upper())
    assert payloads.decode(sent("a", Upper()), str) == "a"
    with pytest.raises(InvalidPayload, match="it is no text/x-upper: 'ascii' codec"):
        payloads.decode(Content(b"\xff", "text/x-upper"), str)


@pytest.mark.parametrize("wrong", [None, Upper, "application/json", object()])
def test_wrong_codec_is_refused(wrong):
    with pytest.raises(InvalidRequest, match="a codec is an object with content_type"):
        payloads.register(wrong)
    if wrong is not None:
        with pytest.raises(InvalidMessage, match="codec= is a codec such as"):
            payloads.encode("a", wrong)


def test_message_of_json_is_a_payload():
    message = Message.of_json("a", {"price": 3, "seats": 4}, {"n": "x" * 9_000})
    assert payloads.decode(message, AvroOrder) == AvroOrder(3, 4)


def test_missing_body_and_content_type_are_named():
    with pytest.raises(InvalidPayload, match="no body and the handler expects DataOrder: send it with"):
        payloads.decode(Content(None, None), DataOrder)
    with pytest.raises(UnreadablePayload, match="no content type"):
        payloads.decode(Content(b"{}", None), DataOrder)


@pytest.mark.parametrize("kind", [Color | memoryview, list["Undefined"], Upper, subprocess.Popen], ids=str)  # noqa: F821
def test_unreadable_annotation_is_refused_with_remedy(kind):
    with pytest.raises(InvalidRequest, match="use a dataclass, a model .*or register a codec"):
        Decoder(kind)


@pytest.mark.parametrize("value", [object(), float("nan"), {(1, 2): 3}, print])
def test_value_without_a_codec_is_refused_with_remedy(value):
    with pytest.raises(InvalidMessage, match="send a dataclass|cannot be encoded as application/json"):
        payloads.encode(value)


def test_wrong_key_of_encryption_is_refused():
    with pytest.raises(InvalidRequest, match="new_key"):
        payloads.Encrypted({"a": b"short"}, current="a")
    with pytest.raises(InvalidRequest, match="none of the key ids"):
        payloads.Encrypted(KEYS, current="2027")


WITHOUT = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(name, name=name.partition(".")[0])
sys.meta_path.insert(0, Missing())
import qmq, qmq.payloads as payloads
{code}
"""


def without(names: set[str], code: str) -> str:
    """Return the output of a process without some packages."""
    run = subprocess.run([sys.executable, "-c", WITHOUT.format(names=names, code=code)], capture_output=True, text=True)
    return run.stdout + run.stderr


@pytest.mark.parametrize(
    ("package", "extra", "call"),
    [
        ("msgpack", "msgpack", "payloads.encode(1, payloads.Msgpack())"),
        ("fastavro", "avro", "payloads.Avro('int')"),
        ("cryptography", "encryption", "payloads.Encrypted({'a': bytes(32)}, current='a')"),
    ],
)
def test_missing_package_is_named_with_its_extra(package, extra, call):
    assert f"the package {package} is not installed: pip install 'qmq[{extra}]'" in without({package}, call)


def test_json_needs_no_package():
    libraries = {"pydantic", "msgspec", "attr", "attrs", "cattrs", "msgpack", "fastavro", "cryptography", "google"}
    code = f"""
import dataclasses, decimal
Order = dataclasses.make_dataclass("Order", [("price", decimal.Decimal)])
body, kind = payloads.encode([Order(decimal.Decimal("1.1"))])
print(body.decode(), kind, sorted({libraries!r} & set(sys.modules)))
"""
    assert without(libraries - {"google"}, code) == '[{"price":"1.1"}] application/json []\n'
