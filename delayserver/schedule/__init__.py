from delayserver.schedule.blocks import DamagedSchedule
from delayserver.schedule.flush import Flush
from delayserver.schedule.record import RECORD, Records, State, id_hash, key_hash
from delayserver.schedule.schedule import Filed, InFlight, Schedule, discard
from delayserver.schedule.search import Candidate

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
