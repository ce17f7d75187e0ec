"""Payloads: codecs between typed values and the bodies of messages (docs/payloads.md)."""

from qmq.errors import InvalidPayload, UnreadablePayload
from qmq.payloads.codec import Codec, decode, encode, register
from qmq.payloads.encryption import Encrypted
from qmq.payloads.formats import Avro, Json, Msgpack, Protobuf, Raw

__all__ = [
    "Avro",
    "Codec",
    "Encrypted",
    "InvalidPayload",
    "Json",
    "Msgpack",
    "Protobuf",
    "Raw",
    "UnreadablePayload",
    "decode",
    "encode",
    "register",
]
