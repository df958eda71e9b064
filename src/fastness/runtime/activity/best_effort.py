"""The newest BEST_EFFORT values of entities, in memory: what reads with `best_effort=True` add to the durable fields.

    a write ──► its session log ──► arrived ──► the newest value of each field
    session logs of earlier and of other processes ──► loaded by the first read, then followed

Nothing is kept before the first such read, so writes cost the same as without it. The first read of a universe loads
the newest session logs, from files and from the object store. From then on a record arrives here when its session log
accepts it. The logs of other processes are followed: new lines of files in the same folder several times a second, and
new files in the object store every few seconds.

Values are JSON, as in the session logs, so that a restart does not change them. The newest record of a field wins, by
the time at which its session log accepted it. Memory is bounded: the entity that was not written for longest is
forgotten first.
"""

import threading
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import date, timedelta
from itertools import islice
from pathlib import Path
from time import monotonic
from typing import Final

import msgspec

from fastness import limits
from fastness.backends.objects import ObjectStore
from fastness.errors import ObjectNotFound
from fastness.kv.fork_safety import invalidate_in_children
from fastness.layers.entities import EntityKey
from fastness.layers.field_tiers import LOG_KIND
from fastness.runtime.activity import format as log_format
from fastness.runtime.activity import rotation
from fastness.runtime.activity.log import ActivityLog

_COST_BYTES: Final = 2 * limits.WRITE_COST_BYTES  # Memory overhead of a value, with its share of the entity's names.


class _Record(msgspec.Struct):
    """What a session log of entities has for one write."""

    kind: str
    id: str
    fields: dict[str, msgspec.Raw] = {}
    removed: list[str] = []


_decode: Final = msgspec.json.Decoder(_Record).decode
LoggedValue = tuple[int, bytes | None]  # When the value was logged, and the value as JSON; None: it was removed.
_Values = dict[str, LoggedValue]  # By field.
_Key = tuple[str, str, str]  # Universe, kind and id. Equal to an EntityKey, and faster to make.


class BestEffortFields:
    """The newest values, per universe, entity and field. Thread-safe; only `load` uses files and the object store."""

    def __init__(
        self,
        log: Callable[[], ActivityLog],
        folder: Path,
        objects: ObjectStore | None,
        *,
        shared: bool,
        entries_max: int = limits.BEST_EFFORT_ENTRIES_MAX,
        bytes_max: int = limits.BEST_EFFORT_BYTES_MAX,
    ) -> None:
        """`shared`: other processes write session logs of the same plane."""
        self._log = log
        self._shared = shared
        self._newest = _NewestValues(entries_max, bytes_max)
        self._bounds = entries_max, bytes_max
        self._files = _LogFiles(folder, objects)
        # Written by a session log, which must not wait for a lock here: a signal handler may log at any time.
        self._arrived: deque[tuple[str, int, Sequence[bytes]]] = deque()
        self._loaded: dict[str, float] = {}  # When each universe was loaded.
        self._lock = threading.Lock()
        self._loading = threading.Lock()
        invalidate_in_children(self)

    def invalidate_after_fork(self) -> None:
        """In a forked child: a thread of the parent may hold the locks."""
        self._lock, self._loading = threading.Lock(), threading.Lock()

    def arrive(self, universe: str, at_ms: int, records: Sequence[bytes]) -> None:
        """Take records that a session log of entities has accepted."""
        self._arrived.append((universe, at_ms, records))
        if len(self._arrived) > limits.BEST_EFFORT_ARRIVED_MAX and self._lock.acquire(blocking=False):
            try:
                self._take_arrived()
            finally:
                self._lock.release()

    def is_due(self, universe: str) -> bool:
        """Whether `load` would read files."""
        loaded = self._loaded.get(universe)
        return loaded is None or (self._shared and monotonic() - loaded >= limits.BEST_EFFORT_FOLLOW_SECONDS)

    def load(self, universe: str) -> None:
        """Load the newest session logs of a universe, or what other processes have added to them since then.

        Raises:
            Backend: the object store does not answer.
        """
        with self._loading:
            if not self.is_due(universe):
                return
            log = self._log()
            if universe not in self._loaded:
                log.follow(LOG_KIND, self.arrive)  # From here on nothing is missed; what was logged before is flushed.
                log.flush()
                own = frozenset[str]()
            else:
                own = log.file_stems()
            started = monotonic()
            found = _NewestValues(*self._bounds)
            for line in self._files.new_lines(universe, own):
                found.add(universe, line.at_ms, bytes(line.record))
            with self._lock:
                self._take_arrived()
                self._newest.merge(found)
            self._loaded.pop(universe, None)
            self._loaded[universe] = started
            if len(self._loaded) > limits.BEST_EFFORT_UNIVERSES_MAX:
                del self._loaded[next(iter(self._loaded))]

    def get(self, key: EntityKey) -> _Values:
        """The newest values of an entity, with the fields that were removed."""
        with self._lock:
            self._take_arrived()
            return dict(self._newest.entities.get(key, {}))

    def ids(self, universe: str, kind: str, after: str, last: str | None) -> Iterator[str]:
        """The ids after `after`, up to and including `last`, in order, of entities that have values."""
        with self._lock:
            self._take_arrived()
            found = self._newest.sorted_ids(universe, kind)
        for id in islice(found, bisect_right(found, after), None):
            if last is not None and id > last:
                return
            yield id

    def forget(self, key: EntityKey) -> None:
        """Forget an entity that was deleted."""
        with self._lock:
            self._take_arrived()
            self._newest.remove(key)

    def _take_arrived(self) -> None:
        while self._arrived:
            universe, at_ms, records = self._arrived.popleft()
            for record in records:
                self._newest.add(universe, at_ms, record)


class _NewestValues:
    """A bounded map of the newest values. For one thread at a time."""

    def __init__(self, entries_max: int, bytes_max: int) -> None:
        self.entities: OrderedDict[_Key, _Values] = OrderedDict()  # The one that was written last is at the end.
        self._entries_max, self._bytes_max = entries_max, bytes_max
        self._entries = self._bytes = 0
        self._kinds: dict[tuple[str, str], set[str]] = {}
        self._sorted: dict[tuple[str, str], list[str]] = {}  # Of `_kinds`, for those that were asked for.

    def add(self, universe: str, at_ms: int, record: bytes) -> None:
        """Add what a record sets and removes. One that does not describe an entity is skipped: anyone may log it."""
        try:
            found = _decode(record)
        except (ValueError, RecursionError):
            return
        key = universe, found.kind, found.id
        values = self._values(key)
        for field, value in found.fields.items():
            self._set(values, field, (at_ms, bytes(value)))
        for field in found.removed:
            self._set(values, field, (at_ms, None))
        self._forget_oldest()

    def merge(self, other: "_NewestValues") -> None:
        """Add values of files that are newer than those here. At the same time, what arrived from a log is kept."""
        for key, found in other.entities.items():
            values = self._values(key)
            for field, value in found.items():
                if field not in values or values[field][0] < value[0]:
                    self._set(values, field, value)
        self._forget_oldest()

    def remove(self, key: _Key) -> None:
        values = self.entities.pop(key, None)
        if values is not None:
            self._entries -= len(values)
            self._bytes -= sum(_size(field, value) for field, value in values.items())
            kind = key[0], key[1]
            self._kinds[kind].discard(key[2])
            self._sorted.pop(kind, None)
            if not self._kinds[kind]:
                del self._kinds[kind]

    def sorted_ids(self, universe: str, kind: str) -> list[str]:
        """The ids of a kind in order. The list is not changed later."""
        ids = self._kinds.get((universe, kind))
        if ids is None:
            return []
        found = self._sorted.get((universe, kind))
        if found is None:
            found = self._sorted[universe, kind] = sorted(ids)
        return found

    def _values(self, key: _Key) -> _Values:
        """The values of an entity, which is now the one that was written last."""
        values = self.entities.get(key)
        if values is None:
            values = self.entities[key] = {}
            kind = key[0], key[1]
            self._kinds.setdefault(kind, set()).add(key[2])
            self._sorted.pop(kind, None)
        else:
            self.entities.move_to_end(key)
        return values

    def _set(self, values: _Values, field: str, value: LoggedValue) -> None:
        # Every BEST_EFFORT write passes here after the first read.
        before = values.get(field)
        if before is None:
            self._entries += 1
            self._bytes += _size(field, value)
            if len(values) >= limits.ENTITY_FIELDS_MAX:
                first = next(iter(values))
                self._entries -= 1
                self._bytes -= _size(first, values.pop(first))
        elif before[0] > value[0]:
            return
        else:
            self._bytes += len(value[1] or b"") - len(before[1] or b"")
        values[field] = value

    def _forget_oldest(self) -> None:
        while self._entries > self._entries_max or self._bytes > self._bytes_max:
            self.remove(next(iter(self.entities)))


def _size(field: str, value: LoggedValue) -> int:
    return len(field) + len(value[1] or b"") + _COST_BYTES


class _LogFiles:
    """Reads what was added to the session logs of entities since the last time; at first, the newest part of them."""

    def __init__(self, folder: Path, objects: ObjectStore | None) -> None:
        self._folder = folder
        self._objects = objects
        self._offsets: dict[Path, int] = {}  # How far each local file has been read.
        self._read: dict[str, set[str]] = {}  # The manifest entries of the last days that were read, by universe.
        self._listed: dict[str, float] = {}

    def new_lines(self, universe: str, own: frozenset[str]) -> Iterator[log_format.Line]:
        """New lines, the oldest files first, without the files in `own`. Torn and damaged lines are skipped."""
        budget = limits.BEST_EFFORT_LOAD_BYTES_MAX
        chunks: list[bytes] = []  # The newest file first.
        # Local files before rotated ones: a file that is rotated in between is then read twice, not missed.
        for path in self._local(universe):
            if path.stem in own:
                continue
            chunk = self._read_local(path, universe, budget)
            chunks.append(chunk)
            budget -= len(chunk)
        for entry in self._rotated(universe):
            if budget > 0 and rotation.name_of(entry) not in own:
                chunk = self._read_rotated(entry)[-budget:]
                chunks.append(chunk)
                budget -= len(chunk)
        for chunk in reversed(chunks):
            for _, line in log_format.lines(chunk):
                if line is not None:
                    yield line

    def _local(self, universe: str) -> list[Path]:
        found = sorted((self._folder / universe).glob(f"*_{LOG_KIND}{log_format.SUFFIX}"), reverse=True)
        for path in [each for each in self._offsets if each.parent.name == universe and each not in found]:
            del self._offsets[path]
        return found[: limits.BEST_EFFORT_LOAD_FILES_MAX]

    def _read_local(self, path: Path, universe: str, budget: int) -> bytes:
        name = log_format.parse_name(path.stem)
        with suppress(FileNotFoundError), path.open("rb") as file:
            offset = self._offsets.get(path, 0)
            if not offset and name is not None:
                first = file.readline(log_format.HEADER_BYTES_MAX)
                # Another kind may end with the same word, because sessions and kinds may have underscores.
                if not first.endswith(b"\n") or log_format.header_of(first, universe, name).kind != LOG_KIND:
                    return b""
            size = file.seek(0, 2)
            file.seek(max(offset, size - max(budget, 0)))
            data = file.read()
            complete = data.rfind(b"\n") + 1  # The last line may still be written.
            self._offsets[path] = size - len(data) + complete
            return data[:complete]
        return b""

    def _rotated(self, universe: str) -> list[str]:
        """The manifest entries that were not read yet, the newest first."""
        if self._objects is None or monotonic() - self._listed.get(universe, -1e9) < limits.BEST_EFFORT_LIST_SECONDS:
            return []
        self._listed[universe] = monotonic()
        read = self._read.get(universe, set())
        # A file has the records of one day, so only entries of the last days can be new ones.
        listed = rotation.entries_since(self._objects, universe, _day_before(max(read), universe) if read else "")
        entries = [each for each in listed if rotation.name_of(each).endswith(f"_{LOG_KIND}")]
        self._read[universe] = set(entries)
        return [each for each in reversed(entries) if each not in read][: limits.BEST_EFFORT_LOAD_FILES_MAX]

    def _read_rotated(self, entry: str) -> bytes:
        assert self._objects is not None
        file = rotation.rotated_file(self._objects, entry)
        with suppress(ObjectNotFound):  # `fastness doctor` reports it.
            if file is not None and file.kind == LOG_KIND:
                return self._objects.get(file.path)
        return b""


def _day_before(entry: str, universe: str) -> str:
    """The day before an entry's file was opened, as entries begin."""
    return str(date.fromisoformat(rotation.second_of(entry, universe)[:10]) - timedelta(days=1))
