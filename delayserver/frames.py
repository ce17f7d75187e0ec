"""Core. Moved to qmq.log.delays, where the audit reads it as well."""

from __future__ import annotations

from qmq.log.delays import (
    PLACE_BYTES,
    Outcome,
    Place,
    Settlement,
    batch_begin,
    decode_dispatch,
    decode_places,
    decode_settled,
    encode_dispatch,
    encode_places,
    encode_settled,
)

__all__ = [
    "PLACE_BYTES",
    "Outcome",
    "Place",
    "Settlement",
    "batch_begin",
    "decode_dispatch",
    "decode_places",
    "decode_settled",
    "encode_dispatch",
    "encode_places",
    "encode_settled",
]
