"""Core. Settings of a process that keeps one copy of a group; brokers and delay servers add their own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from qmq.access import Token
from qmq.control_plane import metaserver_urls
from qmq.errors import InvalidRequest
from qmq.logs import FORMATS, LEVELS
from qmq.message_sizes import MESSAGE_BYTES_MAX, MIB, REQUEST_BYTES_MAX, room_complaints
from qmq.replication.assignment import Address
from qmq.settings import InvalidSettings, setting
from qmq.types import Host


@dataclass(frozen=True, slots=True)
class CopySettings:
    hostname: str = setting(why="AddBroker's name of this process, together with its serve port")
    ip: Host = setting("127.0.0.1", why="host name or IP address that all others connect to; AddBroker's --ip")
    bind: Host = setting("", why="IP address to listen on; 0.0.0.0 or :: for all; default: ip, if that is no name")
    serve_port: int = setting(20881, least=1, most=65535, why="TCP port for clients; QMQ's default")
    sync_port: int = setting(20882, least=1, most=65535, why="TCP port for the slave; QMQ's default")
    control_port: int = setting(20883, least=1, most=65535, why="gRPC port for metaserver, tools, repair and Spark")
    metrics_port: int = setting(20884, least=1, most=65535, why="HTTP port of /metrics")
    advertised_serve_port: int = setting(
        0, least=0, most=65535, why="port that others connect to instead, as behind NAT; AddBroker's; 0: serve_port"
    )
    advertised_sync_port: int = setting(0, least=0, most=65535, why="the same for sync_port")
    advertised_control_port: int = setting(0, least=0, most=65535, why="the same for control_port")
    advertised_metrics_port: int = setting(0, least=0, most=65535, why="the same for metrics_port")
    metrics_subjects_max: int = setting(
        2000, least=0, most=1_000_000, why="subjects and consumer groups on that page, those with most; all are counted"
    )
    metrics_subjects: tuple[str, ...] = setting(
        (), why="subjects that are always on that page; a name that ends in * is a prefix"
    )
    data: Path = setting(why="directory of the message log; one broker, one directory")
    metaserver: str = setting(
        "http://127.0.0.1:8080", why="HTTP address of the metaserver, of nginx before several, or several with commas"
    )
    token: Token = setting(
        secret=True, why="key of the installation, the metaservers' cluster_token; others' are checked there"
    )
    durability: str = setting("fsync", one_of=("fsync",), why="when a frame counts as stored")

    segment_bytes: int = setting(
        1 << 30, unit="bytes", least=4096, why="size of a log segment; a restart replays the last one"
    )
    tail_bytes: int = setting(32 * MIB, unit="bytes", least=0, why="newest frames kept in memory")
    cached_bytes: int = setting(256 * MIB, unit="bytes", least=0, why="newest bytes of the log in the page cache")
    retention_hours: float = setting(72.0, unit="h", least=0.01, why="age at which a segment is deleted; QMQ's default")
    retention_bytes: int = setting(
        1 << 40, unit="bytes", least=1, why="log size above which the oldest segment is deleted"
    )

    log_level: str = setting("INFO", one_of=LEVELS, why="lowest level of written log lines")
    log_format: str = setting("text", one_of=FORMATS, why="one line an event, as text or as JSON")

    quarantine_bytes: int = setting(
        0,
        unit="bytes",
        least=0,
        why="bytes kept after they left the log; 0: the size of the log, at least one segment",
    )

    clock_difference_ms_max: int = setting(
        10_000, unit="ms", least=100, why="difference of two machines' clocks above which nothing is deleted"
    )

    scrub_hours: float = setting(
        168.0, unit="h", least=0.0001, why="age of its last reading at which a segment is read"
    )
    scrub_bytes_per_s: int = setting(16 * MIB, unit="bytes/s", least=1024, why="rate of these reads")

    read_log_bytes_per_s: int = setting(
        16 * MIB, unit="bytes/s", least=1024, why="rate at which audits read the log, all together"
    )

    packet_bytes_max: int = setting(
        16 * MIB, unit="bytes", least=64 * 1024, most=REQUEST_BYTES_MAX, why="largest packet taken"
    )
    message_bytes_max: int = setting(
        4 * MIB, unit="bytes", least=1024, most=MESSAGE_BYTES_MAX, why="largest message stored"
    )
    connections_max: int = setting(
        10_000, least=1, why="clients' connections; above it the oldest without a login is closed, else the newest"
    )
    token_connections_max: int = setting(5_000, least=1, why="connections of clients with one token; more are refused")
    token_bytes_per_s: int = setting(
        0, unit="bytes/s", least=0, why="bytes a second that the clients of one token may produce; 0: no bound"
    )
    new_subjects_per_minute: int = setting(
        1000, least=1, most=1_000_000, why="subjects, and as many groups, that one token's clients may begin; more wait"
    )
    new_subjects_max: int = setting(
        100_000, least=1, most=100_000_000, why="subjects that they may begin while it runs; more are refused"
    )
    token_groups_max: int = setting(
        10_000, least=1, most=100_000_000, why="consumer groups that they began at this master and that exist"
    )
    token_subscriptions_max: int = setting(
        20_000, least=1, most=100_000_000, why="subscriptions of their consumers at this master; more are refused"
    )
    new_producers_per_minute: int = setting(
        2_000, least=1, most=1_000_000, why="producers that they may begin: 4,096 are protected from repeated batches"
    )
    window_bytes: int = setting(32 * MIB, unit="bytes", least=MIB, why="un-acknowledged bytes a connection may have")

    slave_lag_bytes_max: int = setting(256 * MIB, unit="bytes", least=1, why="unconfirmed bytes that make readonly")
    slave_lag_ms_max: int = setting(5_000, unit="ms", least=10, why="age of an unconfirmed frame that makes readonly")
    slave_wait_ms: int = setting(5_000, unit="ms", least=0, why="wait of a restarted master for its slave")
    rejoin_wait_s: float = setting(
        30.0, unit="s", least=0, why="wait of a restarted master of several slaves for those that were in sync"
    )
    catch_up_bytes_per_s: int = setting(256 * MIB, unit="bytes/s", least=1024, why="rate at which a slave is seeded")
    disk_free_limit: int = setting(1 << 30, unit="bytes", least=0, why="free space below which the group is readonly")
    memory_limit: float = setting(
        0.4, unit="of RAM", least=0.0001, most=1.0, why="memory above which producers wait; consumers never do"
    )
    inline_sync_us_max: float = setting(
        500.0, unit="us", least=0, why="fsyncs known to be faster than this run on the loop: no thread hop"
    )

    def __post_init__(self) -> None:
        ip, complaints = Host(self.ip), []
        if ip.is_any:
            complaints.append(f"ip: others cannot connect to {ip}; set bind = {ip}, and ip to this machine's address")
        if self.bind and Host(self.bind).address is None:
            complaints.append(f"bind: {self.bind} is a name; use an IP address, or 0.0.0.0 or :: for all")
        if not self.bind and ip.address is None:
            complaints.append(f"bind: missing; ip is a name, {ip}. Set the address to listen on, or 0.0.0.0 or ::")
        complaints += room_complaints(
            message_bytes_max=self.message_bytes_max,
            packet_bytes_max=self.packet_bytes_max,
            window_bytes=self.window_bytes,
        )
        try:
            metaserver_urls(self.metaserver)
        except InvalidRequest as error:
            complaints.append(str(error))
        if complaints:
            raise InvalidSettings(complaints)

    @property
    def listen_on(self) -> str:
        return str(self.bind or self.ip)

    @property
    def advertised(self) -> Address:
        """Return the address that others connect to; its serve port is part of the broker's name."""
        return Address(
            str(self.ip),
            self.advertised_serve_port or self.serve_port,
            self.advertised_sync_port or self.sync_port,
            self.advertised_control_port or self.control_port,
        )
