from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class BrokerIdentity(_message.Message):
    __slots__ = ("broker_group", "hostname", "ip", "serve_port", "sync_port", "control_port", "metrics_port", "incarnation", "version")
    BROKER_GROUP_FIELD_NUMBER: _ClassVar[int]
    HOSTNAME_FIELD_NUMBER: _ClassVar[int]
    IP_FIELD_NUMBER: _ClassVar[int]
    SERVE_PORT_FIELD_NUMBER: _ClassVar[int]
    SYNC_PORT_FIELD_NUMBER: _ClassVar[int]
    CONTROL_PORT_FIELD_NUMBER: _ClassVar[int]
    METRICS_PORT_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    broker_group: str
    hostname: str
    ip: str
    serve_port: int
    sync_port: int
    control_port: int
    metrics_port: int
    incarnation: str
    version: str
    def __init__(self, broker_group: _Optional[str] = ..., hostname: _Optional[str] = ..., ip: _Optional[str] = ..., serve_port: _Optional[int] = ..., sync_port: _Optional[int] = ..., control_port: _Optional[int] = ..., metrics_port: _Optional[int] = ..., incarnation: _Optional[str] = ..., version: _Optional[str] = ...) -> None: ...

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
    __slots__ = ("broker_group", "term", "role", "master", "slave", "readonly_subjects")
    BROKER_GROUP_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    MASTER_FIELD_NUMBER: _ClassVar[int]
    SLAVE_FIELD_NUMBER: _ClassVar[int]
    READONLY_SUBJECTS_FIELD_NUMBER: _ClassVar[int]
    broker_group: str
    term: int
    role: int
    master: BrokerAddress
    slave: BrokerAddress
    readonly_subjects: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, broker_group: _Optional[str] = ..., term: _Optional[int] = ..., role: _Optional[int] = ..., master: _Optional[_Union[BrokerAddress, _Mapping]] = ..., slave: _Optional[_Union[BrokerAddress, _Mapping]] = ..., readonly_subjects: _Optional[_Iterable[str]] = ...) -> None: ...

class BrokerState(_message.Message):
    __slots__ = ("broker_group", "role", "term", "boot", "log_start", "log_end", "flushed_end", "matched_end", "high_watermark", "chain", "readonly_reasons", "hostname", "serve_port", "writable", "durability", "incarnation")
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
    def __init__(self, broker_group: _Optional[str] = ..., role: _Optional[int] = ..., term: _Optional[int] = ..., boot: _Optional[int] = ..., log_start: _Optional[int] = ..., log_end: _Optional[int] = ..., flushed_end: _Optional[int] = ..., matched_end: _Optional[int] = ..., high_watermark: _Optional[int] = ..., chain: _Optional[int] = ..., readonly_reasons: _Optional[_Iterable[str]] = ..., hostname: _Optional[str] = ..., serve_port: _Optional[int] = ..., writable: _Optional[bool] = ..., durability: _Optional[str] = ..., incarnation: _Optional[str] = ...) -> None: ...

class RouteRequest(_message.Message):
    __slots__ = ("subjects", "app", "client_id", "produces")
    SUBJECTS_FIELD_NUMBER: _ClassVar[int]
    APP_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    PRODUCES_FIELD_NUMBER: _ClassVar[int]
    subjects: _containers.RepeatedScalarFieldContainer[str]
    app: str
    client_id: str
    produces: bool
    def __init__(self, subjects: _Optional[_Iterable[str]] = ..., app: _Optional[str] = ..., client_id: _Optional[str] = ..., produces: _Optional[bool] = ...) -> None: ...

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
    __slots__ = ("subject", "groups", "refused")
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    subject: str
    groups: _containers.RepeatedCompositeFieldContainer[BrokerGroupRoute]
    refused: str
    def __init__(self, subject: _Optional[str] = ..., groups: _Optional[_Iterable[_Union[BrokerGroupRoute, _Mapping]]] = ..., refused: _Optional[str] = ...) -> None: ...

class RouteUpdate(_message.Message):
    __slots__ = ("version", "routes")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ROUTES_FIELD_NUMBER: _ClassVar[int]
    version: int
    routes: _containers.RepeatedCompositeFieldContainer[SubjectRoute]
    def __init__(self, version: _Optional[int] = ..., routes: _Optional[_Iterable[_Union[SubjectRoute, _Mapping]]] = ...) -> None: ...

class Nothing(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PrepareSwapRequest(_message.Message):
    __slots__ = ("term", "hold_ms", "timeout_ms")
    TERM_FIELD_NUMBER: _ClassVar[int]
    HOLD_MS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    term: int
    hold_ms: int
    timeout_ms: int
    def __init__(self, term: _Optional[int] = ..., hold_ms: _Optional[int] = ..., timeout_ms: _Optional[int] = ...) -> None: ...

class LogDescription(_message.Message):
    __slots__ = ("broker_group", "role", "term", "boot", "log_start", "log_end", "high_watermark", "start_chain", "segments")
    BROKER_GROUP_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    BOOT_FIELD_NUMBER: _ClassVar[int]
    LOG_START_FIELD_NUMBER: _ClassVar[int]
    LOG_END_FIELD_NUMBER: _ClassVar[int]
    HIGH_WATERMARK_FIELD_NUMBER: _ClassVar[int]
    START_CHAIN_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    broker_group: str
    role: int
    term: int
    boot: int
    log_start: int
    log_end: int
    high_watermark: int
    start_chain: int
    segments: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, broker_group: _Optional[str] = ..., role: _Optional[int] = ..., term: _Optional[int] = ..., boot: _Optional[int] = ..., log_start: _Optional[int] = ..., log_end: _Optional[int] = ..., high_watermark: _Optional[int] = ..., start_chain: _Optional[int] = ..., segments: _Optional[_Iterable[int]] = ...) -> None: ...

class ReadLogRequest(_message.Message):
    __slots__ = ("begin", "end")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    begin: int
    end: int
    def __init__(self, begin: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class LogChunk(_message.Message):
    __slots__ = ("offset", "data")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    offset: int
    data: bytes
    def __init__(self, offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...
