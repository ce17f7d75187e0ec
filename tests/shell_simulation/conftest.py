"""Shell. Simulations are quiet."""

from tests.support.quiet import quiet

__all__ = ["quiet"]
