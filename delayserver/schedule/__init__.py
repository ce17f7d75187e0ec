from qmq.delayserver.schedule.checkpoint import Flush
from qmq.delayserver.schedule.record import RECORD, Records, State, id_hash, key_hash
from qmq.delayserver.schedule.schedule import Filed, InFlight, Schedule, discard
from qmq.delayserver.schedule.search import Candidate
from qmq.delayserver.schedule.segment import DamagedSchedule

__all__ = [
    "RECORD",
    "Candidate",
    "DamagedSchedule",
    "Filed",
    "Flush",
    "InFlight",
    "Records",
    "Schedule",
    "State",
    "discard",
    "id_hash",
    "key_hash",
]
