"""Known bugs of the product, by the part that they are planted into."""

from tests.simulation.bugs import BUGS
from tests.simulation.planted import cores, delay, metaserver, outbox, shells

__all__ = ["BUGS", "cores", "delay", "metaserver", "outbox", "shells"]
