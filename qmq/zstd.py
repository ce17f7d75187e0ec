"""Core. Compression of bodies with Zstandard: Python's own from 3.14 on, else the package of the extra `zstd`."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from io import BytesIO
from typing import Any

from qmq.errors import InvalidMessage, MessageTooLarge, MissingExtra

ENCODING = "zstd"
"""Value of `qmq_contentEncoding`."""
LEVEL = 3
"""Zstandard's default."""
BLOCK_BYTES = (128 << 10) + 64
"""Upper bound of the size of a frame's begin and first block. Fewer bytes may decompress to nothing."""
WINDOW_LOG_MAX = 23
"""Limit of the memory of `decompressed_begin`, 8 MiB: four times the window of `LEVEL`."""
_BUILT_IN = "compression.zstd"


@cache
def library() -> Any:
    """Import and return the library; raises MissingExtra."""
    for name in (_BUILT_IN, "zstandard"):
        try:
            return import_module(name)
        except ImportError:
            continue
    raise MissingExtra("zstandard is not installed, and a body is compressed with it: pip install 'qmq[zstd]'")


def compressed(data: bytes) -> bytes:
    """Return `data` as one frame of Zstandard, which states its size; raises MissingExtra."""
    zstd = library()
    if zstd.__name__ == _BUILT_IN:
        return bytes(zstd.compress(data, LEVEL))
    return bytes(zstd.ZstdCompressor(level=LEVEL).compress(data))


def decompressed(data: memoryview, encoding: str, bytes_max: int) -> bytes:
    """Return the bytes of a compressed body.

    Raises:
        InvalidMessage: the body is damaged, or its compression is unknown.
        MessageTooLarge: the body is larger than `bytes_max`.
        MissingExtra: the library is not installed.
    """
    zstd = _library_for(encoding)
    is_built_in = zstd.__name__ == _BUILT_IN
    try:  # a few bytes may decompress to gigabytes, so the size is checked before memory is taken
        if is_built_in:
            decoder = zstd.ZstdDecompressor()
            found = decoder.decompress(data, bytes_max + 1)
            is_whole, size = decoder.eof, len(found)
        else:
            is_whole, size = True, max(zstd.frame_content_size(data), 0)
            found = zstd.ZstdDecompressor().decompress(data, bytes_max) if size <= bytes_max else b""
    except zstd.ZstdError as error:
        raise _is_damaged(error) from None
    if size > bytes_max:
        raise MessageTooLarge(f"the body has more than {bytes_max} bytes when it is decompressed")
    if not is_whole:
        raise InvalidMessage("the compressed body is damaged: it ends early")
    return bytes(found)


def decompressed_begin(data: bytes, encoding: str, bytes_max: int) -> bytes:
    """Return the first bytes of a compressed body, of which only the begin may be there.

    Raises:
        InvalidMessage: it is damaged, or its compression is unknown.
        MissingExtra: the library is not installed.
    """
    zstd = _library_for(encoding)
    try:
        if zstd.__name__ == _BUILT_IN:
            options = {zstd.DecompressionParameter.window_log_max: WINDOW_LOG_MAX}
            return bytes(zstd.ZstdDecompressor(options=options).decompress(data, bytes_max))
        decoder = zstd.ZstdDecompressor(max_window_size=1 << WINDOW_LOG_MAX)
        return bytes(decoder.stream_reader(BytesIO(data)).read(bytes_max))
    except zstd.ZstdError as error:
        raise _is_damaged(error) from None


def _library_for(encoding: str) -> Any:
    if encoding != ENCODING:
        raise InvalidMessage(f"compression {encoding!r:.50} of the body is unknown: upgrade this consumer")
    return library()


def _is_damaged(error: Exception) -> InvalidMessage:
    return InvalidMessage(f"the compressed body is damaged: {error}")
