"""What runs beside the key space, whichever way a plane is called."""

import logging
import shutil
import tempfile
import threading
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from holdfast.backends.objects import ObjectStore
from holdfast.clock import Clock, SystemClock
from holdfast.kv import Database
from holdfast.layers.field_tiers import LOG_KIND, LOOSE
from holdfast.layers.mailboxes.keys import MAIL_EVENTS
from holdfast.layers.queues import DUE, QueueKey, extend
from holdfast.lease_renewal import LeaseRenewer
from holdfast.limits import PUSHES_PER_MINUTE
from holdfast.plane.idempotency import RepeatDetector
from holdfast.runtime.activity.events import Events
from holdfast.runtime.activity.log import ActivityLog
from holdfast.runtime.activity.rotation import Failures
from holdfast.runtime.consumer_options import ConsumerOptions
from holdfast.runtime.locks.table import RESOURCE_LEVELS, HolderInfo, LockTable
from holdfast.runtime.maintenance.compaction_loop import CompactionLoop
from holdfast.runtime.maintenance.mail_sweeper import MailSweeper
from holdfast.runtime.maintenance.sweeper import Sweeper
from holdfast.tiers import TierPolicy
from holdfast.wire.queues import MessageLease

_log = logging.getLogger("holdfast.activity")
_NO_EVENTS = frozenset((DUE, LOOSE))  # What notes begin with that are told to somebody else.

Sweeping = TypeVar("Sweeping")


class Services:
    """The running parts of a plane that its synchronous and its asynchronous port have in common."""

    def __init__(
        self,
        database: Database,
        objects: ObjectStore | None = None,
        *,
        clock: Clock | None = None,
        policy: TierPolicy | None = None,
        logs: Path | None = None,
        waits: ConsumerOptions | None = None,
        shared: bool = False,
        pushes_per_minute: int = PUSHES_PER_MINUTE,
    ) -> None:
        self.database = database
        self.objects = objects  # None on PostgreSQL until somebody names a store that all nodes reach.
        self.clock = clock
        self.policy = policy or TierPolicy()
        self.session = uuid.uuid4().hex[:12]  # Names this process in session logs, where nobody names another.
        self.upkeep: CompactionLoop | None = None
        self.waits = waits or ConsumerOptions()
        self.pushes_per_minute = pushes_per_minute
        self.resources = LockTable(RESOURCE_LEVELS, nested=False)  # For what touches several of an agent's things.
        self.lease_renewer = LeaseRenewer(self._extend)
        self.events = Events(self.log, self.session)
        self.shared = shared  # Other processes write to the same key space.
        self.sendings = RepeatDetector(database, (clock or SystemClock()).now_ms, shared=shared)
        self._sweeper: Sweeper | None = None
        self._mail_sweeper: MailSweeper | None = None
        self._logs_are_temporary = logs is None
        self._logs = logs or Path(tempfile.gettempdir()) / f"holdfast-activity-{uuid.uuid4().hex}"
        self._lock = threading.Lock()
        self._failures = Failures("Starting to sweep")
        self._stopped = False
        self._locks: dict[str, LockTable] = {}
        self._activity: ActivityLog | None = None
        if self._logs.is_dir():  # What a process that is gone has left there is to be rotated.
            self.log()

    @property
    def logs(self) -> Path:
        """The folder of session logs that are not in the object store yet."""
        return self._logs

    def locks(self, universe: str) -> LockTable:
        """The lock table of a universe."""
        table = self._locks.get(universe)
        if table is None:
            with self._lock:
                table = self._locks.setdefault(universe, LockTable())
        return table

    def holders(self, universe: str) -> list[HolderInfo]:
        """Who holds the locks of a universe and waits for them. To look makes no table."""
        table = self._locks.get(universe)
        return [] if table is None else table.holders()

    def log(self) -> ActivityLog:
        """The session logs, which begin with the first record."""
        if self._activity is None:
            with self._lock:
                if self._activity is None:
                    self._activity = ActivityLog(self._logs, self.objects, clock=self.clock)
        return self._activity

    def flush_logs(self) -> None:
        """Bring what is in memory for session logs into their files."""
        self.events.write()
        if self._activity is not None:
            self._activity.flush()

    def publish(self, notes: Sequence[tuple[Any, ...]]) -> None:
        """Tell of what a committed transaction has noted: to the session log, and to whoever waits for a moment.

        Whatever fails here is a line in the log. It is no failure of whoever committed, who would do it again.
        """
        events = [note for note in notes if note[0] not in _NO_EVENTS]
        try:
            if events:
                self.events.add(events)
                if self._mail_sweeper is None and events[0][0].startswith(MAIL_EVENTS):
                    self._begin(self.start_sweeping_mail)
            for note in notes if len(events) < len(notes) else ():
                if note[0] == DUE:
                    self._expect(*note[1:])
                elif note[0] == LOOSE:
                    self._log_loose(*note[1:])
        except Exception:
            _log.exception("what was committed could not be told of")

    def _log_loose(self, universe: str, session: str | None, record: bytes) -> None:
        """BEST_EFFORT: what they belong to is committed, whether a log takes them or not."""
        try:
            self.log().log_encoded(universe, session or self.session, LOG_KIND, [record])
        except Exception as error:
            _log.warning("fields of an entity of %s are not in its session log: %s", universe, error)

    def _expect(self, queue: QueueKey, in_ms: int) -> None:
        sweeper = self._sweeper or self._begin(self.start_sweeping)
        if sweeper is not None:
            sweeper.expect(queue, SystemClock().now_ms() + in_ms)

    def _begin(self, start: Callable[[], Sweeping]) -> Sweeping | None:
        """What begins with the first commit that needs it, or a later one where the process may have no more threads.

        It looks at everything once when it starts, so what it is not told of until then is not missed.
        """
        try:
            begun = start()
        except RuntimeError as error:
            self._failures.note(start.__name__, error)
            return None
        self._failures.over(start.__name__)
        return begun

    def start_sweeping(self) -> Sweeper | None:
        """Attend to what is due in queues that nobody looks at, from now on."""
        if self.clock is not None:  # A clock that a test moves has no hand of its own.
            return None
        with self._lock:
            if self._sweeper is None and not self._stopped:
                self._sweeper = Sweeper(self.database, self.waits, self.publish, shared=self.shared)
            return self._sweeper

    def start_sweeping_mail(self) -> None:
        """Forget mail whose time is over, from now on."""
        if self.clock is not None:
            return
        with self._lock:
            if self._mail_sweeper is None and not self._stopped:
                self._mail_sweeper = MailSweeper(self.database, self.publish, shared=self.shared)

    def _extend(self, universe: str, queue: str, lease: MessageLease, seconds: float) -> int:
        key = QueueKey(universe, queue)
        return self.database.transact(extend, key, lease, by_ms=round(seconds * 1_000)).due_ms

    def stop(self) -> None:
        """End what runs, write out what is in memory, and close the key space."""
        with self._lock:
            self._stopped = True
        self.lease_renewer.close()
        self.sendings.stop()
        if self._sweeper is not None:
            self._sweeper.stop()
        if self._mail_sweeper is not None:
            self._mail_sweeper.stop()
        if self.upkeep is not None:
            self.upkeep.stop()
        self.events.close()
        if self._activity is not None:
            self._activity.close()
        if self._logs_are_temporary:
            shutil.rmtree(self._logs, ignore_errors=True)
        self.database.close()
