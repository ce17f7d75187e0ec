"""Core. JSON of requests and answers as pydantic models, and its conversion to messages and from them."""

from __future__ import annotations

import math
import re
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from hashlib import sha256
from typing import Annotated, Any, Literal

from pydantic import (
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    StrictBool,
    StrictInt,
    StrictStr,
    model_validator,
)

from qmq.client.batch import Receipt
from qmq.client.received import ReceivedMessage
from qmq.client.terms import DELAY_S_MAX
from qmq.gateway.outcomes import Code, error_of_receipt
from qmq.message import Message, Value

BATCH_MAX = 1_000
"""Limit of messages in one request, and of handles in one decision."""
HANDLE_CHARS_MAX = 64
REASON_CHARS_MAX = 1_000
CONTENT_TYPE_CHARS_MAX = 200
_IS_TEXT = re.compile(r"\s*(text/|application/([\w.-]+\+)?json\b)", re.IGNORECASE)
YEARS_S = DELAY_S_MAX

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Seconds = Annotated[float, Field(strict=True, ge=0, le=YEARS_S, allow_inf_nan=False)]
Word = Annotated[StrictStr, Field(min_length=1, max_length=100)]
Property = StrictBool | StrictInt | Number | StrictStr


class Given(BaseModel):
    """Base of requests: unknown fields are errors."""

    model_config = ConfigDict(extra="forbid")


class MessageIn(Given):
    """Message to store."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"properties": {"orderNo": "17", "seats": 2}, "tags": ["paid"]}]}
    )

    properties: dict[StrictStr, Property] = Field(
        default_factory=dict, description='Content. Names that begin with "qmq_" are reserved.'
    )
    body: StrictStr | None = Field(None, description="Payload as text, stored as UTF-8.")
    body_base64: StrictStr | None = Field(None, description="Payload of any bytes, instead of `body`.")
    content_type: Annotated[StrictStr, Field(max_length=CONTENT_TYPE_CHARS_MAX)] | None = Field(
        None, description="Media type of the payload."
    )
    tags: list[Word] = Field(default_factory=list, max_length=10, description="Words that consumers may filter by.")
    id: Word | None = Field(
        None, description="Unique id, kept through every retry; by default the Idempotency-Key, or a new one."
    )
    order_key: Word | None = Field(
        None, description="Messages with the same key are delivered one at a time, in the order of sending."
    )
    retries_max: Annotated[int, Field(strict=True, ge=1, le=1_000_000)] | None = Field(
        None, description="Attempts until it becomes a dead letter; by default the consumer's number."
    )
    expires_after_s: Seconds | None = Field(None, description="Time after which it is not delivered any more.")
    delay_s: Seconds | None = Field(None, description="Deliver it after so many seconds.")
    at: AwareDatetime | None = Field(None, description="Deliver it at a moment, instead of the delay.")
    key: Word | None = Field(None, description="Word by which a delayed message is cancelled.")

    _payload: bytes | None = PrivateAttr(None)

    @model_validator(mode="after")
    def _read_payload(self) -> MessageIn:
        if self.body is not None and self.body_base64 is not None:
            raise ValueError("body and body_base64 are one payload: give one of them")
        if self.body is not None:
            self._payload = self.body.encode()
        elif self.body_base64 is not None:
            try:
                self._payload = b64decode(self.body_base64, validate=True)
            except ValueError:
                raise ValueError("body_base64 is no Base64") from None
        return self

    def with_payload(self, payload: bytes) -> MessageIn:
        """Return this message with a payload of raw bytes."""
        self._payload = payload
        return self

    @property
    def is_delayed(self) -> bool:
        return not (self.delay_s is None and self.at is None and self.key is None)

    def fingerprint(self) -> bytes:
        """Return a hash of the content, with which a repeat is compared."""
        content = sha256(self.model_dump_json(exclude={"body", "body_base64"}).encode())
        if self._payload is not None:
            content.update(b"\n" + self._payload)
        return content.digest()

    def message(self, subject: str, default_id: str | None) -> Message:
        return Message(
            subject,
            dict[str, Value](self.properties),
            body=self._payload,
            content_type=self.content_type,
            tags=self.tags,
            id=default_id if self.id is None else self.id,
            order_key=self.order_key,
            retries_max=self.retries_max,
            expires_after=self.expires_after_s,
        )


class RawQuery(BaseModel):
    """Query parameters of a message whose payload is the request."""

    property: list[str] = Field(default_factory=list, description="NAME=VALUE, any number of times.")
    tags: list[str] = Field(default_factory=list, description="Words that consumers may filter by.")
    id: str | None = None
    order_key: str | None = None
    retries_max: int | None = None
    expires_after_s: float | None = None
    delay_s: float | None = None
    at: AwareDatetime | None = None
    key: str | None = None

    def message(self, payload: bytes, content_type: str | None) -> MessageIn:
        """Return the message; raises ValidationError."""
        properties = dict(text.partition("=")[::2] for text in self.property)
        given = self.model_dump(exclude={"property"}) | {"properties": properties, "content_type": content_type}
        return MessageIn.model_validate(given).with_payload(payload)


class BatchIn(Given):
    """Messages to store."""

    messages: list[MessageIn] = Field(min_length=1, max_length=BATCH_MAX)


class ErrorBody(BaseModel):
    """Error, for programs and for people."""

    code: Code
    message: str
    remedy: str


class Error(BaseModel):
    """Body of every error."""

    error: ErrorBody


class Sent(BaseModel):
    """Outcome of one message."""

    outcome: Literal["stored", "refused", "unknown"] = Field(
        description="`stored`: fsynced on enough copies. `refused`: not stored. `unknown`: possibly stored."
    )
    id: str
    subject: str
    broker_group: str = Field("", description="Where it is stored.")
    sequence: int = Field(-1, description="Number among the messages of the subject there; -1 if it is not stored.")
    due_ms: int | None = Field(None, description="Due time of a delayed message, in ms since 1970 UTC.")
    error: ErrorBody | None = None


class BatchSent(BaseModel):
    """Outcomes in the order of the messages."""

    outcomes: list[Sent]
    error: ErrorBody | None = Field(None, description="Present if some messages are not stored: see `outcomes`.")


class Delivered(BaseModel):
    """Message for the consumer group."""

    handle: str = Field(description="Names this delivery, for ack, nack, dead-letter and renew.")
    id: str
    subject: str
    properties: dict[str, Any]
    body: str | None = Field(None, description="Payload that is text: of a type text/… or JSON.")
    body_base64: str | None = Field(None, description="Any other payload.")
    content_type: str | None = None
    tags: list[str]
    order_key: str | None = None
    attempt: int = Field(description="Number of this attempt of the group, from 1.")
    is_suspected: bool = Field(description="A consumer that vanished had it before; that delivery is not counted.")
    created_ms: int = Field(description="When it was sent, by the producer's clock, in ms since 1970 UTC.")
    due_ms: int | None = Field(None, description="Due time of a delayed message.")
    broker_group: str
    sequence: int
    lease_s: float = Field(description="Time to decide it, or to renew the lease.")


class Pulled(BaseModel):
    """Messages for the consumer group."""

    messages: list[Delivered]
    trouble: str = Field(description="Broker groups whose messages do not come now; empty if all are connected.")


Handles = Annotated[
    list[Annotated[StrictStr, Field(min_length=1, max_length=HANDLE_CHARS_MAX)]],
    Field(min_length=1, max_length=BATCH_MAX),
]


class AckIn(Given):
    """Messages that are done."""

    handles: Handles


class NackIn(AckIn):
    """Messages to be delivered again."""

    reason: StrictStr = Field("", max_length=REASON_CHARS_MAX)
    delay_s: Seconds | None = Field(None, description="Time until the next delivery; by default the session's.")


class DeadLetterIn(AckIn):
    """Messages to give up."""

    reason: StrictStr = Field(min_length=1, max_length=REASON_CHARS_MAX)


class RenewIn(AckIn):
    """Messages that need more time."""

    lease_s: Annotated[float, Field(strict=True, gt=0, le=YEARS_S)] | None = Field(
        None, description="Time from now; by default that of the gateway."
    )


class Result(BaseModel):
    """Outcome of a decision on one handle."""

    handle: str
    outcome: Literal["stored", "renewed", "gone", "decided", "unknown"] = Field(
        description="`stored`: by the broker. `gone`: its lease or session has ended. `decided`: otherwise, before. "
        "`unknown`: no broker has answered; repeat the request."
    )


class Decided(BaseModel):
    """Outcomes in the order of the handles."""

    results: list[Result]
    error: ErrorBody | None = Field(None, description="Present if some handles have another outcome: see `results`.")


def sent_of(receipt: Receipt) -> tuple[Sent, Code | None]:
    """Return the outcome of a message, and the code of its error."""
    error = error_of_receipt(receipt)
    body = ErrorBody.model_validate(error.as_json()) if error else None
    outcome: Any = str(receipt.outcome)
    sent = Sent(
        outcome=outcome,
        id=receipt.message_id,
        subject=receipt.subject,
        broker_group=receipt.broker_group,
        sequence=receipt.sequence,
        due_ms=receipt.due_ms,
        error=body,
    )
    return sent, error.code if error else None


def delivered_of(message: ReceivedMessage, handle: str, lease_s: float) -> Delivered:
    """Return the JSON of a message; raises InvalidMessage for bytes of a foreign producer."""
    text, base64 = _payload(message.body, message.content_type or "")
    return Delivered(
        body=text,
        body_base64=base64,
        content_type=message.content_type,
        handle=handle,
        id=str(message.id),
        subject=message.subject,
        properties=_plain(message.properties),
        tags=sorted(message.tags),
        order_key=message.order_key,
        attempt=message.times,
        is_suspected=message.is_suspected,
        created_ms=message.created_ms,
        due_ms=message.due_ms,
        broker_group=message.broker_group,
        sequence=message.sequence,
        lease_s=lease_s,
    )


def _payload(body: bytes | None, content_type: str) -> tuple[str | None, str | None]:
    """Return a payload as text or as Base64."""
    if body is None:
        return None, None
    if _IS_TEXT.match(content_type):
        with suppress(UnicodeDecodeError):
            return str(body, "utf-8"), None
    return None, str(b64encode(body), "ascii")


def _plain(properties: Mapping[str, Value]) -> dict[str, Any]:
    """Return properties as values of JSON: times, and numbers that JSON lacks, as text."""

    def shown(value: Value) -> Value:
        if isinstance(value, float) and not math.isfinite(value):
            return str(value)
        return value.isoformat() if isinstance(value, datetime) else value

    return {name: shown(value) for name, value in properties.items()}


PROBLEMS_MAX = 5


def describe(found: Sequence[Mapping[str, Any]]) -> str:
    """Return one sentence about the problems of a request that does not match its model."""
    texts = [f"{'.'.join(str(part) for part in error['loc'])[:200]}: {error['msg']}" for error in found]
    more = f" and {len(texts) - PROBLEMS_MAX} more" if len(texts) > PROBLEMS_MAX else ""
    return "; ".join(texts[:PROBLEMS_MAX]) + more
