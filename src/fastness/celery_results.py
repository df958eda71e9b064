"""Result backend of Celery: states, results, groups and chords of tasks, in a collection of a plane.

    app = Celery("shop", broker="sqs://…", backend="fastness://127.0.0.1:9440/main")

The rows of the collection "celery" are spread over a few partitions by a hash of Celery's key:

    (key,)                 the state and result of a task, or a saved group; it expires after `result_expires`
    (key, "count")         of a chord: how many parts have returned, which one was the last, whether the body was sent
    (key, "part", task)    of a chord: the part has returned

A value is `=` and its bytes, or `#` and the hash of the blob that has it.

A part and the count are one commit, so a part that runs again, because its worker was killed before it acknowledged
the message, is not counted twice. If it was the last one and the body was not sent, it sends it.
"""

import atexit
import json
import os
import random
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit, urlunsplit
from weakref import WeakSet
from zlib import crc32

import fastness
from fastness import ChangedRow, ChangedRows, DeleteRow, DeleteRows, KnownRow, Plane, PutRow, Row
from fastness.errors import Conflict, FastnessError, RetryAdvice, UnreadableValue, VersionConflict
from fastness.extras import how_to_install
from fastness.limits import (
    CELERY_CHORD_DONE_SECONDS,
    CELERY_CHORD_SEND_SECONDS,
    CELERY_GATHER_SECONDS_MAX,
    CELERY_WAIT_SECONDS,
    COLLECTION_ROWS_MAX,
    COLLECTION_TTL_SECONDS_MAX,
    COLLECTION_VALUE_BYTES_MAX,
    SESSION_ATTEMPTS_MAX,
    SESSION_BACK_OFF_SECONDS_MAX,
    SESSION_INLINE_BYTES_MAX,
)
from fastness.plane_access import PlaneAccess, access_to, decoded

try:
    from celery import states
    from celery.backends.base import KeyValueStoreBackend
    from celery.exceptions import ImproperlyConfigured
    from celery.exceptions import TimeoutError as ResultTimeout
    from kombu.utils.url import maybe_sanitize_url
except ImportError as error:
    message = f"Celery is not installed; {how_to_install('celery')}"
    raise ImportError(message) from error

_COLLECTION: Final = "celery"
_PARTITIONS: Final = 16  # Writers of different processes wait for each other in one partition. Readers read them all.
_INLINE: Final = b"="
_BLOB: Final = b"#"
_COUNT: Final = "count"
_PART: Final = "part"
_PICKLED: Final = "application/x-python-serialize"
_EXPIRY_SLACK: Final = 0.01  # An expiry that differs by less than this share of its time is not written again.
_OPTIONS: Final = ("universe", "token", "collection", "patience_seconds", "objects")


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


class _Opened(NamedTuple):
    """The plane of this process, and its rows."""

    plane: Plane
    access: PlaneAccess
    rows: fastness.Collection


class FastnessBackend(KeyValueStoreBackend):  # type: ignore[misc]  # Celery has no types.
    """Keeps results of Celery in a plane. `result_backend` is one of

    - `fastness://[:TOKEN@]HOST:PORT[/UNIVERSE]`, or `fastness+https://…`: a server,
    - `fastness+postgresql://…`: a plane on PostgreSQL, which every process opens,
    - `fastness+dir:///PATH` or `fastness+memory://`: a plane of this process, for one process with threads,
    - `fastness`: what FASTNESS_URL, FASTNESS_TOKEN and FASTNESS_UNIVERSE say.

    Options are in the query of the URL or in `result_backend_transport_options`: `universe`, `token`, `collection`,
    `patience_seconds`, `objects`; and `tls`, an `ssl.SSLContext`, in the latter only.
    """

    key_t = staticmethod(_text)
    implements_incr = True
    supports_native_join = True
    supports_autoexpire = True
    supports_failure_expires = True
    persistent = True

    def __init__(self, app: Any, url: str | None = None, **kwargs: Any) -> None:
        kwargs.setdefault("expires_type", float)
        super().__init__(app, url=url, **kwargs)
        self.thread_safe = True  # A plane is shared by threads.
        if self.content_type == _PICKLED:
            raise ImproperlyConfigured(
                "result_serializer is 'pickle', which runs what a stored result names; use result_serializer='json'"
            )
        given = dict(self.app.conf.get("result_backend_transport_options") or {})
        self._target = _target(url, given)
        failure_expires = self.app.conf.get("result_failure_expires")
        self._failure_expires = (
            self.expires if failure_expires is None else self.prepare_expires(failure_expires, float)
        )
        self._opened: _Opened | None = None
        self._lock = threading.Lock()
        self._counted = threading.local()
        _backends.add(self)

    @property
    def plane(self) -> Plane:
        """The plane that has the results, opened at its first use in this process."""
        return self._open().plane

    def close(self) -> None:
        """Close the plane. The next call opens it again."""
        with self._lock:
            opened, self._opened = self._opened, None
        if opened is not None:
            opened.plane.close()

    def as_uri(self, include_password: bool = False) -> str:
        """The URL for logs: without its token and password."""
        if not self.url or include_password:
            return self.url or "fastness://"
        parts = urlsplit(maybe_sanitize_url(self.url))
        query = "&".join("token=**" if each.startswith("token=") else each for each in parts.query.split("&"))
        return urlunsplit(parts._replace(query=query))

    # Values by key.

    def get(self, key: Any) -> bytes | None:
        row = self._row(key)
        return None if row is None else self._value(row)

    def mget(self, keys: Sequence[Any]) -> list[bytes | None]:
        rows = self._rows([_text(key) for key in keys])
        found = [rows.get(_text(key)) for key in keys]
        return [None if row is None else self._value(row) for row in found]

    def set(self, key: Any, value: Any) -> None:
        self._put(key, self._stored(_bytes(value)), expires=self.expires)

    def delete(self, key: Any) -> None:
        name = _text(key)
        if name.startswith(_text(self.chord_keyprefix)):
            self._end_chord(name)
        else:
            self._open().rows.commit([DeleteRow(_partition(name), (name,))])

    def expire(self, key: Any, value: float | None) -> None:
        """Let a task or group expire `value` seconds from now. What counts a chord's parts has its expiry already."""
        name = _text(key)
        is_task = name.startswith(_text(self.task_keyprefix))
        if name.startswith(_text(self.chord_keyprefix)) or (is_task and self._chord_expires is None):
            return  # A task's row has `result_expires` since it was written.
        for _ in _attempts():
            row = self._row(name)
            if row is None or _is_near(row, _ttl_seconds(value)):
                return
            with suppress(VersionConflict):
                self._put(name, row.value, if_version=row.version, expires=value)
                return

    def incr(self, key: Any) -> int:  # noqa: ARG002  # The count is that of the part that returns now.
        """How many parts of a chord have returned, as `on_chord_part_return` has counted them."""
        count: int = self._counted.count
        return count

    # Results.

    def _store_result(
        self, task_id: Any, result: Any, state: str, traceback: Any = None, request: Any = None, **_: Any
    ) -> Any:
        meta = self._get_result_meta(result=result, state=state, traceback=traceback, request=request)
        meta["task_id"] = _text(task_id)
        key = self.get_key_for_task(task_id)
        value = self._stored(_bytes(self.encode(meta)))
        expires = self._failure_expires if state == states.FAILURE else self.expires
        version = 0  # Most tasks store one state only, so this is one call.
        for _attempt in _attempts():
            try:
                self._put(key, value, if_version=version, expires=expires)
            except VersionConflict:
                row = self._row(key)
                # A success is final: a slower worker that runs the task too must not replace it.
                if row is not None and (row.value == value or self._status(row) == states.SUCCESS):
                    break
                version = 0 if row is None else row.version
            else:
                break
        return result

    def wait_for(
        self,
        task_id: Any,
        timeout: float | None = None,
        interval: float = 0.5,
        no_ack: bool = True,
        on_interval: Callable[[], object] | None = None,
    ) -> Any:
        """The result of a task, as soon as it is stored.

        Raises:
            celery.exceptions.TimeoutError: it was not stored within `timeout`.
        """
        self._ensure_not_eager()
        for _, meta in self.get_many([task_id], timeout, interval, no_ack, on_interval=on_interval):
            return meta
        raise ResultTimeout("The operation timed out.")

    def get_many(  # noqa: PLR0917  # Celery's signature.
        self,
        task_ids: Collection[Any],
        timeout: float | None = None,
        interval: float | None = 0.5,
        no_ack: bool = True,  # noqa: ARG002  # Other backends need it.
        on_message: Callable[[Any], object] | None = None,
        on_interval: Callable[[], object] | None = None,
        max_iterations: int | None = None,
        READY_STATES: Collection[str] = states.READY_STATES,  # noqa: N803  # Celery's name.
    ) -> Iterator[tuple[str, Any]]:
        """The results of tasks, each as soon as it is stored. A commit wakes the caller; nothing is polled.

        `interval` is how often `on_interval` is called.

        Raises:
            celery.exceptions.TimeoutError: not all of them were stored within `timeout`.
        """
        until = None if timeout is None else time.monotonic() + timeout
        names = {_text(self.get_key_for_task(id)): _text(id) for id in task_ids}
        known: dict[str, int] = {}  # The version of each row that is not ready.

        def ready(rows: dict[str, Row]) -> Iterator[tuple[str, Any]]:
            for name, row in rows.items():
                meta = self.decode_result(self._value(row))
                if meta["status"] not in READY_STATES:
                    known[name] = row.version
                    continue
                del known[name]
                self._cache[names[name]] = meta
                if on_message is not None:
                    on_message(meta)
                yield names[name], meta

        for name, id in names.items():
            cached = self._cached(id)
            if cached is not None and cached["status"] in READY_STATES:
                yield id, cached
            else:
                known[name] = 0
        if len(known) > COLLECTION_ROWS_MAX:  # One call waits for some of them, so all are looked at first.
            yield from ready(self._ensure_retryable(self._rows, list(known)))
        iterations = 0
        while known:
            batch = dict(islice(known.items(), COLLECTION_ROWS_MAX))
            wait_seconds = _wait_seconds(until, interval if on_interval else None)
            rows = self._ensure_retryable(self._changed, batch, wait_seconds).rows
            found = {_name(each): each.row for each in rows if each.row is not None}
            known.update({_name(each): 0 for each in rows if each.row is None})  # They were forgotten, or expired.
            yield from ready(found)
            iterations += 1
            if not known or (max_iterations and iterations >= max_iterations):
                return
            if until is not None and time.monotonic() >= until:
                raise ResultTimeout(f"Operation timed out ({timeout})")
            if on_interval is not None:
                on_interval()
            if found:
                # Other tasks of a large group end at about the same time: one call then returns several of them.
                time.sleep(min(CELERY_GATHER_SECONDS_MAX, len(batch) / 20_000))

    # Chords.

    def on_chord_part_return(self, request: Any, state: str, result: Any, **kwargs: Any) -> None:
        """Count a part of a chord, and send the body after the last one."""
        if not request.group:
            return
        chord = _text(self.get_key_for_chord(request.group))
        count = self._count_part(chord, _text(request.id), size=request.chord.get("chord_size"))
        if count is None:
            return
        self._counted.count = count
        super().on_chord_part_return(request, state, result, **kwargs)

    def _count_part(self, chord: str, part: str, *, size: int | None) -> int | None:
        """How many parts have returned with this one. None if it has returned before and has nothing to do."""
        partition = _partition(chord)
        keys: list[tuple[str, ...]] = [(chord, _COUNT), (chord, _PART, part)]
        for _ in _attempts():
            counted, returned = self._open().rows.get_many(partition, keys)
            count = {"parts": 0} if counted is None else json.loads(counted.value)
            if count.get("done"):
                return None
            if counted is not None and returned is not None:  # It runs again.
                if count["last"] != part or (size is not None and count["parts"] < size):
                    return None
                # It was the last one. Its first run may be about to send the body, or may have been killed before.
                known = KnownRow(partition, keys[0], counted.version)
                if self._open().rows.wait([known], wait_seconds=CELERY_CHORD_SEND_SECONDS).rows:
                    continue
                return int(count["parts"])
            now = {"parts": count["parts"] + 1, "last": part}
            ttl_seconds = _ttl_seconds(self.chord_expires)
            try:
                self._open().rows.commit(
                    [
                        PutRow(partition, keys[1], b"", if_version=0, ttl_seconds=ttl_seconds),
                        PutRow(
                            partition,
                            keys[0],
                            json.dumps(now).encode(),
                            if_version=0 if counted is None else counted.version,
                            ttl_seconds=ttl_seconds,
                        ),
                    ]
                )
            except VersionConflict:
                continue
            return int(now["parts"])
        raise AssertionError("The last attempt raises")

    def _end_chord(self, chord: str) -> None:
        """Remember for a while that the body was sent: a part that runs again must not begin another count."""
        partition = _partition(chord)
        done = json.dumps({"done": True}).encode()
        self._open().rows.commit(
            [
                DeleteRows(partition, (chord, _PART)),
                PutRow(partition, (chord, _COUNT), done, ttl_seconds=CELERY_CHORD_DONE_SECONDS),
            ]
        )

    # Celery's hooks.

    def exception_safe_to_retry(self, exc: BaseException) -> bool:
        """Whether `result_backend_always_retry` repeats a call: it does no harm here, also if it was executed."""
        again = (RetryAdvice.LATER, RetryAdvice.IDEMPOTENT)
        return isinstance(exc, FastnessError) and (exc.retry in again or isinstance(exc, Conflict))

    def __reduce__(self, args: Any = (), kwargs: Any = None) -> Any:
        return super().__reduce__(args, {**(kwargs or {}), "expires": self.expires, "url": self.url})

    # Rows.

    def _row(self, key: Any) -> Row | None:
        name = _text(key)
        return self._open().rows.get(_partition(name), (name,))

    def _put(self, key: Any, value: bytes, *, if_version: int | None = None, expires: float | None) -> None:
        name = _text(key)
        change = PutRow(_partition(name), (name,), value, if_version=if_version, ttl_seconds=_ttl_seconds(expires))
        self._open().rows.commit([change])

    def _rows(self, names: Sequence[str]) -> dict[str, Row]:
        """The rows of these names that exist."""
        found: dict[str, Row] = {}
        left = dict.fromkeys(names, 0)
        while left:
            batch = dict(islice(left.items(), COLLECTION_ROWS_MAX))
            changed = self._changed(batch, 0.0)
            rows = {_name(each): each.row for each in changed.rows if each.row is not None}
            found.update(rows)
            for name in rows if changed.more else batch:
                del left[name]
        return found

    def _changed(self, known: dict[str, int], wait_seconds: float) -> ChangedRows:
        """The rows with another version than the known one, as soon as there is one."""
        rows = [KnownRow(_partition(name), (name,), version) for name, version in known.items()]
        return self._open().rows.wait(rows, wait_seconds=wait_seconds)

    def _stored(self, value: bytes) -> bytes:
        """What the row with a value contains; stores a large value as a blob.

        Raises:
            Unsupported: the value needs an object store, and the plane has none.
        """
        row_max = COLLECTION_VALUE_BYTES_MAX - len(_INLINE)
        access = self._open().access
        data, hash = access.run(access.put_value(value, inline_max=SESSION_INLINE_BYTES_MAX, row_max=row_max))
        return _BLOB + hash.encode() if hash else _INLINE + data

    def _value(self, row: Row) -> bytes:
        if row.value.startswith(_INLINE):
            return row.value.removeprefix(_INLINE)
        access = self._open().access
        return access.run(access.get_blob(row.value.removeprefix(_BLOB).decode()))

    def decode(self, payload: Any) -> Any:
        """The value of a stored result.

        Raises:
            UnreadableValue: it is not what a backend with this serializer stores.
        """
        return None if payload is None else decoded("A stored result", super().decode, payload)

    def decode_result(self, payload: Any) -> Any:
        """The state and the value or exception of a stored result.

        Raises:
            UnreadableValue: as `decode`, or its exception is none.
        """
        return decoded("A stored result", super().decode_result, payload)

    def exception_to_python(self, exc: Any) -> Any:
        """The exception of a failed task: of a class that this process has imported, or of one that is made for it.

        Raises:
            UnreadableValue: it is one that ends a process.
        """
        found = super().exception_to_python(exc)
        if found is not None and found is not exc and not isinstance(found, Exception):
            raise UnreadableValue(
                f"A stored result names {type(found).__name__} as the exception of its task, which would end this "
                "process: another program wrote it. Forget the result, and replace the token that could write it"
            )
        return found

    def _status(self, row: Row) -> str:
        return str(self.decode_result(self._value(row))["status"])

    def _cached(self, task_id: str) -> Any:
        try:
            return self._cache[task_id]
        except KeyError:
            return None

    def _open(self) -> _Opened:
        opened = self._opened
        if opened is not None:
            return opened
        with self._lock:
            if self._opened is None:
                plane = self._target.open()
                name = self._target.collection
                self._opened = _Opened(plane, access_to(plane, name), plane.collection(name))
            return self._opened

    def _forget_plane(self) -> None:
        """In a forked child: leave the plane of the parent alone, and open another one at the next call."""
        self._lock = threading.Lock()
        self._opened = None


class _Target(NamedTuple):
    """Where the plane is."""

    url: str
    universe: str
    collection: str
    token: str | None
    patience_seconds: float
    objects: str | None
    tls: Any

    def open(self) -> Plane:
        if not self.url.startswith(("http://", "https://")):
            return fastness.open(self.url, universe=self.universe, objects=self.objects)
        return fastness.connect(
            self.url,
            token=self.token,
            universe=self.universe,
            tls=self.tls,
            patience_seconds=self.patience_seconds,
        )


def _target(url: str | None, given: dict[str, Any]) -> _Target:
    """What the URL, the options and the environment say; the URL comes first.

    Raises:
        ImproperlyConfigured: the URL or an option is not valid.
    """
    options: dict[str, Any] = {name: given[name] for name in (*_OPTIONS, "tls") if name in given}
    url = url or os.environ.get("FASTNESS_URL")
    if not url:
        raise ImproperlyConfigured(
            "result_backend has no address; write fastness://HOST:PORT/UNIVERSE, or set FASTNESS_URL"
        )
    found = url
    parts = urlsplit(url)
    if parts.scheme not in ("postgresql", "postgres"):  # PostgreSQL reads its own query.
        for name, value in parse_qsl(parts.query, keep_blank_values=True):
            if name not in _OPTIONS:
                raise ImproperlyConfigured(
                    f"{name!r} is not an option of the Fastness result backend; choose from {', '.join(_OPTIONS)}"
                )
            options[name] = value
        found = _plane_url(url, options)
    try:
        patience_seconds = float(options.get("patience_seconds", 30.0))
    except ValueError:
        patience_seconds = -1.0
    if patience_seconds < 0:
        raise ImproperlyConfigured(f"patience_seconds is {options['patience_seconds']!r}; give seconds, as in 30")
    return _Target(
        found,
        options.get("universe") or os.environ.get("FASTNESS_UNIVERSE") or "main",
        options.get("collection") or _COLLECTION,
        options.get("token") or os.environ.get("FASTNESS_TOKEN") or None,
        patience_seconds,
        options.get("objects"),
        options.get("tls"),
    )


def _plane_url(url: str, options: dict[str, Any]) -> str:
    """The URL as `fastness.open` or `fastness.connect` takes it. Adds the universe and token that it names."""
    parts = urlsplit(url)
    path = unquote(parts.path)
    if parts.scheme in ("fastness", "http", "https"):
        if not parts.hostname:
            raise ImproperlyConfigured(f"{maybe_sanitize_url(url)} has no host; write fastness://HOST:PORT/UNIVERSE")
        if path.strip("/"):
            options["universe"] = path.strip("/")
        if parts.password or parts.username:
            options["token"] = unquote(parts.password or parts.username or "")
        scheme = "http" if parts.scheme == "fastness" else parts.scheme
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        return f"{scheme}://{host}" + (f":{parts.port}" if parts.port else "")
    if parts.scheme == "dir":
        return f"dir:{unquote(parts.netloc)}{path}"
    if parts.scheme == "memory":
        return "memory:"
    raise ImproperlyConfigured(
        f"{parts.scheme!r} is not a scheme of the Fastness result backend; write fastness://HOST:PORT/UNIVERSE, "
        "fastness+https://…, fastness+postgresql://… or fastness+dir:///PATH"
    )


def _partition(name: str) -> str:
    return f"{crc32(name.encode()) % _PARTITIONS:x}"


def _name(changed: ChangedRow) -> str:
    return str(changed.key[0])


def _ttl_seconds(seconds: float | None) -> float | None:
    """The time to live of a row; Celery's 0 is none."""
    return min(max(float(seconds), 0.001), COLLECTION_TTL_SECONDS_MAX) if seconds else None


def _is_near(row: Row, ttl_seconds: float | None) -> bool:
    """Whether a row expires about `ttl_seconds` from now, by the clock of this machine."""
    if row.expires_ms is None or ttl_seconds is None:
        return row.expires_ms is None and ttl_seconds is None
    left_seconds = row.expires_ms / 1_000 - time.time()
    return abs(left_seconds - ttl_seconds) <= _EXPIRY_SLACK * ttl_seconds


def _wait_seconds(until: float | None, interval: float | None) -> float:
    bounds = [CELERY_WAIT_SECONDS]
    if until is not None:
        bounds.append(until - time.monotonic())
    if interval is not None:
        bounds.append(interval)
    return max(0.0, min(bounds))


def _attempts() -> Iterator[int]:
    """Counts attempts of a write that other writers may overtake, with pauses between them.

    Raises:
        Conflict: other writers were faster every time.
    """
    for number in range(SESSION_ATTEMPTS_MAX):
        yield number
        time.sleep(random.uniform(0, min(SESSION_BACK_OFF_SECONDS_MAX, 0.001 * 2**number)))
    raise Conflict("Other writers changed the same row of a result again and again; try again later")


_backends: "WeakSet[FastnessBackend]" = WeakSet()


def _forget_planes() -> None:
    for backend in _backends:
        backend._forget_plane()


def _close_planes() -> None:
    for backend in list(_backends):
        with suppress(FastnessError):
            backend.close()


os.register_at_fork(after_in_child=_forget_planes)  # Pools of processes fork after the app is set up.
atexit.register(_close_planes)
