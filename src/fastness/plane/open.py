"""Opens a plane by its URL.

memory:             nothing is stored on disk
dir:PATH            one machine: key space in PATH/kv, objects in PATH/objects, session logs in PATH/activity
postgresql://...    a PostgreSQL database that several nodes share
"""

import asyncio
import logging
import os
import shlex
import stat
import threading
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal

import msgspec

from fastness.access_keys import secrets_of
from fastness.backends.memory import MemoryDatabase
from fastness.backends.objects import open_objects
from fastness.backends.objects.encrypted import encrypted
from fastness.backends.rocksdb import RocksDatabase
from fastness.clock import Clock, IdSource
from fastness.encryption_keys import KeyProvider
from fastness.errors import InvalidArgument, InvalidUrl, PathUnusable, Unsupported
from fastness.extras import how_to_install
from fastness.folders import make_folder, sync_folder
from fastness.kv import Database, Transaction, formats
from fastness.kv.formats import FORMAT, OLDEST_FORMAT
from fastness.kv.serial_database import SerialDatabase
from fastness.kv.value_cipher import ValueCipher
from fastness.layers import lineages
from fastness.layers.blobs import Verify
from fastness.layers.migrations import check_complete
from fastness.limits import (
    COMPACT_DELETED_SECONDS,
    GC_EVERY_SECONDS,
    PUSHES_PER_MINUTE,
    PUSHES_PER_MINUTE_MAX,
)
from fastness.names import folder_at
from fastness.plane.audit import Caller
from fastness.plane.audited import AsyncAuditedTransport, AuditedTransport
from fastness.plane.embedded import AsyncEmbeddedTransport, EmbeddedTransport
from fastness.plane.formats import MARKER, check_exists, check_used
from fastness.plane.services import Services
from fastness.private_files import open_private, readable_by_others
from fastness.runtime.consumer_options import ConsumerOptions
from fastness.runtime.maintenance.compaction_loop import world_compaction
from fastness.runtime.maintenance.disk_space import DiskSpaceMonitor, check_reserve
from fastness.runtime.maintenance.space_loop import SpaceLoop
from fastness.runtime.maintenance.space_options import SpaceOptions, check_options
from fastness.runtime.maintenance.table_compaction import Compactable, table_compaction
from fastness.runtime.sync.blobs import BlobStore
from fastness.runtime.sync.worlds import WorldStore
from fastness.tiers import TierPolicy
from fastness.wire.mail import MailPolicy

_log = logging.getLogger("fastness.open")

_KNOWN: Final = "memory:, dir:PATH or postgresql://user@host/database"


class _Marker(msgspec.Struct):
    """The content of `fastness.json`."""

    format: int


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a plane."""

    create: bool = True  # Whether to create a plane that does not exist.
    caller: Caller | None = None  # Whose audited requests are recorded; None: no one's, as a server does it itself.
    objects: str | None = None  # The object store for large values.
    activity: str | None = None  # The folder of session logs.
    tiers: TierPolicy | str | os.PathLike[str] | None = None  # A policy, or the path of a TOML file.
    verify_blobs: str = Verify.ALWAYS
    compact_every_seconds: float | None = None
    clock: Clock | None = None
    ids: IdSource | None = None
    consumers: ConsumerOptions | None = None  # How long and how many consumers may wait.
    disk_reserve_bytes: int | None = None  # New data is refused while less is free; None: a tenth; 0: never.
    gc_every_seconds: float | None = GC_EVERY_SECONDS  # How often unreferenced blobs are deleted; None: never.
    space: SpaceOptions = SpaceOptions()  # How long data is kept that nothing needs any more.
    read_from: str = "primary"  # "standby": a standby of PostgreSQL serves requests with `Operation.stale`.
    mail: MailPolicy = MailPolicy()  # The mail policy of universes that have none of their own.
    pushes_per_minute: int = PUSHES_PER_MINUTE  # Limit for one peer's `agent.data.push`; 0: no limit.
    sqs_key_file: str | None = None  # Encrypts the secrets of access keys. None: as in `fastness.access_keys`.
    encryption: KeyProvider | None = None  # Master keys of encrypted universes. None: those that the environment names.


def open_plane(url: str, options: Options) -> EmbeddedTransport:
    """Open the plane at `url` in this process.

    Raises:
        InvalidUrl: `url` does not name a backend.
        NotFound: there is no plane, and `options.create` is False.
        PathUnusable, DirectoryInUse, DamagedDatabase, SchemaMismatch: the data directory cannot be opened.
        Unreachable: PostgreSQL does not answer.
        MigrationUnfinished: it is the target of an incomplete migration.
    """
    verify = _verify(options.verify_blobs)
    services = _open(url, options)
    if options.caller is not None:
        return AuditedTransport(services, options.caller, verify=verify)
    return EmbeddedTransport(services, verify=verify)


async def open_plane_async(url: str, options: Options) -> AsyncEmbeddedTransport:
    """`open_plane` for an event loop."""
    verify = _verify(options.verify_blobs)
    opened: list[Services] = []
    cancelled = threading.Event()
    closing = threading.Lock()

    def close_if_cancelled() -> None:
        # Called by the thread and by the caller: a thread cannot be cancelled, and may finish just before its caller
        # is.
        if cancelled.is_set() and opened and closing.acquire(blocking=False):
            opened[0].stop()

    def opening() -> Services:
        opened.append(_open(url, options))
        close_if_cancelled()
        return opened[0]

    try:
        services = await asyncio.to_thread(opening)
    except asyncio.CancelledError:
        cancelled.set()
        close_if_cancelled()
        raise
    if options.caller is not None:
        return AsyncAuditedTransport(services, options.caller, verify=verify)
    return AsyncEmbeddedTransport(services, verify=verify)


def open_database(
    url: str,
    *,
    clock: Clock | None = None,
    ids: IdSource | None = None,
    create: bool = True,
    read_from: Literal["primary", "standby"] = "primary",
    encryption: KeyProvider | None = None,
) -> Database:
    """Open the key space at `url`; raises NotFound if it does not exist and `create` is False."""
    cipher = None if encryption is None else ValueCipher(encryption)
    if not isinstance(url, str):
        hint = f'"dir:{url}"' if isinstance(url, os.PathLike) else _KNOWN
        raise InvalidUrl(f"A URL is text, not {type(url).__name__}; write {hint}")
    scheme, colon, rest = url.partition(":")
    if url == "memory:":
        return MemoryDatabase(clock=clock, ids=ids)
    if scheme == "dir" and rest:
        directory = folder_at(rest)
        if not create:
            check_exists(directory)
        return _open_directory(directory, clock, ids, cipher)
    if scheme in ("postgresql", "postgres") and rest.startswith("//"):
        return _open_postgres(url, clock, ids, cipher, create=create, read_from=read_from)
    if scheme in ("http", "https"):
        address = f"{scheme}://HOST:PORT" if "@" in url else url  # Without the password.
        raise InvalidUrl(f'{address} is the address of a server; connect to it with fastness.connect("{address}")')
    if rest.isdigit():
        raise InvalidUrl(f"{url!r} has no scheme; for a server write http://{url}")
    if not colon:
        raise InvalidUrl(f"{url!r} does not name a backend; for a folder write dir:{url}")
    raise InvalidUrl(f"{scheme!r} is not a known backend; write {_KNOWN}")  # The rest may contain a password.


def _check_rate(per_minute: object) -> None:
    if not isinstance(per_minute, int) or not 0 <= per_minute <= PUSHES_PER_MINUTE_MAX:
        raise InvalidArgument(
            f"ingress_pushes_per_minute is {per_minute!r}; give 0 (no limit) to {PUSHES_PER_MINUTE_MAX}"
        )


def _verify(word: str) -> Verify:
    if word not in list(Verify):
        raise InvalidArgument(f"verify_blobs is {word!r}; choose always, sampled or never")
    return Verify(word)


def object_store_url(url: str) -> str | None:
    """The default object store of a plane; None for PostgreSQL, where the nodes share no folder."""
    scheme, _, rest = url.partition(":")
    if scheme == "dir":
        return f"dir:{folder_at(rest) / 'objects'}"
    return url if url == "memory:" else None


def _open(url: str, options: Options) -> Services:
    every_seconds = options.compact_every_seconds
    if every_seconds is not None and not every_seconds > 0:
        raise InvalidArgument(f"compact_every_seconds is {every_seconds}; give a positive number, or None for never")
    if (options.disk_reserve_bytes or 0) < 0:
        raise InvalidArgument(
            f"disk_reserve_bytes is {options.disk_reserve_bytes}; give a number of bytes, or 0 for none"
        )
    gc_every_seconds = options.gc_every_seconds
    if gc_every_seconds is not None and not gc_every_seconds > 0:
        raise InvalidArgument(f"gc_every_seconds is {gc_every_seconds}; give a positive number, or None for never")
    _check_rate(options.pushes_per_minute)
    check_options(options.space)
    policy = _policy(options.tiers)
    database = open_database(
        url,
        clock=options.clock,
        ids=options.ids,
        create=options.create,
        read_from=_checked_read_from(url, options.read_from),
        encryption=options.encryption,
    )
    database.defaults = {MailPolicy: options.mail}
    try:
        if url.startswith("dir:") and options.disk_reserve_bytes:
            check_reserve(folder_at(url.removeprefix("dir:")), options.disk_reserve_bytes)
        database.read(check_complete)
        shared = not isinstance(database, SerialDatabase)
        _check_format_of(database, shared=shared)
        if database.read(lineages.load) is None:
            database.transact(_initialize)
            _check_format_of(database, shared=shared)  # A node of another version may have created it meanwhile.
        place = options.objects or object_store_url(url)
        services = Services(
            database,
            encrypted(open_objects(place), database) if place else None,
            clock=options.clock,
            policy=policy,
            logs=_logs(url, options.activity),
            consumers=options.consumers,
            shared=shared,
            pushes_per_minute=options.pushes_per_minute,
            space=options.space,
            access_keys=secrets_of(url, options.sqs_key_file),
        )
    except BaseException:
        database.close()
        raise
    try:
        services.quotas.start()
    except BaseException:
        services.stop()
        raise
    _add_jobs(services, url, place, options)
    return services


def _add_jobs(services: Services, url: str, objects_url: str | None, options: Options) -> None:
    """Start the background work that does not wait for a first commit."""
    database = services.database
    if services.shared and options.clock is None:
        services.start_heartbeat()
    if url != "memory:":  # Queues, mailboxes and worlds may have due entries from before.
        services.start_checks()
    if url.startswith("dir:") and options.disk_reserve_bytes != 0:
        folder = folder_at(url.removeprefix("dir:"))
        objects = (
            folder_at(objects_url.removeprefix("dir:")) if objects_url and objects_url.startswith("dir:") else None
        )
        services.disk_space = DiskSpaceMonitor(
            database, folder, reserve_bytes=options.disk_reserve_bytes, objects=objects
        )
        services.background.add(services.disk_space.job)
    if isinstance(database, Compactable) and options.clock is None:
        services.background.add(table_compaction(database, COMPACT_DELETED_SECONDS))
    store = WorldStore(database, services.objects, BlobStore(database, services.objects))
    if options.compact_every_seconds is not None:
        services.background.add(world_compaction(database, store, options.compact_every_seconds))
    if options.gc_every_seconds is not None and url != "memory:" and options.clock is None:
        space = SpaceLoop(
            database,
            services.objects,
            options.space,
            options.gc_every_seconds,
            worlds=store,
            counters=services.space_counters,
        )
        services.background.add(space.job)


def _checked_read_from(url: str, given: str) -> Literal["primary", "standby"]:
    if given == "primary":
        return "primary"
    if given != "standby":
        raise InvalidArgument(f"read_from is {given!r}; choose primary or standby")
    if not url.startswith(("postgresql:", "postgres:")):
        raise InvalidArgument("Only PostgreSQL has standbys; leave out read_from, or give a postgresql:// URL")
    return "standby"


def _policy(tiers: TierPolicy | str | os.PathLike[str] | None) -> TierPolicy | None:
    if tiers is None or isinstance(tiers, TierPolicy):
        return tiers
    try:
        return TierPolicy.from_toml(Path(tiers).read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise PathUnusable(f"The tier policy {tiers} cannot be read ({error}); name a TOML file") from error


def _logs(url: str, folder: str | None) -> Path | None:
    """The folder of session logs before they are rotated to the object store; None: a temporary folder."""
    scheme, _, rest = url.partition(":")
    if folder is not None:
        return folder_at(folder.removeprefix("dir:"))
    if scheme == "dir":
        return folder_at(rest) / "activity"
    if url == "memory:":
        return None
    # Processes can share this folder, since each file has one writer.
    return folder_at(os.environ.get("XDG_STATE_HOME") or "~/.local/state") / "fastness" / "activity"


def _open_postgres(
    url: str,
    clock: Clock | None,
    ids: IdSource | None,
    cipher: ValueCipher | None,
    *,
    create: bool,
    read_from: Literal["primary", "standby"],
) -> Database:
    try:
        from fastness.backends.postgres import PostgresDatabase
    except ImportError as error:
        raise Unsupported(f"PostgreSQL needs its driver; {how_to_install('postgres')}") from error
    return PostgresDatabase(url, clock=clock, ids=ids, create=create, read_from=read_from, cipher=cipher)


def _warn_of_other_readers(directory: Path) -> None:
    """Log one warning if other users can access the directory. It is not changed: it may be shared on purpose."""
    with suppress(OSError):
        found = list(readable_by_others(directory, depth_max=1))
        if found:
            names = ", ".join(path.name for path in found[1:]) or "nothing in it"
            _log.warning(
                "other users can access the data directory %s (mode %04o; also: %s); run: fastness doctor --fix %s",
                directory,
                stat.S_IMODE(directory.stat().st_mode),
                names,
                shlex.quote(str(directory)),
            )


def _open_directory(directory: Path, clock: Clock | None, ids: IdSource | None, cipher: ValueCipher | None) -> Database:
    """Open or create the key space of a data directory. The marker is written last: a folder with it has been used."""
    marker = directory / MARKER
    try:
        make_folder(directory)
        is_new = not marker.exists()
        if is_new:
            sync_folder(directory.parent)  # A process may have ended between creating the directory and syncing it.
        else:
            _check_format(directory, marker)
            check_used(directory)
            _warn_of_other_readers(directory)
        database = RocksDatabase(directory / "kv", clock=clock, ids=ids, cipher=cipher)
        if is_new:
            try:
                sync_folder(directory)  # The marker must not outlive the key space in a power loss.
                _write_marker(directory, marker)
            except BaseException:
                database.close()
                raise
        return database
    except OSError as error:
        raise PathUnusable(f"{directory} cannot be used ({error.strerror}); choose a folder you can write") from error
    except ValueError as error:  # The path has a null byte, or is not text.
        raise PathUnusable(f"{str(directory)!r} cannot be used ({error}); choose a folder you can write") from error


def _check_format_of(database: Database, *, shared: bool) -> None:
    """Refuse a plane in a format that this version does not write. Nodes that share one write the format it has."""
    found = database.read(formats.format_of)
    formats.check_supported("The plane", found, oldest=OLDEST_FORMAT if shared else FORMAT)
    database.data_format = found


def _initialize(tx: Transaction) -> None:
    lineages.ensure(tx)
    if tx.get(formats.KEY) is None:
        formats.record(tx)


def _write_marker(directory: Path, marker: Path) -> None:
    draft = directory / f".{MARKER}.{os.getpid()}"
    with open(draft, "wb", opener=open_private) as file:
        file.write(msgspec.json.encode(_Marker(FORMAT)))
        file.flush()
        os.fsync(file.fileno())
    draft.replace(marker)
    sync_folder(directory)


def _check_format(directory: Path, marker: Path) -> None:
    """Refuse a directory in another format."""
    try:
        found = msgspec.json.decode(marker.read_bytes(), type=_Marker).format
    except (ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise PathUnusable(
            f"{marker} is not a Fastness file ({error}); choose another folder, or restore it"
        ) from error
    formats.check_supported(str(directory), found)
