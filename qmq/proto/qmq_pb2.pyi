from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LeaseRequest(_message.Message):
    __slots__ = ("name", "node", "address", "take", "term", "beat", "release")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TAKE_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    name: str
    node: str
    address: str
    take: bool
    term: int
    beat: int
    release: bool
    def __init__(self, name: _Optional[str] = ..., node: _Optional[str] = ..., address: _Optional[str] = ..., take: _Optional[bool] = ..., term: _Optional[int] = ..., beat: _Optional[int] = ..., release: _Optional[bool] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("node", "term", "beat", "address")
    NODE_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    node: str
    term: int
    beat: int
    address: str
    def __init__(self, node: _Optional[str] = ..., term: _Optional[int] = ..., beat: _Optional[int] = ..., address: _Optional[str] = ...) -> None: ...

class SourcesQuestion(_message.Message):
    __slots__ = ("room",)
    ROOM_FIELD_NUMBER: _ClassVar[int]
    room: str
    def __init__(self, room: _Optional[str] = ...) -> None: ...

class Source(_message.Message):
    __slots__ = ("url", "user", "password", "table", "rate", "age_s", "problem")
    URL_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    PASSWORD_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    RATE_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    url: str
    user: str
    password: str
    table: str
    rate: int
    age_s: int
    problem: str
    def __init__(self, url: _Optional[str] = ..., user: _Optional[str] = ..., password: _Optional[str] = ..., table: _Optional[str] = ..., rate: _Optional[int] = ..., age_s: _Optional[int] = ..., problem: _Optional[str] = ...) -> None: ...

class SourceList(_message.Message):
    __slots__ = ("sources",)
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    sources: _containers.RepeatedCompositeFieldContainer[Source]
    def __init__(self, sources: _Optional[_Iterable[_Union[Source, _Mapping]]] = ...) -> None: ...

class NewGroup(_message.Message):
    __slots__ = ("subject", "group", "latest", "since_ms", "broadcast")
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    LATEST_FIELD_NUMBER: _ClassVar[int]
    SINCE_MS_FIELD_NUMBER: _ClassVar[int]
    BROADCAST_FIELD_NUMBER: _ClassVar[int]
    subject: str
    group: str
    latest: bool
    since_ms: int
    broadcast: bool
    def __init__(self, subject: _Optional[str] = ..., group: _Optional[str] = ..., latest: _Optional[bool] = ..., since_ms: _Optional[int] = ..., broadcast: _Optional[bool] = ...) -> None: ...

class BeginGroupsRequest(_message.Message):
    __slots__ = ("broker_group", "groups")
    BROKER_GROUP_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    broker_group: str
    groups: _containers.RepeatedCompositeFieldContainer[NewGroup]
    def __init__(self, broker_group: _Optional[str] = ..., groups: _Optional[_Iterable[_Union[NewGroup, _Mapping]]] = ...) -> None: ...

class GroupBegin(_message.Message):
    __slots__ = ("since_ms", "mark", "began_ms")
    SINCE_MS_FIELD_NUMBER: _ClassVar[int]
    MARK_FIELD_NUMBER: _ClassVar[int]
    BEGAN_MS_FIELD_NUMBER: _ClassVar[int]
    since_ms: int
    mark: str
    began_ms: int
    def __init__(self, since_ms: _Optional[int] = ..., mark: _Optional[str] = ..., began_ms: _Optional[int] = ...) -> None: ...

class BeginGroupsAnswer(_message.Message):
    __slots__ = ("begins",)
    BEGINS_FIELD_NUMBER: _ClassVar[int]
    begins: _containers.RepeatedCompositeFieldContainer[GroupBegin]
    def __init__(self, begins: _Optional[_Iterable[_Union[GroupBegin, _Mapping]]] = ...) -> None: ...

class TokenQuestion(_message.Message):
    __slots__ = ("token",)
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    token: str
    def __init__(self, token: _Optional[str] = ...) -> None: ...

class TokenAnswer(_message.Message):
    __slots__ = ("name", "role", "subjects", "groups", "valid_ms", "expires_in_ms")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    SUBJECTS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    VALID_MS_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_IN_MS_FIELD_NUMBER: _ClassVar[int]
    name: str
    role: str
    subjects: _containers.RepeatedScalarFieldContainer[str]
    groups: _containers.RepeatedScalarFieldContainer[str]
    valid_ms: int
    expires_in_ms: int
    def __init__(self, name: _Optional[str] = ..., role: _Optional[str] = ..., subjects: _Optional[_Iterable[str]] = ..., groups: _Optional[_Iterable[str]] = ..., valid_ms: _Optional[int] = ..., expires_in_ms: _Optional[int] = ...) -> None: ...

class OldRoutesQuestion(_message.Message):
    __slots__ = ("broker_group", "subject")
    BROKER_GROUP_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    broker_group: str
    subject: str
    def __init__(self, broker_group: _Optional[str] = ..., subject: _Optional[str] = ...) -> None: ...

class OldRoutesAnswer(_message.Message):
    __slots__ = ("producers", "consumers", "watchers")
    PRODUCERS_FIELD_NUMBER: _ClassVar[int]
    CONSUMERS_FIELD_NUMBER: _ClassVar[int]
    WATCHERS_FIELD_NUMBER: _ClassVar[int]
    producers: int
    consumers: int
    watchers: int
    def __init__(self, producers: _Optional[int] = ..., consumers: _Optional[int] = ..., watchers: _Optional[int] = ...) -> None: ...

class BrokerIdentity(_message.Message):
    __slots__ = ("broker_group", "hostname", "ip", "serve_port", "sync_port", "control_port", "metrics_port", "incarnation", "version", "kind", "term", "begins", "instance")
    BROKER_GROUP_FIELD_NUMBER: _ClassVar[int]
    HOSTNAME_FIELD_NUMBER: _ClassVar[int]
    IP_FIELD_NUMBER: _ClassVar[int]
    SERVE_PORT_FIELD_NUMBER: _ClassVar[int]
    SYNC_PORT_FIELD_NUMBER: _ClassVar[int]
    CONTROL_PORT_FIELD_NUMBER: _ClassVar[int]
    METRICS_PORT_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    BEGINS_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    broker_group: str
    hostname: str
    ip: str
    serve_port: int
    sync_port: int
    control_port: int
    metrics_port: int
    incarnation: str
    version: str
    kind: int
    term: int
    begins: bool
    instance: str
    def __init__(self, broker_group: _Optional[str] = ..., hostname: _Optional[str] = ..., ip: _Optional[str] = ..., serve_port: _Optional[int] = ..., sync_port: _Optional[int] = ..., control_port: _Optional[int] = ..., metrics_port: _Optional[int] = ..., incarnation: _Optional[str] = ..., version: _Optional[str] = ..., kind: _Optional[int] = ..., term: _Optional[int] = ..., begins: _Optional[bool] = ..., instance: _Optional[str] = ...) -> None: ...

class BrokerAddress(_message.Message):
    __slots__ = ("ip", "serve_port", "sync_port", "control_port", "metrics_port")
    IP_FIELD_NUMBER: _ClassVar[int]
    SERVE_PORT_FIELD_NUMBER: _ClassVar[int]
    SYNC_PORT_FIELD_NUMBER: _ClassVar[int]
    CONTROL_PORT_FIELD_NUMBER: _ClassVar[int]
    METRICS_PORT_FIELD_NUMBER: _ClassVar[int]
    ip: str
    serve_port: int
    sync_port: int
    control_port: int
    metrics_port: int
    def __init__(self, ip: _Optional[str] = ..., serve_port: _Optional[int] = ..., sync_port: _Optional[int] = ..., control_port: _Optional[int] = ..., metrics_port: _Optional[int] = ...) -> None: ...

class Assignment(_message.Message):
    __slots__ = ("broker_group", "term", "role", "master", "slaves", "readonly_subjects", "offline", "points", "loss_accepted_term", "min_copies", "limits", "sync_mode", "fills", "clock_ms", "awaited")
    BROKER_GROUP_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    MASTER_FIELD_NUMBER: _ClassVar[int]
    SLAVES_FIELD_NUMBER: _ClassVar[int]
    READONLY_SUBJECTS_FIELD_NUMBER: _ClassVar[int]
    OFFLINE_FIELD_NUMBER: _ClassVar[int]
    POINTS_FIELD_NUMBER: _ClassVar[int]
    LOSS_ACCEPTED_TERM_FIELD_NUMBER: _ClassVar[int]
    MIN_COPIES_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    SYNC_MODE_FIELD_NUMBER: _ClassVar[int]
    FILLS_FIELD_NUMBER: _ClassVar[int]
    CLOCK_MS_FIELD_NUMBER: _ClassVar[int]
    AWAITED_FIELD_NUMBER: _ClassVar[int]
    broker_group: str
    term: int
    role: int
    master: BrokerAddress
    slaves: _containers.RepeatedCompositeFieldContainer[BrokerAddress]
    readonly_subjects: _containers.RepeatedScalarFieldContainer[str]
    offline: _containers.RepeatedCompositeFieldContainer[Offline]
    points: _containers.RepeatedCompositeFieldContainer[AcknowledgedPoint]
    loss_accepted_term: int
    min_copies: int
    limits: _containers.RepeatedCompositeFieldContainer[OperatorLimits]
    sync_mode: str
    fills: _containers.RepeatedCompositeFieldContainer[FillOrder]
    clock_ms: int
    awaited: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, broker_group: _Optional[str] = ..., term: _Optional[int] = ..., role: _Optional[int] = ..., master: _Optional[_Union[BrokerAddress, _Mapping]] = ..., slaves: _Optional[_Iterable[_Union[BrokerAddress, _Mapping]]] = ..., readonly_subjects: _Optional[_Iterable[str]] = ..., offline: _Optional[_Iterable[_Union[Offline, _Mapping]]] = ..., points: _Optional[_Iterable[_Union[AcknowledgedPoint, _Mapping]]] = ..., loss_accepted_term: _Optional[int] = ..., min_copies: _Optional[int] = ..., limits: _Optional[_Iterable[_Union[OperatorLimits, _Mapping]]] = ..., sync_mode: _Optional[str] = ..., fills: _Optional[_Iterable[_Union[FillOrder, _Mapping]]] = ..., clock_ms: _Optional[int] = ..., awaited: _Optional[_Iterable[str]] = ...) -> None: ...

class FillOrder(_message.Message):
    __slots__ = ("fill_id", "allowed")
    FILL_ID_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_FIELD_NUMBER: _ClassVar[int]
    fill_id: str
    allowed: bool
    def __init__(self, fill_id: _Optional[str] = ..., allowed: _Optional[bool] = ...) -> None: ...

class AcknowledgedPoint(_message.Message):
    __slots__ = ("term", "boot", "end", "chain")
    TERM_FIELD_NUMBER: _ClassVar[int]
    BOOT_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    term: int
    boot: int
    end: int
    chain: int
    def __init__(self, term: _Optional[int] = ..., boot: _Optional[int] = ..., end: _Optional[int] = ..., chain: _Optional[int] = ...) -> None: ...

class OperatorLimits(_message.Message):
    __slots__ = ("subject", "group", "expires_after_s", "expired_die", "per_second", "messages_max", "drops_oldest", "bytes_max", "dead_letters_to")
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    EXPIRED_DIE_FIELD_NUMBER: _ClassVar[int]
    PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_MAX_FIELD_NUMBER: _ClassVar[int]
    DROPS_OLDEST_FIELD_NUMBER: _ClassVar[int]
    BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    DEAD_LETTERS_TO_FIELD_NUMBER: _ClassVar[int]
    subject: str
    group: str
    expires_after_s: int
    expired_die: bool
    per_second: int
    messages_max: int
    drops_oldest: bool
    bytes_max: int
    dead_letters_to: str
    def __init__(self, subject: _Optional[str] = ..., group: _Optional[str] = ..., expires_after_s: _Optional[int] = ..., expired_die: _Optional[bool] = ..., per_second: _Optional[int] = ..., messages_max: _Optional[int] = ..., drops_oldest: _Optional[bool] = ..., bytes_max: _Optional[int] = ..., dead_letters_to: _Optional[str] = ...) -> None: ...

class Offline(_message.Message):
    __slots__ = ("subject", "group", "consumer")
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    CONSUMER_FIELD_NUMBER: _ClassVar[int]
    subject: str
    group: str
    consumer: str
    def __init__(self, subject: _Optional[str] = ..., group: _Optional[str] = ..., consumer: _Optional[str] = ...) -> None: ...

class BrokerState(_message.Message):
    __slots__ = ("broker_group", "role", "term", "boot", "log_start", "log_end", "flushed_end", "matched_end", "high_watermark", "chain", "readonly_reasons", "hostname", "serve_port", "writable", "durability", "incarnation", "in_step", "acknowledged", "in_sync", "promised_term", "last_term", "last_boot", "incomplete", "fill_id", "clock_off_s", "instance", "lost_master", "parted", "quarantine_bytes", "quarantine_full", "known_term")
    BROKER_GROUP_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    BOOT_FIELD_NUMBER: _ClassVar[int]
    LOG_START_FIELD_NUMBER: _ClassVar[int]
    LOG_END_FIELD_NUMBER: _ClassVar[int]
    FLUSHED_END_FIELD_NUMBER: _ClassVar[int]
    MATCHED_END_FIELD_NUMBER: _ClassVar[int]
    HIGH_WATERMARK_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    READONLY_REASONS_FIELD_NUMBER: _ClassVar[int]
    HOSTNAME_FIELD_NUMBER: _ClassVar[int]
    SERVE_PORT_FIELD_NUMBER: _ClassVar[int]
    WRITABLE_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    IN_STEP_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_FIELD_NUMBER: _ClassVar[int]
    IN_SYNC_FIELD_NUMBER: _ClassVar[int]
    PROMISED_TERM_FIELD_NUMBER: _ClassVar[int]
    LAST_TERM_FIELD_NUMBER: _ClassVar[int]
    LAST_BOOT_FIELD_NUMBER: _ClassVar[int]
    INCOMPLETE_FIELD_NUMBER: _ClassVar[int]
    FILL_ID_FIELD_NUMBER: _ClassVar[int]
    CLOCK_OFF_S_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    LOST_MASTER_FIELD_NUMBER: _ClassVar[int]
    PARTED_FIELD_NUMBER: _ClassVar[int]
    QUARANTINE_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUARANTINE_FULL_FIELD_NUMBER: _ClassVar[int]
    KNOWN_TERM_FIELD_NUMBER: _ClassVar[int]
    broker_group: str
    role: int
    term: int
    boot: int
    log_start: int
    log_end: int
    flushed_end: int
    matched_end: int
    high_watermark: int
    chain: int
    readonly_reasons: _containers.RepeatedScalarFieldContainer[str]
    hostname: str
    serve_port: int
    writable: bool
    durability: str
    incarnation: str
    in_step: _containers.RepeatedScalarFieldContainer[str]
    acknowledged: AcknowledgedPoint
    in_sync: bool
    promised_term: int
    last_term: int
    last_boot: int
    incomplete: bool
    fill_id: str
    clock_off_s: int
    instance: str
    lost_master: bool
    parted: PartedTail
    quarantine_bytes: int
    quarantine_full: bool
    known_term: int
    def __init__(self, broker_group: _Optional[str] = ..., role: _Optional[int] = ..., term: _Optional[int] = ..., boot: _Optional[int] = ..., log_start: _Optional[int] = ..., log_end: _Optional[int] = ..., flushed_end: _Optional[int] = ..., matched_end: _Optional[int] = ..., high_watermark: _Optional[int] = ..., chain: _Optional[int] = ..., readonly_reasons: _Optional[_Iterable[str]] = ..., hostname: _Optional[str] = ..., serve_port: _Optional[int] = ..., writable: _Optional[bool] = ..., durability: _Optional[str] = ..., incarnation: _Optional[str] = ..., in_step: _Optional[_Iterable[str]] = ..., acknowledged: _Optional[_Union[AcknowledgedPoint, _Mapping]] = ..., in_sync: _Optional[bool] = ..., promised_term: _Optional[int] = ..., last_term: _Optional[int] = ..., last_boot: _Optional[int] = ..., incomplete: _Optional[bool] = ..., fill_id: _Optional[str] = ..., clock_off_s: _Optional[int] = ..., instance: _Optional[str] = ..., lost_master: _Optional[bool] = ..., parted: _Optional[_Union[PartedTail, _Mapping]] = ..., quarantine_bytes: _Optional[int] = ..., quarantine_full: _Optional[bool] = ..., known_term: _Optional[int] = ...) -> None: ...

class PartedTail(_message.Message):
    __slots__ = ("offset", "messages")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    offset: int
    messages: _containers.RepeatedCompositeFieldContainer[SequenceRange]
    def __init__(self, offset: _Optional[int] = ..., messages: _Optional[_Iterable[_Union[SequenceRange, _Mapping]]] = ...) -> None: ...

class SequenceRange(_message.Message):
    __slots__ = ("subject", "first", "last")
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    subject: str
    first: int
    last: int
    def __init__(self, subject: _Optional[str] = ..., first: _Optional[int] = ..., last: _Optional[int] = ...) -> None: ...

class RouteRequest(_message.Message):
    __slots__ = ("subjects", "app", "client_id", "produces", "held", "kind", "forgotten", "looks_only")
    class HeldEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    SUBJECTS_FIELD_NUMBER: _ClassVar[int]
    APP_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    PRODUCES_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    FORGOTTEN_FIELD_NUMBER: _ClassVar[int]
    LOOKS_ONLY_FIELD_NUMBER: _ClassVar[int]
    subjects: _containers.RepeatedScalarFieldContainer[str]
    app: str
    client_id: str
    produces: bool
    held: _containers.ScalarMap[str, int]
    kind: int
    forgotten: _containers.RepeatedScalarFieldContainer[str]
    looks_only: bool
    def __init__(self, subjects: _Optional[_Iterable[str]] = ..., app: _Optional[str] = ..., client_id: _Optional[str] = ..., produces: _Optional[bool] = ..., held: _Optional[_Mapping[str, int]] = ..., kind: _Optional[int] = ..., forgotten: _Optional[_Iterable[str]] = ..., looks_only: _Optional[bool] = ...) -> None: ...

class BrokerGroupRoute(_message.Message):
    __slots__ = ("broker_group", "master", "writable", "term")
    BROKER_GROUP_FIELD_NUMBER: _ClassVar[int]
    MASTER_FIELD_NUMBER: _ClassVar[int]
    WRITABLE_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    broker_group: str
    master: BrokerAddress
    writable: bool
    term: int
    def __init__(self, broker_group: _Optional[str] = ..., master: _Optional[_Union[BrokerAddress, _Mapping]] = ..., writable: _Optional[bool] = ..., term: _Optional[int] = ...) -> None: ...

class SubjectRoute(_message.Message):
    __slots__ = ("subject", "groups", "refused", "version", "refused_code")
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    REFUSED_CODE_FIELD_NUMBER: _ClassVar[int]
    subject: str
    groups: _containers.RepeatedCompositeFieldContainer[BrokerGroupRoute]
    refused: str
    version: int
    refused_code: str
    def __init__(self, subject: _Optional[str] = ..., groups: _Optional[_Iterable[_Union[BrokerGroupRoute, _Mapping]]] = ..., refused: _Optional[str] = ..., version: _Optional[int] = ..., refused_code: _Optional[str] = ...) -> None: ...

class RouteUpdate(_message.Message):
    __slots__ = ("version", "routes")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ROUTES_FIELD_NUMBER: _ClassVar[int]
    version: int
    routes: _containers.RepeatedCompositeFieldContainer[SubjectRoute]
    def __init__(self, version: _Optional[int] = ..., routes: _Optional[_Iterable[_Union[SubjectRoute, _Mapping]]] = ...) -> None: ...

class QuarantineRequest(_message.Message):
    __slots__ = ("cleared",)
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    cleared: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, cleared: _Optional[_Iterable[str]] = ...) -> None: ...

class QuarantineAnswer(_message.Message):
    __slots__ = ("parts", "bytes_max")
    PARTS_FIELD_NUMBER: _ClassVar[int]
    BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    parts: _containers.RepeatedCompositeFieldContainer[KeptPart]
    bytes_max: int
    def __init__(self, parts: _Optional[_Iterable[_Union[KeptPart, _Mapping]]] = ..., bytes_max: _Optional[int] = ...) -> None: ...

class KeptPart(_message.Message):
    __slots__ = ("name", "begin", "end", "why", "bytes", "messages", "evidence")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    name: str
    begin: int
    end: int
    why: str
    bytes: int
    messages: int
    evidence: bool
    def __init__(self, name: _Optional[str] = ..., begin: _Optional[int] = ..., end: _Optional[int] = ..., why: _Optional[str] = ..., bytes: _Optional[int] = ..., messages: _Optional[int] = ..., evidence: _Optional[bool] = ...) -> None: ...

class RateSample(_message.Message):
    __slots__ = ("at_ms", "taken", "delivered", "acked")
    AT_MS_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    DELIVERED_FIELD_NUMBER: _ClassVar[int]
    ACKED_FIELD_NUMBER: _ClassVar[int]
    at_ms: int
    taken: int
    delivered: int
    acked: int
    def __init__(self, at_ms: _Optional[int] = ..., taken: _Optional[int] = ..., delivered: _Optional[int] = ..., acked: _Optional[int] = ...) -> None: ...

class ProcessFigures(_message.Message):
    __slots__ = ("version", "memory_bytes", "cpu_seconds", "disk_free_bytes", "disk_bytes", "running_ms")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    CPU_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DISK_FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_FIELD_NUMBER: _ClassVar[int]
    RUNNING_MS_FIELD_NUMBER: _ClassVar[int]
    version: str
    memory_bytes: int
    cpu_seconds: float
    disk_free_bytes: int
    disk_bytes: int
    running_ms: int
    def __init__(self, version: _Optional[str] = ..., memory_bytes: _Optional[int] = ..., cpu_seconds: _Optional[float] = ..., disk_free_bytes: _Optional[int] = ..., disk_bytes: _Optional[int] = ..., running_ms: _Optional[int] = ...) -> None: ...

class RatesAnswer(_message.Message):
    __slots__ = ("samples", "process")
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    samples: _containers.RepeatedCompositeFieldContainer[RateSample]
    process: ProcessFigures
    def __init__(self, samples: _Optional[_Iterable[_Union[RateSample, _Mapping]]] = ..., process: _Optional[_Union[ProcessFigures, _Mapping]] = ...) -> None: ...

class SettingsAnswer(_message.Message):
    __slots__ = ("settings",)
    class SettingsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    settings: _containers.ScalarMap[str, str]
    def __init__(self, settings: _Optional[_Mapping[str, str]] = ...) -> None: ...

class DelayStatsRequest(_message.Message):
    __slots__ = ("subject", "begin_ms", "end_ms")
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    BEGIN_MS_FIELD_NUMBER: _ClassVar[int]
    END_MS_FIELD_NUMBER: _ClassVar[int]
    subject: str
    begin_ms: int
    end_ms: int
    def __init__(self, subject: _Optional[str] = ..., begin_ms: _Optional[int] = ..., end_ms: _Optional[int] = ...) -> None: ...

class HourCount(_message.Message):
    __slots__ = ("begin_ms", "messages")
    BEGIN_MS_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    begin_ms: int
    messages: int
    def __init__(self, begin_ms: _Optional[int] = ..., messages: _Optional[int] = ...) -> None: ...

class WaitingSubject(_message.Message):
    __slots__ = ("subject", "messages", "why", "age_ms")
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    subject: str
    messages: int
    why: str
    age_ms: int
    def __init__(self, subject: _Optional[str] = ..., messages: _Optional[int] = ..., why: _Optional[str] = ..., age_ms: _Optional[int] = ...) -> None: ...

class DelayStatsAnswer(_message.Message):
    __slots__ = ("pending_messages", "pending_bytes", "loaded_messages", "waiting_messages", "in_flight_messages", "in_flight", "next_due_ms", "clock_off_ms", "waiting", "hours", "due_messages", "due_age_ms")
    class InFlightEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    PENDING_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    PENDING_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOADED_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    WAITING_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    NEXT_DUE_MS_FIELD_NUMBER: _ClassVar[int]
    CLOCK_OFF_MS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    HOURS_FIELD_NUMBER: _ClassVar[int]
    DUE_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    DUE_AGE_MS_FIELD_NUMBER: _ClassVar[int]
    pending_messages: int
    pending_bytes: int
    loaded_messages: int
    waiting_messages: int
    in_flight_messages: int
    in_flight: _containers.ScalarMap[str, int]
    next_due_ms: int
    clock_off_ms: int
    waiting: _containers.RepeatedCompositeFieldContainer[WaitingSubject]
    hours: _containers.RepeatedCompositeFieldContainer[HourCount]
    due_messages: int
    due_age_ms: int
    def __init__(self, pending_messages: _Optional[int] = ..., pending_bytes: _Optional[int] = ..., loaded_messages: _Optional[int] = ..., waiting_messages: _Optional[int] = ..., in_flight_messages: _Optional[int] = ..., in_flight: _Optional[_Mapping[str, int]] = ..., next_due_ms: _Optional[int] = ..., clock_off_ms: _Optional[int] = ..., waiting: _Optional[_Iterable[_Union[WaitingSubject, _Mapping]]] = ..., hours: _Optional[_Iterable[_Union[HourCount, _Mapping]]] = ..., due_messages: _Optional[int] = ..., due_age_ms: _Optional[int] = ...) -> None: ...

class ListDelayedRequest(_message.Message):
    __slots__ = ("subject", "begin_ms", "end_ms", "messages_max", "after_due_ms", "after_number", "recurring")
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    BEGIN_MS_FIELD_NUMBER: _ClassVar[int]
    END_MS_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_MAX_FIELD_NUMBER: _ClassVar[int]
    AFTER_DUE_MS_FIELD_NUMBER: _ClassVar[int]
    AFTER_NUMBER_FIELD_NUMBER: _ClassVar[int]
    RECURRING_FIELD_NUMBER: _ClassVar[int]
    subject: str
    begin_ms: int
    end_ms: int
    messages_max: int
    after_due_ms: int
    after_number: int
    recurring: bool
    def __init__(self, subject: _Optional[str] = ..., begin_ms: _Optional[int] = ..., end_ms: _Optional[int] = ..., messages_max: _Optional[int] = ..., after_due_ms: _Optional[int] = ..., after_number: _Optional[int] = ..., recurring: _Optional[bool] = ...) -> None: ...

class DelayedMessage(_message.Message):
    __slots__ = ("subject", "id", "key", "due_ms", "created_ms", "number", "bytes", "problem", "schedule")
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    DUE_MS_FIELD_NUMBER: _ClassVar[int]
    CREATED_MS_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    subject: str
    id: str
    key: str
    due_ms: int
    created_ms: int
    number: int
    bytes: int
    problem: str
    schedule: RecurringSchedule
    def __init__(self, subject: _Optional[str] = ..., id: _Optional[str] = ..., key: _Optional[str] = ..., due_ms: _Optional[int] = ..., created_ms: _Optional[int] = ..., number: _Optional[int] = ..., bytes: _Optional[int] = ..., problem: _Optional[str] = ..., schedule: _Optional[_Union[RecurringSchedule, _Mapping]] = ...) -> None: ...

class RecurringSchedule(_message.Message):
    __slots__ = ("name", "owner", "cron", "timezone")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    CRON_FIELD_NUMBER: _ClassVar[int]
    TIMEZONE_FIELD_NUMBER: _ClassVar[int]
    name: str
    owner: str
    cron: str
    timezone: str
    def __init__(self, name: _Optional[str] = ..., owner: _Optional[str] = ..., cron: _Optional[str] = ..., timezone: _Optional[str] = ...) -> None: ...

class ListDelayedAnswer(_message.Message):
    __slots__ = ("messages", "more")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[DelayedMessage]
    more: bool
    def __init__(self, messages: _Optional[_Iterable[_Union[DelayedMessage, _Mapping]]] = ..., more: _Optional[bool] = ...) -> None: ...

class CancelDelayedRequest(_message.Message):
    __slots__ = ("subject", "ids", "keys", "due_ms")
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    DUE_MS_FIELD_NUMBER: _ClassVar[int]
    subject: str
    ids: _containers.RepeatedScalarFieldContainer[str]
    keys: _containers.RepeatedScalarFieldContainer[str]
    due_ms: int
    def __init__(self, subject: _Optional[str] = ..., ids: _Optional[_Iterable[str]] = ..., keys: _Optional[_Iterable[str]] = ..., due_ms: _Optional[int] = ...) -> None: ...

class CancelDelayedAnswer(_message.Message):
    __slots__ = ("ids", "keys")
    IDS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[str]
    keys: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, ids: _Optional[_Iterable[str]] = ..., keys: _Optional[_Iterable[str]] = ...) -> None: ...

class BrowseRequest(_message.Message):
    __slots__ = ("subject", "begin", "end", "since_ms", "until_ms", "newest_first", "id", "properties", "tags", "messages_max", "with_properties", "body_bytes_max", "body_begin")
    class PropertiesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    SINCE_MS_FIELD_NUMBER: _ClassVar[int]
    UNTIL_MS_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIRST_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    PROPERTIES_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_MAX_FIELD_NUMBER: _ClassVar[int]
    WITH_PROPERTIES_FIELD_NUMBER: _ClassVar[int]
    BODY_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    BODY_BEGIN_FIELD_NUMBER: _ClassVar[int]
    subject: str
    begin: int
    end: int
    since_ms: int
    until_ms: int
    newest_first: bool
    id: str
    properties: _containers.ScalarMap[str, str]
    tags: _containers.RepeatedScalarFieldContainer[str]
    messages_max: int
    with_properties: bool
    body_bytes_max: int
    body_begin: int
    def __init__(self, subject: _Optional[str] = ..., begin: _Optional[int] = ..., end: _Optional[int] = ..., since_ms: _Optional[int] = ..., until_ms: _Optional[int] = ..., newest_first: _Optional[bool] = ..., id: _Optional[str] = ..., properties: _Optional[_Mapping[str, str]] = ..., tags: _Optional[_Iterable[str]] = ..., messages_max: _Optional[int] = ..., with_properties: _Optional[bool] = ..., body_bytes_max: _Optional[int] = ..., body_begin: _Optional[int] = ...) -> None: ...

class BrowsedMessage(_message.Message):
    __slots__ = ("sequence", "offset", "stored_ms", "created_ms", "id", "tags", "stored_bytes", "properties", "problem", "body_bytes", "body")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    STORED_MS_FIELD_NUMBER: _ClassVar[int]
    CREATED_MS_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PROPERTIES_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    BODY_BYTES_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    offset: int
    stored_ms: int
    created_ms: int
    id: str
    tags: _containers.RepeatedScalarFieldContainer[str]
    stored_bytes: int
    properties: _containers.RepeatedCompositeFieldContainer[Property]
    problem: str
    body_bytes: int
    body: bytes
    def __init__(self, sequence: _Optional[int] = ..., offset: _Optional[int] = ..., stored_ms: _Optional[int] = ..., created_ms: _Optional[int] = ..., id: _Optional[str] = ..., tags: _Optional[_Iterable[str]] = ..., stored_bytes: _Optional[int] = ..., properties: _Optional[_Iterable[_Union[Property, _Mapping]]] = ..., problem: _Optional[str] = ..., body_bytes: _Optional[int] = ..., body: _Optional[bytes] = ...) -> None: ...

class Property(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: str
    def __init__(self, name: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...

class BrowseAnswer(_message.Message):
    __slots__ = ("messages", "begin", "end", "first_sequence", "end_sequence")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    FIRST_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    END_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[BrowsedMessage]
    begin: int
    end: int
    first_sequence: int
    end_sequence: int
    def __init__(self, messages: _Optional[_Iterable[_Union[BrowsedMessage, _Mapping]]] = ..., begin: _Optional[int] = ..., end: _Optional[int] = ..., first_sequence: _Optional[int] = ..., end_sequence: _Optional[int] = ...) -> None: ...

class MarkGroupsRequest(_message.Message):
    __slots__ = ("mark", "groups")
    MARK_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    mark: str
    groups: _containers.RepeatedCompositeFieldContainer[NewGroup]
    def __init__(self, mark: _Optional[str] = ..., groups: _Optional[_Iterable[_Union[NewGroup, _Mapping]]] = ...) -> None: ...

class MarkGroupsAnswer(_message.Message):
    __slots__ = ("known",)
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    known: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, known: _Optional[_Iterable[bool]] = ...) -> None: ...

class KnownGroup(_message.Message):
    __slots__ = ("subject", "group", "begin")
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    subject: str
    group: str
    begin: GroupBegin
    def __init__(self, subject: _Optional[str] = ..., group: _Optional[str] = ..., begin: _Optional[_Union[GroupBegin, _Mapping]] = ...) -> None: ...

class ConsumersRequest(_message.Message):
    __slots__ = ("subject", "group", "behind_max", "known", "unused_before_ms")
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    BEHIND_MAX_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    UNUSED_BEFORE_MS_FIELD_NUMBER: _ClassVar[int]
    subject: str
    group: str
    behind_max: int
    known: _containers.RepeatedCompositeFieldContainer[KnownGroup]
    unused_before_ms: int
    def __init__(self, subject: _Optional[str] = ..., group: _Optional[str] = ..., behind_max: _Optional[int] = ..., known: _Optional[_Iterable[_Union[KnownGroup, _Mapping]]] = ..., unused_before_ms: _Optional[int] = ...) -> None: ...

class ConsumerProgress(_message.Message):
    __slots__ = ("consumer", "connected", "unacked", "peer", "delivered")
    CONSUMER_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    UNACKED_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    DELIVERED_FIELD_NUMBER: _ClassVar[int]
    consumer: str
    connected: bool
    unacked: int
    peer: str
    delivered: int
    def __init__(self, consumer: _Optional[str] = ..., connected: _Optional[bool] = ..., unacked: _Optional[int] = ..., peer: _Optional[str] = ..., delivered: _Optional[int] = ...) -> None: ...

class GroupProgress(_message.Message):
    __slots__ = ("subject", "group", "first_sequence", "next_sequence", "position", "returned", "lag", "oldest_ms", "consumers", "causes", "dead_letters", "unused_since_ms", "first_unacked_ms")
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    FIRST_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    NEXT_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    RETURNED_FIELD_NUMBER: _ClassVar[int]
    LAG_FIELD_NUMBER: _ClassVar[int]
    OLDEST_MS_FIELD_NUMBER: _ClassVar[int]
    CONSUMERS_FIELD_NUMBER: _ClassVar[int]
    CAUSES_FIELD_NUMBER: _ClassVar[int]
    DEAD_LETTERS_FIELD_NUMBER: _ClassVar[int]
    UNUSED_SINCE_MS_FIELD_NUMBER: _ClassVar[int]
    FIRST_UNACKED_MS_FIELD_NUMBER: _ClassVar[int]
    subject: str
    group: str
    first_sequence: int
    next_sequence: int
    position: int
    returned: int
    lag: int
    oldest_ms: int
    consumers: _containers.RepeatedCompositeFieldContainer[ConsumerProgress]
    causes: _containers.RepeatedScalarFieldContainer[str]
    dead_letters: int
    unused_since_ms: int
    first_unacked_ms: int
    def __init__(self, subject: _Optional[str] = ..., group: _Optional[str] = ..., first_sequence: _Optional[int] = ..., next_sequence: _Optional[int] = ..., position: _Optional[int] = ..., returned: _Optional[int] = ..., lag: _Optional[int] = ..., oldest_ms: _Optional[int] = ..., consumers: _Optional[_Iterable[_Union[ConsumerProgress, _Mapping]]] = ..., causes: _Optional[_Iterable[str]] = ..., dead_letters: _Optional[int] = ..., unused_since_ms: _Optional[int] = ..., first_unacked_ms: _Optional[int] = ...) -> None: ...

class ConsumersAnswer(_message.Message):
    __slots__ = ("groups", "sums", "subject_bytes", "producers")
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    SUMS_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_BYTES_FIELD_NUMBER: _ClassVar[int]
    PRODUCERS_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedCompositeFieldContainer[GroupProgress]
    sums: GroupSums
    subject_bytes: int
    producers: _containers.RepeatedCompositeFieldContainer[ProducerProgress]
    def __init__(self, groups: _Optional[_Iterable[_Union[GroupProgress, _Mapping]]] = ..., sums: _Optional[_Union[GroupSums, _Mapping]] = ..., subject_bytes: _Optional[int] = ..., producers: _Optional[_Iterable[_Union[ProducerProgress, _Mapping]]] = ...) -> None: ...

class GroupSums(_message.Message):
    __slots__ = ("groups", "lag", "unacked", "dead_letters")
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    LAG_FIELD_NUMBER: _ClassVar[int]
    UNACKED_FIELD_NUMBER: _ClassVar[int]
    DEAD_LETTERS_FIELD_NUMBER: _ClassVar[int]
    groups: int
    lag: int
    unacked: int
    dead_letters: int
    def __init__(self, groups: _Optional[int] = ..., lag: _Optional[int] = ..., unacked: _Optional[int] = ..., dead_letters: _Optional[int] = ...) -> None: ...

class ProducerProgress(_message.Message):
    __slots__ = ("app", "peer", "messages")
    APP_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    app: str
    peer: str
    messages: int
    def __init__(self, app: _Optional[str] = ..., peer: _Optional[str] = ..., messages: _Optional[int] = ...) -> None: ...

class ResetOffsetRequest(_message.Message):
    __slots__ = ("subject", "group", "to", "value", "dry_run", "begin")
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    subject: str
    group: str
    to: str
    value: int
    dry_run: bool
    begin: GroupBegin
    def __init__(self, subject: _Optional[str] = ..., group: _Optional[str] = ..., to: _Optional[str] = ..., value: _Optional[int] = ..., dry_run: _Optional[bool] = ..., begin: _Optional[_Union[GroupBegin, _Mapping]] = ...) -> None: ...

class ResetOffsetAnswer(_message.Message):
    __slots__ = ("before", "after", "skipped", "repeated")
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    REPEATED_FIELD_NUMBER: _ClassVar[int]
    before: int
    after: int
    skipped: int
    repeated: int
    def __init__(self, before: _Optional[int] = ..., after: _Optional[int] = ..., skipped: _Optional[int] = ..., repeated: _Optional[int] = ...) -> None: ...

class Nothing(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PrepareFailoverRequest(_message.Message):
    __slots__ = ("term", "hold_ms", "silent_ms", "promised_term", "master_gone")
    TERM_FIELD_NUMBER: _ClassVar[int]
    HOLD_MS_FIELD_NUMBER: _ClassVar[int]
    SILENT_MS_FIELD_NUMBER: _ClassVar[int]
    PROMISED_TERM_FIELD_NUMBER: _ClassVar[int]
    MASTER_GONE_FIELD_NUMBER: _ClassVar[int]
    term: int
    hold_ms: int
    silent_ms: int
    promised_term: int
    master_gone: bool
    def __init__(self, term: _Optional[int] = ..., hold_ms: _Optional[int] = ..., silent_ms: _Optional[int] = ..., promised_term: _Optional[int] = ..., master_gone: _Optional[bool] = ...) -> None: ...

class PrepareSwapRequest(_message.Message):
    __slots__ = ("term", "hold_ms", "timeout_ms", "target", "promised_term")
    TERM_FIELD_NUMBER: _ClassVar[int]
    HOLD_MS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    PROMISED_TERM_FIELD_NUMBER: _ClassVar[int]
    term: int
    hold_ms: int
    timeout_ms: int
    target: str
    promised_term: int
    def __init__(self, term: _Optional[int] = ..., hold_ms: _Optional[int] = ..., timeout_ms: _Optional[int] = ..., target: _Optional[str] = ..., promised_term: _Optional[int] = ...) -> None: ...

class LogDescription(_message.Message):
    __slots__ = ("broker_group", "role", "term", "boot", "log_start", "log_end", "high_watermark", "start_chain", "segments", "damaged")
    BROKER_GROUP_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    BOOT_FIELD_NUMBER: _ClassVar[int]
    LOG_START_FIELD_NUMBER: _ClassVar[int]
    LOG_END_FIELD_NUMBER: _ClassVar[int]
    HIGH_WATERMARK_FIELD_NUMBER: _ClassVar[int]
    START_CHAIN_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_FIELD_NUMBER: _ClassVar[int]
    broker_group: str
    role: int
    term: int
    boot: int
    log_start: int
    log_end: int
    high_watermark: int
    start_chain: int
    segments: _containers.RepeatedScalarFieldContainer[int]
    damaged: _containers.RepeatedCompositeFieldContainer[DamagedRange]
    def __init__(self, broker_group: _Optional[str] = ..., role: _Optional[int] = ..., term: _Optional[int] = ..., boot: _Optional[int] = ..., log_start: _Optional[int] = ..., log_end: _Optional[int] = ..., high_watermark: _Optional[int] = ..., start_chain: _Optional[int] = ..., segments: _Optional[_Iterable[int]] = ..., damaged: _Optional[_Iterable[_Union[DamagedRange, _Mapping]]] = ...) -> None: ...

class DamagedRange(_message.Message):
    __slots__ = ("begin", "end", "reason")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    begin: int
    end: int
    reason: str
    def __init__(self, begin: _Optional[int] = ..., end: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class ReadLogRequest(_message.Message):
    __slots__ = ("begin", "end", "for_repair")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    FOR_REPAIR_FIELD_NUMBER: _ClassVar[int]
    begin: int
    end: int
    for_repair: bool
    def __init__(self, begin: _Optional[int] = ..., end: _Optional[int] = ..., for_repair: _Optional[bool] = ...) -> None: ...

class ReadDerivedRequest(_message.Message):
    __slots__ = ("base", "index_only")
    BASE_FIELD_NUMBER: _ClassVar[int]
    INDEX_ONLY_FIELD_NUMBER: _ClassVar[int]
    base: int
    index_only: bool
    def __init__(self, base: _Optional[int] = ..., index_only: _Optional[bool] = ...) -> None: ...

class DerivedPart(_message.Message):
    __slots__ = ("index", "snapshot")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    index: bytes
    snapshot: bytes
    def __init__(self, index: _Optional[bytes] = ..., snapshot: _Optional[bytes] = ...) -> None: ...

class LogChunk(_message.Message):
    __slots__ = ("offset", "data")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    offset: int
    data: bytes
    def __init__(self, offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...
