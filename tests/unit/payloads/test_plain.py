"""Core. Values of Python's types survive JSON when the annotation gives their type."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Annotated, Any, Literal, NamedTuple, NewType, NotRequired, TypedDict
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmq.payloads.plain import UnknownType, WrongValue, check, converter, from_json, to_json


class Color(enum.Enum):
    RED = "red"
    NONE = None


class Level(int, enum.Enum):
    LOW = 1


class Point(NamedTuple):
    x: int
    name: str = ""


class Address(TypedDict):
    street: str
    floor: NotRequired[int]


@dataclasses.dataclass
class Item:
    price: Decimal
    count: int = 1


@dataclasses.dataclass
class Node:
    value: int
    children: list[Node] = dataclasses.field(default_factory=list)
    parent: Node | None = None


@dataclasses.dataclass
class Positive:
    count: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError("count is below 1")


Number = NewType("Number", int)
A_UUID = UUID("8a9a1f0e-5d7c-4e07-9a4e-1f2f3a4b5c6d")


def after_json(value: Any, kind: Any) -> Any:
    return converter(kind)(from_json(to_json(value)))


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (type(None), None),
        (bool, True),
        (int, 2**70),
        (float, 0.1),
        (str, "ä\u2028"),
        (bytes, b"\xff\x00"),
        (Decimal, Decimal("1.10")),
        (UUID, A_UUID),
        (datetime, datetime(2026, 1, 2, 3, 4, 5, 6, UTC)),
        (datetime, datetime(2026, 1, 2, tzinfo=timezone(timedelta(hours=-3)))),
        (datetime, datetime(2026, 1, 2)),
        (date, date(2026, 1, 2)),
        (time, time(1, 2, 3)),
        (Color, Color.RED),
        (Color, Color.NONE),
        (Level, Level.LOW),
        (Point, Point(1, "a")),
        (Item, Item(Decimal("0.10"), 2)),
        (Node, Node(1, [Node(2), Node(3, [Node(4)])], Node(5))),
        (Address, {"street": "a"}),
        (Address, {"street": "a", "floor": 2}),
        (list[Item], [Item(Decimal(1))]),
        (tuple[int, str], (1, "a")),
        (tuple[Item, ...], (Item(Decimal(1)), Item(Decimal(2)))),
        (set[UUID], {A_UUID}),
        (frozenset[int], frozenset({1, 2})),
        (dict[UUID, Item], {A_UUID: Item(Decimal(1))}),
        (dict[int, list[date]], {1: [date(2026, 1, 2)]}),
        (Mapping[bool, str], {True: "a"}),
        (Sequence[int], [1]),
        (Item | None, None),
        (int | str, "1"),
        (Literal["a", 1], 1),
        (Annotated[Item, "a note"], Item(Decimal(1))),
        (Number, 3),
        (Any, {"a": [1, None]}),
        (dict, {"a": 1}),
        (list, [1, "a"]),
    ],
    ids=str,
)
def test_value_survives_json(kind, value):
    found = after_json(value, kind)
    assert found == value and type(found) is type(value)


@given(st.timedeltas())
def test_any_duration_survives_json(value):
    assert after_json(value, timedelta) == value


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists))
def test_plain_values_survive_json(value):
    assert after_json(value, Any) == value


@pytest.mark.parametrize(
    ("kind", "data", "reason"),
    [
        (Item, b'{"count": 1}', "price: is missing"),
        (list[Item], b'[{"price": "1"}, {"price": "1", "count": "2"}]', "[1].count: '2' is not a whole number"),
        (Node, b'{"value": 1, "children": [{"value": true}]}', "children[0].value: True is not a whole number"),
        (Positive, b'{"count": 0}', "Positive: count is below 1"),
        (Item, b"[]", "[] is not an object with the fields of Item"),
        (Item, b"nope", "it is no JSON: Expecting value"),
        (Item, b"\xff", "it is no JSON"),
        (float, b"NaN", "it is no JSON: NaN is no number"),
        (Decimal, b'"1,5"', "'1,5' is not a decimal number as text"),
        (datetime, b'"tomorrow"', "'tomorrow' is not a moment in ISO 8601"),
        (timedelta, b'"P"', "'P' is not a duration"),
        (bytes, b'"%"', "'%' is not base64"),
        (Color, b'"blue"', "'blue' is none of 'red', None"),
        (Literal["a"], b'"b"', "'b' is none of 'a'"),
        (int | None, b'"a"', "'a' is not int | None"),
        (Item | None, b'{"price": []}', "price: [] is not a decimal number"),
        (tuple[int, str], b"[1]", "[1] is not a list of 2"),
        (dict[int, int], b'{"a": 1}', "a: 'a' is not a whole number"),
        (int, b"true", "True is not a whole number"),
        (type(None), b"0", "0 is not null"),
        (list[int], b"[" * 100_000, "it is no JSON"),
    ],
    ids=str,
)
def test_wrong_value_names_field_and_reason(kind, data, reason):
    with pytest.raises(WrongValue) as error:
        converter(kind)(from_json(data))
    assert str(error.value).startswith(reason)


def test_unknown_fields_are_left_out():
    assert converter(Item)({"price": "1", "added later": 2}) == Item(Decimal(1))


@dataclasses.dataclass
class Holder:
    socket: list[memoryview]


def test_unknown_type_is_named_with_its_field():
    with pytest.raises(UnknownType, match="field 'socket' of Holder: memoryview is no type"):
        check(Holder | None, lambda _: None)


@dataclasses.dataclass
class Postponed:
    item: Undefined  # type: ignore[name-defined]  # noqa: F821


def test_undefined_annotation_is_named():
    with pytest.raises(UnknownType, match="annotation of Postponed is not defined here: name 'Undefined'"):
        check(Postponed, lambda _: None)


@pytest.mark.parametrize("value", [object(), [1, {2: object()}], {(1, 2): 3}, len])
def test_value_without_a_form_is_refused(value):
    with pytest.raises(UnknownType):
        to_json(value)


def _endless() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "\ud800", _endless()], ids=repr)
def test_value_outside_json_is_refused(value):
    with pytest.raises(ValueError):
        to_json(value)
