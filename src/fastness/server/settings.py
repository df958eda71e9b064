"""Settings of a server: from a TOML file, then the environment, then flags; later sources override earlier ones.

    port = 9440                     FASTNESS_PORT=9440              --port 9440
    [tls]
    cert = "server.pem"             FASTNESS_TLS_CERT=server.pem    --tls-cert server.pem

An unknown key is an error that names the nearest known one. Every error names the source of its value.
"""

import os
import re
import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

import msgspec
from msgspec import Meta

from fastness.encryption_keys import provider_of
from fastness.errors import InvalidArgument, PathUnusable
from fastness.limits import (
    AUDIT_KEEP_SECONDS,
    GC_EVERY_SECONDS,
    GC_GRACE_SECONDS,
    HISTORY_SECONDS,
    MAIL_TTL_SECONDS,
    MAIL_TTL_SECONDS_MAX,
    MAILBOX_MAILS_LIMIT_MAX,
    MAILBOX_MAILS_MAX,
    PUSHES_PER_MINUTE,
    PUSHES_PER_MINUTE_MAX,
    RELAY_AUTHENTICATE_SECONDS,
    RELAY_BURST,
    SETTING_BODY_BYTES_MAX,
    SETTING_BODY_BYTES_MIN,
    SETTING_COUNT_MAX,
    SETTING_HEADER_BYTES_MAX,
    SETTING_HEADER_BYTES_MIN,
    SETTING_KEEP_ALIVE_SECONDS_MAX,
    SETTING_METRICS_QUEUES_MAX,
    SETTING_SECONDS_MAX,
)
from fastness.names import UNIVERSE, checked_name
from fastness.plane.open import Options
from fastness.runtime.consumer_options import ConsumerOptions
from fastness.runtime.maintenance.space_options import SpaceOptions
from fastness.server.http.limits import HttpLimits
from fastness.server.mcp.options import LOCAL_AGENT, McpOptions
from fastness.server.sqs.options import REGION, SqsOptions
from fastness.wire.mail import MailPolicy

_PREFIX: Final = "FASTNESS_"
_FILE: Final = "FASTNESS_CONFIG"
# Variables of clients and CLI commands, which the server ignores.
_OTHERS: Final = (
    *(
        "CA",
        "CERT",
        "CONFIG",
        "CONTEXT",
        "DEBUG",
        "KEY",
        "LAKE",
        "LINEAGE",
        "LINEAGE_TOKEN",
        "TOKEN",
        "UNIVERSE",
        "URL",
    ),
)
_EXPORTED: Final = ("FENCE", "LEASE_", "QUEUE_", "STATE_")
_URL: Final = re.compile(r"https?://[^\s\"'<>?#,]+")
_REGION: Final = re.compile(r"[a-z0-9-]{1,32}", re.ASCII)
_WORDS: Final = {"on": True, "yes": True, "off": False, "no": False}

_Seconds = Annotated[float, Meta(gt=0, le=SETTING_SECONDS_MAX)]
_Number = Annotated[int, Meta(ge=1, le=SETTING_COUNT_MAX)]
_Mails = Annotated[int, Meta(ge=1, le=MAILBOX_MAILS_LIMIT_MAX)]
_MailTtl = Annotated[float, Meta(ge=1, le=MAIL_TTL_SECONDS_MAX)]
_Reserve = Annotated[int, Meta(ge=0, le=1 << 40)]
_History = Annotated[float, Meta(ge=0, le=HISTORY_SECONDS)]
_HeaderBytes = Annotated[int, Meta(ge=SETTING_HEADER_BYTES_MIN, le=SETTING_HEADER_BYTES_MAX)]
_BodyBytes = Annotated[int, Meta(ge=SETTING_BODY_BYTES_MIN, le=SETTING_BODY_BYTES_MAX)]
_StreamBytes = Annotated[int, Meta(ge=SETTING_BODY_BYTES_MIN)]
_KeepAliveSeconds = Annotated[int, Meta(ge=1, le=SETTING_KEEP_ALIVE_SECONDS_MAX)]
_SecondsOrZero = Annotated[float, Meta(ge=0, le=SETTING_SECONDS_MAX)]


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of a server."""

    data: str = "dir:./data"  # URL of the key space: dir:PATH, memory: or postgresql://…
    objects: str | None = None  # The object store for large values; default: inside the data directory.
    read_from: Literal["primary", "standby"] = "primary"  # standby: one of PostgreSQL serves reads that may be stale.
    activity: str | None = None  # The folder of session logs; default: inside the data directory.
    tiers: str | None = None  # The TOML file with the tier of each entity field.
    encryption_key_file: str | None = None  # The file with the master keys of encrypted universes.
    encryption_command: str | None = None  # The program that wraps and unwraps keys instead of the file.
    verify_blobs: Literal["always", "sampled", "never"] = "always"
    compact_every_seconds: _Seconds | None = None  # How often journals are compacted; default: never.
    gc_every_seconds: _SecondsOrZero = GC_EVERY_SECONDS  # How often unreferenced blobs are deleted; 0: never.
    gc_grace_seconds: _SecondsOrZero = GC_GRACE_SECONDS  # How long an unreferenced blob is kept.
    activity_keep_seconds: _Seconds | None = None  # How long rotated session logs are kept; default: for ever.
    activity_bytes_max: Annotated[int, Meta(ge=0)] | None = None  # Session logs of a universe; default: no limit.
    archived_keep_seconds: _Seconds | None = None  # How long an archived world is kept; default: for ever.
    archived_bytes_max: Annotated[int, Meta(ge=0)] | None = None  # Archived journals of a universe; default: no limit.
    dead_letter_bytes_max: Annotated[int, Meta(ge=0)] | None = None  # Dead letters of a universe; default: no limit.
    audit_keep_seconds: _SecondsOrZero = AUDIT_KEEP_SECONDS  # How long the audit log keeps an entry; 0: for ever.

    disk_reserve_bytes: _Reserve | None = None  # New data is refused while less is free; 0: never; default: a tenth.
    on_database_failure: Literal["reopen", "exit"] = "reopen"  # exit: with code 12, for a supervisor to restart it.

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65_535)] = 9440  # 0: any free port.
    tokens: bool = False
    tls_cert: str | None = None  # PEM file of the certificate, with its chain.
    tls_key: str | None = None
    tls_client_ca: str | None = None  # Requires client certificates of this authority.
    insecure: bool = False  # Allows tokens without TLS on a non-loopback address.

    drain_seconds: _SecondsOrZero = 10.0  # How long a shutdown waits for calls in flight.
    connections_max: _Number | None = None  # Open connections; default: 20,000, or fewer if ulimit -n is low.
    header_bytes_max: _HeaderBytes = 32_768  # Headers of one request, with its URL.
    header_seconds: _Seconds = 10.0  # How long headers may take to arrive.
    body_bytes_max: _BodyBytes = HttpLimits().body_bytes_max  # Body in memory.
    stream_bytes_max: _StreamBytes = HttpLimits().stream_bytes_max  # Body streamed into a blob.
    keep_alive_seconds: _KeepAliveSeconds = 75  # How long an idle connection stays open.

    queue_max_consumers: Annotated[int, Meta(ge=0, le=SETTING_COUNT_MAX)] = 0
    queue_poll_interval_seconds: _Seconds = 3.0
    queue_poll_jitter_seconds: _SecondsOrZero = 0.5
    queue_resilient_poll_interval_seconds: _SecondsOrZero = 300.0

    relay_host: str | None = None  # Host that agents sign; default: the address that they connected to.
    relay_registration: Literal["open", "closed"] | None = None  # Default: open on loopback without tokens.
    relay_rate_per_second: Annotated[float, Meta(ge=0, le=SETTING_COUNT_MAX)] | None = (
        None  # 0: no limit, as on loopback.
    )
    relay_burst: _Number = RELAY_BURST  # Mails that may exceed the rate at once.
    relay_authenticate_seconds: _Seconds = RELAY_AUTHENTICATE_SECONDS  # How long an agent may take to authenticate.

    mail_pending_max: _Mails = MAILBOX_MAILS_MAX  # Unconfirmed mails of a mailbox, in universes without a mail policy.
    mail_ttl_seconds: _MailTtl = MAIL_TTL_SECONDS  # How long mail is kept, in universes without a mail policy.

    ingress_agent: str | None = None  # Receives pushes that name no recipient.
    ingress_pushes_per_minute: Annotated[int, Meta(ge=0, le=PUSHES_PER_MINUTE_MAX)] = PUSHES_PER_MINUTE  # 0: no limit.

    mcp: bool | None = None  # Whether agents can use MCP at /mcp; default: if the package mcp is installed.
    mcp_agent: str = LOCAL_AGENT  # The name of every MCP client of a server without tokens.
    mcp_url: str | None = None  # The public URL of /mcp; default: made of the host that a client has called.
    mcp_authorization_servers: str | None = None  # URLs, separated by commas, that the metadata of /mcp names.

    sqs: bool | None = None  # Whether programs for SQS can use the queues at /sqs; default: if sqs_port is given.
    sqs_port: Annotated[int, Meta(ge=0, le=65_535)] | None = None  # A port for SQS besides /sqs; 0: any free port.
    sqs_anonymous: bool = False  # Accepts SQS requests with any access key or none, on a loopback address only.
    sqs_url: str | None = None  # The public URL of SQS; default: made of the host that a client has called.
    sqs_region: str = REGION  # In the names and signatures of SQS.
    sqs_universe: str = UNIVERSE  # Of SQS requests with sqs_anonymous. An access key has its own.
    sqs_key_file: str | None = None  # The key that encrypts the secrets of access keys; default: beside the data.

    log_format: Literal["json", "text"] = "text"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    history_seconds: _History = HISTORY_SECONDS  # How long samples for charts are kept; 0: none are.
    metrics_queues_max: Annotated[int, Meta(ge=0, le=SETTING_METRICS_QUEUES_MAX)] = 100  # Queues with depth metrics.
    pipeline_reports: str | None = None  # The folder of the pipeline's reports, shown in the console.
    pipeline_lake: str | None = None  # The folder of the lake: the console shows its runs, reports and live aggregates.
    metrics_worlds_max: Annotated[int, Meta(ge=0, le=SETTING_COUNT_MAX)] = 1_000  # Worlds in the compaction lag metric.

    @property
    def tls(self) -> bool:
        """Whether the server uses TLS."""
        return self.tls_cert is not None

    @property
    def options(self) -> Options:
        """The options to open the plane with."""
        return Options(
            objects=self.objects,
            activity=self.activity,
            read_from=self.read_from,
            tiers=self.tiers,
            sqs_key_file=self.sqs_key_file,
            encryption=provider_of(self.encryption_key_file, self.encryption_command),
            verify_blobs=self.verify_blobs,
            compact_every_seconds=self.compact_every_seconds,
            gc_every_seconds=self.gc_every_seconds or None,
            space=SpaceOptions(
                grace_seconds=self.gc_grace_seconds,
                log_keep_seconds=self.activity_keep_seconds,
                log_bytes_max=self.activity_bytes_max,
                archived_keep_seconds=self.archived_keep_seconds,
                archived_bytes_max=self.archived_bytes_max,
                dead_letter_bytes_max=self.dead_letter_bytes_max,
                audit_keep_seconds=self.audit_keep_seconds or None,
            ),
            consumers=ConsumerOptions(
                consumers_max=self.queue_max_consumers,
                poll_seconds=self.queue_poll_interval_seconds,
                poll_jitter_seconds=self.queue_poll_jitter_seconds,
                resilient_poll_seconds=self.queue_resilient_poll_interval_seconds,
            ),
            disk_reserve_bytes=self.disk_reserve_bytes,
            mail=MailPolicy(self.mail_pending_max, self.mail_ttl_seconds),
            pushes_per_minute=self.ingress_pushes_per_minute,
        )

    @property
    def http_limits(self) -> HttpLimits:
        """The limits of the HTTP API."""
        return HttpLimits(body_bytes_max=self.body_bytes_max, stream_bytes_max=self.stream_bytes_max)

    @property
    def mcp_options(self) -> McpOptions:
        """The options of `/mcp`."""
        servers = (self.mcp_authorization_servers or "").split(",")
        return McpOptions(
            enabled=self.mcp,
            agent=self.mcp_agent,
            url=self.mcp_url,
            authorization_servers=tuple(each.strip() for each in servers if each.strip()),
        )

    @property
    def sqs_options(self) -> SqsOptions:
        """The options of the SQS endpoint. A port of its own turns it on, too."""
        return SqsOptions(
            enabled=self.sqs_port is not None if self.sqs is None else self.sqs,
            port=self.sqs_port,
            anonymous=self.sqs_anonymous,
            url=self.sqs_url,
            region=self.sqs_region,
            universe=self.sqs_universe,
            key_file=self.sqs_key_file,
        )

    @classmethod
    def load(
        cls,
        flags: Mapping[str, Any] | None = None,
        *,
        file: str | os.PathLike[str] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Self:
        """The settings from a file (default: the one that FASTNESS_CONFIG names), the environment, and flags.

        Flags that are None are ignored.

        Raises:
            InvalidArgument: a key is unknown, or a value is invalid.
            PathUnusable: the file cannot be read.
        """
        environment = os.environ if environment is None else environment
        file = file or environment.get(_FILE) or None
        values: dict[str, Any] = {}
        for source in (_from_file(file), _from_environment(environment), _from_flags(flags or {})):
            values |= source
        return cls(**values)._checked()

    def _checked(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise InvalidArgument("tls_cert and tls_key must be given together; give both or neither")
        if self.tls_client_ca is not None and not self.tls:
            raise InvalidArgument("tls_client_ca needs tls_cert and tls_key; give them too")
        if not self.host:
            raise InvalidArgument("host is empty; give an address, such as 127.0.0.1")
        if self.ingress_agent is not None:
            agent, at, universe = self.ingress_agent.partition("@")
            checked_name("agent", agent)
            checked_name("universe", universe if at else UNIVERSE)
        checked_name("agent", self.mcp_agent)
        for name, urls in (("mcp_url", self.mcp_url), ("mcp_authorization_servers", self.mcp_authorization_servers)):
            for url in () if urls is None else urls.split(","):
                if not _URL.fullmatch(url.strip()):
                    raise InvalidArgument(f"{name} has {url[:200]!r}; give a URL such as https://fastness.example/mcp")
        self._check_sqs()
        return self

    def _check_sqs(self) -> None:
        checked_name("universe", self.sqs_universe)
        if self.sqs_url is not None and not _URL.fullmatch(self.sqs_url):
            raise InvalidArgument(
                f"sqs_url has {self.sqs_url[:200]!r}; give a URL such as https://fastness.example/sqs"
            )
        if not _REGION.fullmatch(self.sqs_region):
            raise InvalidArgument(f"sqs_region has {self.sqs_region[:200]!r}; give a region such as {REGION}")
        # The key file is needed for `fastness token create --sqs`, too.
        if not self.sqs_options.enabled and self.sqs_options != SqsOptions(key_file=self.sqs_key_file):
            raise InvalidArgument("The settings of SQS have no effect while it is off; give --sqs or --sqs-port, too")


_TYPES: Final = {field.name: field.type for field in msgspec.structs.fields(Settings)}


def _from_file(file: str | os.PathLike[str] | None) -> dict[str, Any]:
    if file is None:
        return {}
    try:
        given = _flatten(tomllib.loads(Path(file).read_text()), "")
    except (OSError, UnicodeDecodeError) as error:
        raise PathUnusable(f"The settings file {file} cannot be read ({error}); name a TOML file") from error
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InvalidArgument(f"{file} is not valid TOML ({error}); correct it") from None
    return {key: _convert(key, value, f"{file}", strict=True) for key, value in given.items()}


def _flatten(table: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Nested tables as prefixed keys: `cert` of `[tls]` becomes `tls_cert`."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        name = prefix + key.replace("-", "_")
        flat |= _flatten(value, f"{name}_") if isinstance(value, dict) else {name: value}
    return flat


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    values = {}
    for variable, text in environment.items():
        key = variable.removeprefix(_PREFIX).lower()
        if not variable.startswith(_PREFIX) or not text or _is_of_other_program(key):
            continue
        values[key] = _convert(key, text, f"the environment ({variable})", strict=False)
    return values


def _is_of_other_program(key: str) -> bool:
    if key in _TYPES:
        return False
    if key.upper() in _OTHERS:
        return True
    # Variables that `queue get` exports share prefixes with settings; one that resembles a setting is a typo.
    return key.upper().startswith(_EXPORTED) and not get_close_matches(key, _TYPES, n=1, cutoff=0.8)


def _from_flags(flags: Mapping[str, Any]) -> dict[str, Any]:
    values = {}
    for flag, value in flags.items():
        key = flag.lstrip("-").replace("-", "_")
        if value is not None:
            values[key] = _convert(key, value, f"the flags (--{key.replace('_', '-')})", strict=False)
    return values


def _convert(key: str, value: Any, source: str, *, strict: bool) -> Any:
    if key not in _TYPES:
        near = get_close_matches(key, _TYPES, n=1, cutoff=0.3) or ["one of " + ", ".join(_TYPES)]
        raise InvalidArgument(f"Unknown setting {key} from {source}; did you mean {near[0]}?")
    kind = _TYPES[key]
    if kind in (bool, bool | None) and isinstance(value, str) and not strict:
        value = _WORDS.get(value.lower(), value)
    try:
        return msgspec.convert(value, kind, strict=strict)
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"Invalid {key}={value!r} from {source}: {error}") from None
