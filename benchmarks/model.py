"""Core. Payload of the measurement `typed`: a small order of a shop, as a model of pydantic."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from uuid import UUID

from pydantic import BaseModel


class Item(BaseModel):
    name: str
    price: Decimal


class Order(BaseModel):
    id: UUID
    placed_at: datetime
    customer: str
    items: list[Item]


def make_order(number: int) -> Order:
    """Return an order of 270 bytes of JSON."""
    return Order(
        id=UUID(int=number),
        placed_at=datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=number),
        customer=f"customer {number}",
        items=[Item(name="ticket", price=Decimal("12.50")), Item(name="fee", price=Decimal("0.99"))],
    )
