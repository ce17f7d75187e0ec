"""Core. CRC-32 by zlib's polynomial, of everything that is sent and stored (decision 7).

Each byte is checked by the master, by the slave and by whoever reads it. Servers have zlib-ng's, which does that with
the processor's own instructions; Python's, for which a client needs no package, gives the same value at a sixteenth of
the speed.
"""

from __future__ import annotations

try:
    from zlib_ng.zlib_ng import crc32
except ImportError:
    from zlib import crc32

__all__ = ["crc32"]
