"""The services of a plane: what runs beside the key space, for synchronous and asynchronous callers alike."""

import asyncio
import logging
import shutil
import tempfile
import threading
import uuid
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from fastness.access_keys import AccessKeySecrets, MemorySecrets
from fastness.backends.objects import ObjectStore
from fastness.clock import Clock, SystemClock
from fastness.errors import DiskFull, FastnessError, NestedTransaction
from fastness.kv import Database, Transaction
from fastness.kv.closing_at_exit import close_at_exit
from fastness.layers.field_tiers import LOG_KIND, BestEffortWritten
from fastness.layers.leases import LeaseEvent, keepalive
from fastness.layers.locks import renew
from fastness.layers.mailboxes.keys import MailEvent
from fastness.layers.queues import MessageEvent, QueueDue, QueueKey, extend_many
from fastness.layers.queues.work import SqsWorkAdded
from fastness.layers.timers import TimerSet
from fastness.lease_renewal import LeaseRenewer
from fastness.limits import NODE_FIRST_SECONDS, PUSHES_PER_MINUTE
from fastness.lock_sessions import LockSessions
from fastness.runtime.activity.best_effort import BestEffortFields
from fastness.runtime.activity.events import EventLogger
from fastness.runtime.activity.log import ActivityLog
from fastness.runtime.background import BackgroundRunner
from fastness.runtime.consumer_options import ConsumerOptions
from fastness.runtime.duty import Duty, LeasedDuty
from fastness.runtime.locks.counters import LockCounters
from fastness.runtime.locks.table import CallerLocks, LockTable
from fastness.runtime.maintenance.disk_space import DiskSpaceMonitor, log_bytes_max
from fastness.runtime.maintenance.heartbeat import Heartbeat, NodeDescription
from fastness.runtime.maintenance.mail_sweeper import MailSweeper
from fastness.runtime.maintenance.space_counters import SpaceCounters
from fastness.runtime.maintenance.space_options import SpaceOptions
from fastness.runtime.maintenance.sqs_loop import SqsWork
from fastness.runtime.maintenance.sweeper import Sweeper
from fastness.runtime.maintenance.timer_loop import TimerFiring
from fastness.runtime.publishing import Publisher
from fastness.runtime.quotas import Quotas
from fastness.runtime.repeat_detector import RepeatDetector
from fastness.runtime.waiting_consumers import WaitingConsumers
from fastness.tiers import Tier, TierPolicy
from fastness.wire.leases import LeaseProof, LockPlace
from fastness.wire.locks import LockSession
from fastness.wire.queues import MessageLease

_log = logging.getLogger("fastness.activity")


class HasServices(Protocol):
    """A transport of a plane in this process."""

    @property
    def services(self) -> "Services": ...


class Services:
    """The running parts of a plane, shared by its transports."""

    def __init__(
        self,
        database: Database,
        objects: ObjectStore | None = None,
        *,
        clock: Clock | None = None,
        policy: TierPolicy | None = None,
        logs: Path | None = None,
        consumers: ConsumerOptions | None = None,
        shared: bool = False,
        pushes_per_minute: int = PUSHES_PER_MINUTE,
        space: SpaceOptions | None = None,
        access_keys: AccessKeySecrets | None = None,
    ) -> None:
        self.database = database
        self.access_keys = access_keys or MemorySecrets()
        self.objects = objects  # None on PostgreSQL unless `objects` names a store.
        self.clock = clock
        self.policy = policy or TierPolicy()
        self.session = uuid.uuid4().hex[:12]  # The default session of this process's log records.
        self.background = BackgroundRunner(clock=clock)
        self.disk_space: DiskSpaceMonitor | None = None
        self.space = space or SpaceOptions()
        self.space_counters = SpaceCounters(clock)
        self.consumers = consumers or ConsumerOptions()
        self.waiting_consumers = WaitingConsumers(self.consumers.consumers_max)
        self.pushes_per_minute = pushes_per_minute
        self.lease_renewer = LeaseRenewer(self._extend_messages, self._keep_lease)
        self.events = EventLogger(self.log, self.session, self.background)
        self.shared = shared  # Other processes write to the same key space.
        # Ordered locks are in the key space, because callers in other processes acquire them. A server sets it, too.
        self.shared_locks = shared
        self.lock_sessions = LockSessions(self.lease_renewer)
        self.lock_counters = LockCounters()
        self.revived_runs = Counter[str]()  # By universe; a run that had to be revived is a bug.
        self.recorded_calls: set[asyncio.Task[Any]] = (
            set()
        )  # Audited calls that run, also those whose callers have left.
        self.quotas = Quotas(database, self.background, clock=clock, shared=shared)
        now_ms = (clock or SystemClock()).now_ms
        self.repeats = RepeatDetector(database, now_ms, shared=shared, background=self.background)
        self.node = NodeDescription(self.session, waiting_consumers=lambda: self.waiting_consumers.count)
        self.heartbeat: Heartbeat | None = None
        # Their jobs start with the plane, or with the first commit that needs them: then they check everything once.
        self.sweeper = Sweeper(database, self.consumers, shared=shared)
        self.mail_sweeper = MailSweeper(database, shared=shared)
        self.timers = TimerFiring(database, self.consumers, shared=shared)
        self.sqs_work = SqsWork(database, self.consumers, worker=self.worker, shared=shared, clock=clock)
        database.publish = self._publisher().publish
        self._logs_are_temporary = logs is None
        self._logs = logs or Path(tempfile.gettempdir()) / f"fastness-activity-{uuid.uuid4().hex}"
        self._lock = threading.Lock()
        self._stopped = False
        self._locks: dict[str, LockTable] = {}
        self._caller_locks: dict[str, CallerLocks] = {}
        self._activity: ActivityLog | None = None
        self.best_effort = BestEffortFields(self.log, self._logs, objects, shared=shared)
        close_at_exit(self)
        if self._logs.is_dir():  # Rotate the files that an earlier process left there.
            self.log()

    @property
    def logs(self) -> Path:
        """The folder of session logs that are not yet in the object store."""
        return self._logs

    def locks(self, universe: str) -> LockTable:
        """The lock table of a universe."""
        table = self._locks.get(universe)
        if table is None:
            with self._lock:
                table = self._locks.setdefault(universe, LockTable(find_type=self.policy.record_name))
        return table

    def caller_locks(self, universe: str) -> CallerLocks:
        """The lock table of a universe's data, as the callers of this process use it."""
        found = self._caller_locks.get(universe)
        if found is None:
            locks = CallerLocks(self.locks(universe), self._wait_for_writes)
            found = self._caller_locks.setdefault(universe, locks)
        return found

    def has_lock_callers(self, universe: str) -> bool:
        """Whether callers of this process have acquired locks of a universe."""
        table = self._locks.get(universe)
        return table is not None and table.has_callers

    def _wait_for_writes(self) -> None:
        """Return when all transactions have ended that began before: those of an embedded plane run one by one."""
        with suppress(NestedTransaction):  # The caller is in a transaction, so no other one runs.
            self.database.transact(_nothing, tier=Tier.IMPORTANT)

    def holders(self, universe: str) -> list[LockPlace]:
        """Who holds the locks of a universe, and who waits for them."""
        table = self._locks.get(universe)
        return [] if table is None else table.holders()

    def log(self) -> ActivityLog:
        """The session logs; created with the first record."""
        if self._activity is None:
            with self._lock:
                if self._activity is None:
                    # Once the plane stops, no thread is needed, and none can be started at the end of a program.
                    flusher = not self._stopped
                    self._activity = ActivityLog(
                        self._logs,
                        self.objects,
                        clock=self.clock,
                        file_bytes_max=log_bytes_max(self._logs),
                        check_space=self._check_log_space,
                        start_flusher=flusher,
                    )
        return self._activity

    def _check_log_space(self) -> None:
        """Raise DiskFull while session logs would take the reserve of the key space."""
        if self.database.low_space and self.disk_space is not None and self.disk_space.has(self._logs):
            raise DiskFull("Only the reserve of the disk is left (disk_reserve_bytes); session logs are not written")

    def flush_logs(self) -> None:
        """Write buffered session log records to their files."""
        self.events.write()
        if self._activity is not None:
            self._activity.flush()

    def _publisher(self) -> Publisher:
        """Publishes to the session logs, and to the jobs that wait for something that an event tells them."""
        publisher = Publisher()
        publisher.subscribe(MessageEvent, self.events.add)
        publisher.subscribe(LeaseEvent, self.events.add)
        publisher.subscribe(MailEvent, self.events.add)
        publisher.subscribe(MailEvent, self._sweep_mail)
        publisher.subscribe(QueueDue, self._expect)
        publisher.subscribe(TimerSet, self._note_timers)
        publisher.subscribe(SqsWorkAdded, self._note_sqs_work)
        publisher.subscribe(BestEffortWritten, self._log_best_effort)
        return publisher

    def _log_best_effort(self, events: list[BestEffortWritten]) -> None:
        """Write BEST_EFFORT fields to the session log. The fields they were written with are committed in any case."""
        for each in events:
            try:
                self.log().log_encoded(each.universe, each.session or self.session, LOG_KIND, [each.record])
            except Exception as error:
                _log.warning(
                    "BEST_EFFORT fields of an entity of %s are missing from its session log: %s", each.universe, error
                )

    def _expect(self, events: list[QueueDue]) -> None:
        if self.clock is None:  # Otherwise a test moves it, and sweeps by itself.
            self.background.add(self.sweeper.job)
            for event in events:
                self.sweeper.schedule(event.queue, SystemClock().now_ms() + event.in_ms)

    def _sweep_mail(self, events: list[MailEvent]) -> None:
        del events
        if not self.mail_sweeper.job.passes and self.clock is None:
            self.background.add(self.mail_sweeper.job)

    def _note_timers(self, events: list[TimerSet]) -> None:
        self.background.add(self.timers.job)
        for event in events:
            self.timers.note_set(event.universe)

    def _note_sqs_work(self, events: list[SqsWorkAdded]) -> None:
        del events
        self.background.add(self.sqs_work.job)
        self.sqs_work.note_added()

    @property
    def duty(self) -> Duty:
        """Whether this process does the periodic work."""
        return self.background.duty

    def start_heartbeat(self) -> None:
        """Be one of several nodes that share the key space: the one with the maintenance lease does the periodic work.

        Call this before anything else is started.
        """
        self.background.duty = duty = LeasedDuty()
        self.heartbeat = Heartbeat(self.database, self.node, duty, first_seconds=NODE_FIRST_SECONDS)
        self.background.add(self.heartbeat.job)

    def announce_server(self, address: str, *, calls: Callable[[], int], connections: Callable[[], int]) -> None:
        """This process is a server at `address`, which its siblings can see from now on."""
        self.node.describe_server(address, calls=calls, connections=connections)
        if self.heartbeat is not None:
            self.heartbeat.job.wake()

    def start_checks(self) -> None:
        """Process what is due from before: in queues, mailboxes, worlds, and SQS queues."""
        if self.clock is None:
            self.background.add(self.sweeper.job)
            self.background.add(self.mail_sweeper.job)
        self.background.add(self.timers.job)
        self.background.add(self.sqs_work.job)

    @property
    def worker(self) -> str:
        """Names this process among those that share the key space; empty if it is the only one."""
        return self.session if self.shared else ""

    def _extend_messages(
        self, universe: str, queue: str, leases: list[MessageLease], seconds: float
    ) -> list[int | FastnessError]:
        key = QueueKey(universe, queue)
        extended = self.database.transact(extend_many, key, leases, by_ms=round(seconds * 1_000))
        return [each if isinstance(each, FastnessError) else each.due_ms for each in extended]

    def _keep_lease(self, proof: LeaseProof | LockSession, seconds: float) -> int:
        if isinstance(proof, LockSession):
            return self.database.transact(renew, proof, lease_ms=round(seconds * 1_000))
        return self.database.transact(keepalive, proof, ttl_ms=round(seconds * 1_000)).expires_ms

    def close_at_exit(self) -> None:
        """Stop, unless it was stopped."""
        if not self._stopped:
            self.stop()

    def stop(self) -> None:
        """Stop everything that runs, write buffered records, and close the key space."""
        with self._lock:
            self._stopped = True
        self.lease_renewer.close()
        self.background.stop()
        if self.heartbeat is not None:  # After the jobs: it releases the duty.
            self.heartbeat.leave()
        self.events.write()
        if self._activity is not None:
            self._activity.close()
        if self._logs_are_temporary:
            shutil.rmtree(self._logs, ignore_errors=True)
        self.database.close()


def _nothing(tx: Transaction) -> None:
    """Do nothing, once the transactions before this one have ended."""
    del tx
