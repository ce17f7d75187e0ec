"""Shell. Encryption of payloads: a codec around another one (extra `encryption`).

Body, with content type `application/x-qmq-encrypted`:

    offset  size  field
    0       1     version, 1
    1       1     k: bytes of the key id
    2       k     key id, UTF-8
    2 + k   32    salt, random for each message
    34 + k  rest  AES-256-GCM: ciphertext, then a tag of 16 bytes

The cipher's key is HKDF-SHA256 (key, salt, info "qmq payload"). It encrypts one message, under a nonce of zeros. With
random nonces under one key, the limit would be 2^32 messages, which a busy subject reaches in hours. All bytes before
the ciphertext are authenticated. The plaintext is `u8 t`, the content type inside (t bytes), and its body.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from qmq.errors import InvalidRequest, UnreadablePayload
from qmq.payloads.codec import Codec, Decoder, encode
from qmq.payloads.models import load
from qmq.payloads.plain import WrongValue

VERSION, SALT_BYTES, KEY_BYTES = 1, 32, 32
_NONCE = bytes(12)


class Encrypted:
    """Codec that encrypts the bodies of another codec.

    Properties, tags, order keys and ids are not encrypted: brokers use them.

    Args:
        keys: keys of 32 bytes by id (`new_key`). Remove an old key when no message that it encrypted is left.
        current: id of the key that encrypts.
        codec: codec of the content; by default chosen by the value, as without encryption.
    """

    content_type = "application/x-qmq-encrypted"

    def __init__(self, keys: Mapping[str, bytes], *, current: str, codec: Codec | None = None) -> None:
        if current not in keys:
            raise InvalidRequest(f"current={current!r} is none of the key ids {', '.join(keys)}")
        for name, key in keys.items():
            if not isinstance(key, bytes) or len(key) != KEY_BYTES:
                raise InvalidRequest(f"key {name!r} is not {KEY_BYTES} bytes: make one with Encrypted.new_key()")
            if not 0 < len(name.encode()) < 256:
                raise InvalidRequest(f"a key id is 1 to 255 bytes, not {name!r:.50}")
        self._keys = dict(keys)
        self._current = current
        self._codec = codec
        load("cryptography", extra="encryption")

    @staticmethod
    def new_key() -> bytes:
        """Return a random key."""
        return os.urandom(KEY_BYTES)

    def encode(self, value: Any, /) -> bytes:
        body, content_type = encode(value, self._codec)
        name, kind = self._current.encode(), content_type.encode()
        head = bytes((VERSION, len(name))) + name + os.urandom(SALT_BYTES)
        content = bytes((len(kind),)) + kind + body
        return head + bytes(self._cipher(self._current, head).encrypt(_NONCE, content, head))

    def decode(self, data: bytes, type: Any, /) -> Any:
        if len(data) < 2 or data[0] != VERSION or len(data) < 2 + data[1] + SALT_BYTES + 16:
            raise WrongValue("it is no body of version 1 of application/x-qmq-encrypted")
        head = data[: 2 + data[1] + SALT_BYTES]
        name = data[2 : 2 + data[1]].decode("utf-8", "replace")
        if name not in self._keys:
            raise UnreadablePayload(f"key {name!r} is unknown here: add it to Encrypted(keys=…)")
        invalid: type[Exception] = load("cryptography.exceptions", extra="encryption").InvalidTag
        try:
            content = self._cipher(name, head).decrypt(_NONCE, data[len(head) :], head)
        except invalid:
            raise WrongValue(f"it was changed, or encrypted with another key {name!r}") from None
        end = 1 + content[0]
        return Decoder[Any](type)(_Content(content[end:], content[1:end].decode()))

    def _cipher(self, name: str, head: bytes) -> Any:
        aead = load("cryptography.hazmat.primitives.ciphers.aead", extra="encryption")
        hkdf = load("cryptography.hazmat.primitives.kdf.hkdf", extra="encryption")
        hashes = load("cryptography.hazmat.primitives.hashes", extra="encryption")
        salt = head[-SALT_BYTES:]
        key = hkdf.HKDF(hashes.SHA256(), KEY_BYTES, salt, b"qmq payload").derive(self._keys[name])
        return aead.AESGCM(key)


class _Content:
    """Decrypted body."""

    def __init__(self, body: bytes, content_type: str) -> None:
        self.body = body
        self.content_type = content_type

    def get_large(self, name: str) -> None: ...
