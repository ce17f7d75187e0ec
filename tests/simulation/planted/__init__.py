"""Planted bugs by the part of the product that they break."""

from tests.simulation.bugs import BUGS
from tests.simulation.planted import cores, delay, metaserver, shells

__all__ = ["BUGS", "cores", "delay", "metaserver", "shells"]
