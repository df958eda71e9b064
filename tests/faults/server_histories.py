"""One history of several servers: clients that call random servers, faults, and the check of what they saw.

    registers   two states and an entity: read, written and compared by version
    queue       puts, some of them idempotent and repeated at another server; messages are received at one server, and
                acknowledged, returned or extended at another one, some of them after their lease
    lease       acquired, renewed and released; a state is written under it
    world       appends at the head, and reads
    mail        sent, read and confirmed
    waiters     consumers that wait from the beginning to the end, and get what is put meanwhile

Operations, faults and their order come from the seed; the timing is that of the machine.
"""

import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import cbor2

from fastness import Plane, QueuePolicy
from fastness.errors import CasMismatch, FastnessError, RetryAdvice, VersionConflict
from fastness.limits import LOCK_LATE_MS_MAX, MAIL_TTL_SECONDS
from fastness.testing.histories import History, Operation, Outcome, Violation, check_register
from fastness.testing.histories.journals import check_journal
from fastness.testing.histories.leases import check_lease
from fastness.testing.histories.mail import MailboxEntry, check_mailbox
from fastness.testing.histories.queues import check_queue
from fastness.wire.leases import AcquireLease
from fastness.wire.mail import ReadMail

CLIENTS = 8
WAITERS = 2
SECONDS = 0.9  # How long the clients work, at least.
LEASE_SECONDS = 0.35  # Shorter than some pauses.
STUCK_SECONDS = 30.0  # A waiter that got nothing by then, after the last fault, is stuck.
DEADLINE_SECONDS = 120.0  # Of everything that must end, however slow the machine is.
LONG_PAUSE_SECONDS = 3.6  # PostgreSQL ends the transaction of a process that was paused for that long.
FAULT_WEIGHTS = {
    "kill": 2,
    "pause": 4,
    "end sessions": 2,
    "cut database": 2,
    "cut clients": 2,
    "mute database": 3,
    "mute clients": 3,
    "hold database": 2,
    "hold clients": 1,
}


class Plan:
    """What happens in one history, by its seed."""

    def __init__(self, seed: int, servers: int, faults: dict[str, int] | None = None) -> None:
        self.seed = seed
        chance = random.Random(seed)
        weights = FAULT_WEIGHTS if faults is None else faults
        self.faults: list[list[tuple[float, str, float]]] = []  # By server: the pause before it, its name and length.
        counts = [chance.choice((0, 1, 1, 2)) if weights else 0 for _ in range(servers)]
        if weights and not any(counts):
            counts[0] = 1
        for number in counts:
            names = chance.choices(list(weights), list(weights.values()), k=number) if number else []
            names.sort(key="kill".__eq__)  # A server that is killed has no other fault afterwards.
            self.faults.append([(chance.uniform(0.05, 0.3), name, self._seconds(chance, name)) for name in names])

    @staticmethod
    def _seconds(chance: random.Random, name: str) -> float:
        if name == "pause" and chance.random() < 0.07:
            return LONG_PAUSE_SECONDS
        return chance.uniform(0.2, 0.8) if name == "pause" else chance.uniform(0.05, 0.6)

    def __str__(self) -> str:
        faults = [
            f"server {number}: {name} after {pause:.2f} s for {seconds:.2f} s"
            for number, some in enumerate(self.faults)
            for pause, name, seconds in some
        ]
        return f"--history-seed {self.seed}: " + ("; ".join(faults) or "no faults")


class Task:
    """A function in a thread of its own, which does not keep the process alive."""

    def __init__(self, work: Callable[..., None], *args: Any) -> None:
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work, args), daemon=True)
        self._thread.start()

    def _run(self, work: Callable[..., None], args: tuple[Any, ...]) -> None:
        try:
            work(*args)
        except BaseException as error:
            self._error = error

    def result(self, seconds: float) -> None:
        """Wait until it has ended; raises its error, or TimeoutError."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            raise TimeoutError
        if self._error is not None:
            raise self._error


class ServerHistory:
    """Runs the clients and faults of one plan, and checks the history."""

    def __init__(self, fleet: Any, plan: Plan, *, stuck_seconds: float = STUCK_SECONDS) -> None:
        self.history = History()
        self.plan = plan
        self.errors: Counter[str] = Counter()
        self.fleet = fleet
        self.stuck_seconds = stuck_seconds
        self.stopping = threading.Event()  # The clients end.
        self.is_abandoned = False  # The waiters end, too.
        # Servers are reused, so each history has its own names.
        self.name = f"h{plan.seed}-{time.monotonic_ns()}"
        self.registers = [f"state:{self.name}-a", f"state:{self.name}-b", f"entity:{self.name}"]
        self.jobs, self.waited, self.lease = f"{self.name}-jobs", f"{self.name}-waited", f"{self.name}-lease"
        self.world, self.mailbox = f"{self.name}-world", f"{self.name}-bob"

    def run(self, faults: dict[str, Callable[..., None]]) -> None:
        """Run everything until the faults are over and the queues are empty."""
        self._prepare()
        try:
            waiters = [Task(Client(self, f"waiter-{n}").wait_for_message) for n in range(WAITERS)]
            clients = [Task(Client(self, f"client-{n}").work) for n in range(CLIENTS)]
            clients.append(Task(Client(self, "putter").put_for_waiters, WAITERS))
            disturbing = [Task(self._disturb, server, faults) for server in range(len(self.fleet.servers))]
            self.stopping.wait(SECONDS)
            for each in disturbing:
                each.result(DEADLINE_SECONDS)
            for server in self.fleet.servers:
                server.wait_until_ready()
            self.stopping.set()
            for each in clients:
                each.result(DEADLINE_SECONDS)
            self._check_not_stuck(waiters)
            Client(self, "reader").read_everything(self.fleet.servers)
            for queue in (self.jobs, self.waited):
                Client(self, "drain").drain(queue)
        except BaseException:
            self.stopping.set()
            self.is_abandoned = True
            raise

    def _prepare(self) -> None:
        plane = self.fleet.servers[0].planes["patient"]
        policy = QueuePolicy(max_attempts=1_000)
        for queue in (self.jobs, self.waited):
            plane.queue(queue).set_policy(policy)
        plane.world(self.world).create()

    def _disturb(self, number: int, faults: dict[str, Callable[..., None]]) -> None:
        server = self.fleet.servers[number]
        for pause, name, seconds in self.plan.faults[number]:
            self.stopping.wait(pause)
            server.wait_until_ready()  # One that was killed before.
            faults[name](self.fleet, server, seconds)

    def _check_not_stuck(self, waiters: list[Task]) -> None:
        deadline = time.monotonic() + self.stuck_seconds
        for waiter in waiters:
            try:
                waiter.result(max(deadline - time.monotonic(), 0))
            except TimeoutError:
                message = f"a waiting consumer got nothing for {self.stuck_seconds:g} s after the faults"
                waits = [each for each in self.history.operations if each.key == self.waited]
                raise Violation(f"Queue {self.waited}: {message}", waits) from None

    def check(self) -> None:
        """Check everything that the clients saw; raises Violation."""
        for register in self.registers:
            check_register(self.history, register)
        for queue in (self.jobs, self.waited):
            check_queue(self.history, queue, late_ms=LOCK_LATE_MS_MAX)  # Both were drained.
            check_bodies(self.history, queue)
        check_lease(self.history, self.lease)
        check_journal(self.history, self.world, self._records())
        check_mailbox(
            self.history,
            self.mailbox,
            left=self._mails(),
            end_ms=time.time_ns() // 1_000_000,
            ttl_ms=round(MAIL_TTL_SECONDS * 1_000),
        )

    def plane(self) -> Plane:
        plane: Plane = self.fleet.servers[-1].planes["patient"]
        return plane

    def _records(self) -> list[tuple[int, Any]]:
        return [entry_of(record) for record in self.plane().world(self.world).read()]

    def _mails(self) -> list[MailboxEntry]:
        mails = self.plane().mailbox(self.mailbox).read(limit=256, peek=True)
        return [MailboxEntry(mail.sequence, mail.id, mail.sent_ms, mail.expires_ms) for mail in mails]


def entry_of(record: Any) -> tuple[int, Any]:
    """The height of a record, and its value if an append wrote it."""
    return record.height, cbor2.loads(record.value) if record.kind == "entry" else None


def check_bodies(history: History, queue: str) -> None:
    """Check that every put, also one that was repeated, has stored at most one message.

    Raises:
        Violation: a body was delivered under two ids.
    """
    ids: dict[str, dict[str, Operation]] = defaultdict(dict)
    for operation in history.operations:
        if operation.key == queue and operation.kind == "lease" and operation.outcome is Outcome.OK:
            for id, _, _, _, body in operation.result:
                ids[str(body)].setdefault(id, operation)
    for body, leases in ids.items():
        if len(leases) > 1:
            puts = [each for each in history.operations if each.kind == "put" and str(each.argument) == body]
            raise Violation(f"Queue {queue}: {body} was stored {len(leases)} times", [*puts, *leases.values()])


class Client:
    """A client that sends most calls to its server, and others to random ones.

    If all were sent to random ones, every client would soon wait for the same server.
    """

    def __init__(self, run: ServerHistory, name: str) -> None:
        self.name = name
        self._run = run
        self._history = run.history
        self._servers = run.fleet.servers
        self._chance = random.Random(f"{run.plan.seed}/{name}")
        self._home = self._chance.choice(self._servers)
        self._numbers = 0
        self._seen: dict[str, tuple[Any, Any]] = {}  # The last value of a register, with its ETag or version.
        self._held: list[tuple[Any, ...]] = []  # Messages that are not settled yet: id, lease and fence.
        self._leases: list[tuple[str, int]] = []

    def plane(self) -> Plane:
        """A random server, and how patient this client is with it."""
        server = self._home if self._chance.random() < 0.7 else self._chance.choice(self._servers)
        plane: Plane = server.planes[self._chance.choice(("patient", "impatient"))]
        return plane

    def value(self) -> str:
        self._numbers += 1
        return f"{self.name}/{self._numbers}"

    def record(
        self,
        kind: str,
        key: str,
        argument: Any,
        call: Callable[[], Any],
        *,
        refused: type[FastnessError] | None = None,
    ) -> Any:
        """Make a call and record it; returns its result, or None. An error `refused` is the answer False."""
        operation = self._history.invoke(self.name, kind, key, argument)
        try:
            result = call()
        except FastnessError as error:
            self._run.errors[error.code] += 1
            if refused is not None and isinstance(error, refused):
                self._history.ok(operation, False)
            else:
                self._history.raised(operation, error)
            return None
        self._history.ok(operation, result)
        return result

    def work(self) -> None:
        kinds = (self.register, self.put, self.consume, self.settle, self.own, self.append, self.mail)
        while not self._run.stopping.is_set():
            self._chance.choices(kinds, (6, 3, 4, 3, 2, 3, 2))[0]()

    # Registers.

    def register(self) -> None:
        key, choice = self._chance.choice(self._run.registers), self._chance.random()
        is_entity = key.startswith("entity:")
        if key not in self._seen or choice < 0.4:
            self.read_register(key, self.plane())
        elif choice < 0.8:
            self._compare_and_set(key, is_entity)
        else:
            value, plane, name = self.value(), self.plane(), key.partition(":")[2]
            if is_entity:
                self.record("write", key, value, lambda: plane.entities.write("register", name, {"v": value}).versions)
            else:
                self.record("write", key, value, lambda: plane.state(name).update(value).version)

    def read_register(self, key: str, plane: Plane) -> None:
        name = key.partition(":")[2]
        seen: list[tuple[Any, Any]] = []

        def read() -> Any:
            if key.startswith("entity:"):
                entity = plane.entities.get("register", name)
                seen.append((None, 0) if entity is None else (entity["v"], entity.version))
            else:
                document = plane.state(name).get()
                seen.append((None, None) if document is None else (document.value, document.etag))
            return seen[0][0]

        self.record("read", key, None, read)
        if seen:
            self._seen[key] = seen[0]

    def _compare_and_set(self, key: str, is_entity: bool) -> None:
        (old, version), value, plane, name = self._seen.pop(key), self.value(), self.plane(), key.partition(":")[2]

        def compare() -> bool:
            if is_entity:
                plane.entities.put_if_version("register", name, {"v": value}, expected_version=version)
            elif version is None:
                plane.state(name).update(value, if_absent=True)
            else:
                plane.state(name).update(value, if_match=version)
            return True

        self.record("cas", key, [old, value], compare, refused=VersionConflict if is_entity else CasMismatch)

    # The queue.

    def put(self) -> None:
        body = self.value()
        if self._chance.random() < 0.5:
            self.put_repeatedly(self._run.jobs, body, attempts=4)
        else:
            plane = self.plane()
            self.record("put", self._run.jobs, body, lambda: plane.queue(self._run.jobs).put(body).id)

    def put_repeatedly(self, queue: str, body: str, attempts: int) -> bool:
        """Put under an idempotency key, at another server after each failure: one put, however often it is sent."""
        operation, is_unknown = self._history.invoke(self.name, "put", queue, body), False
        for _ in range(attempts):
            try:
                id = self.plane().queue(queue).put(body, idempotency_key=body).id
            except FastnessError as error:
                self._run.errors[error.code] += 1
                is_unknown = is_unknown or error.retry is RetryAdvice.IDEMPOTENT
            else:
                self._history.ok(operation, id)
                return True
        self._history.unknown(operation) if is_unknown else self._history.failed(operation)
        return False

    def consume(self) -> None:
        limit = self._chance.choice((1, 1, 3))
        wait_seconds = self._chance.choice((0.0, 0.0, 0.0, 0.1))
        self._held += self.receive(self._run.jobs, limit, wait_seconds, LEASE_SECONDS)
        while len(self._held) > 4:  # Otherwise some wait until their leases have ended.
            self.settle()

    def receive(self, queue: str, limit: int, wait_seconds: float, visibility_seconds: float) -> list[tuple[Any, ...]]:
        plane = self.plane()
        found: list[tuple[Any, ...]] = []

        def receive() -> list[list[Any]]:
            messages = plane.queue(queue).receive_many(
                limit,
                wait_seconds=wait_seconds,
                visibility_seconds=visibility_seconds,
                owner=self.name,
                extend_for_seconds=0,
            )
            found.extend((message.id, message.lease.lease_id, message.fence) for message in messages)
            return [
                [each.id, each.fence, each.expires_ms - round(visibility_seconds * 1_000), each.expires_ms, each.json()]
                for each in messages
            ]

        self.record("lease", queue, None, receive)
        return found

    def settle(self) -> None:
        if not self._held:
            return
        held = self._held.pop(self._chance.randrange(len(self._held)))
        choice = self._chance.random()
        if choice < 0.15:
            self._call_held("extend", self._run.jobs, held)
            self._held.append(held)
        else:
            self._call_held("nack" if choice < 0.3 else "ack", self._run.jobs, held)

    def _call_held(self, kind: str, queue: str, held: tuple[Any, ...]) -> bool:
        """Settle or extend a message at any server; returns whether it was answered with success."""
        id, lease_id, fence = held
        message = self.plane().queue(queue).held(id, lease_id=lease_id, fence=fence)
        answered: list[bool] = []

        def call() -> Any:
            result = None
            if kind == "extend":
                result = message.extend(LEASE_SECONDS)
            elif kind == "nack":
                message.nack(delay_seconds=0)
            else:
                message.ack()
            answered.append(True)
            return result

        self.record(kind, queue, [id, fence], call)
        return bool(answered)

    def drain(self, queue: str) -> None:
        """Receive and acknowledge until the queue is empty. Leases of messages that no client has settled expire."""
        deadline = time.monotonic() + self._run.stuck_seconds
        while True:
            stats = self._run.plane().queue(queue).stats()
            if not stats.ready + stats.delayed + stats.leased + stats.blocked:
                return
            if time.monotonic() > deadline:
                raise Violation(f"Queue {queue} is never empty: {stats}", [])
            for held in self.receive(queue, 64, 0.5, 5.0):
                self._call_held("ack", queue, held)

    # Consumers that wait.

    def wait_for_message(self) -> None:
        """Wait until a message was received.

        If the answer to its ack is lost, the ack may have happened, and there may be no other message to wait for.
        """
        found: list[tuple[Any, ...]] = []
        while not found and not self._run.is_abandoned:
            found = self.receive(self._run.waited, 1, 3 * STUCK_SECONDS, 1.5)
            for held in found:
                self._call_held("ack", self._run.waited, held)

    def put_for_waiters(self, count: int) -> None:
        for number in range(count):
            self._run.stopping.wait(self._chance.uniform(0.0, SECONDS / count))
            assert self.put_repeatedly(self._run.waited, f"for-waiters/{number}", attempts=1_000)

    # The lease.

    def own(self) -> None:
        """Acquire the lease and use it, or use one that may have ended."""
        if not self._leases or self._chance.random() < 0.7:
            self._acquire()
        if self._leases:
            lease = self._leases[-1] if self._chance.random() < 0.8 else self._chance.choice(self._leases)
            for _ in range(self._chance.choice((1, 2, 3))):
                self._use(*lease)

    def _acquire(self) -> None:
        key, transport, owner = self._run.lease, self.plane()._transport, self.value()
        request = AcquireLease(key, owner, LEASE_SECONDS, self._chance.choice((0.0, 0.1)))
        found: list[Any] = []

        def acquire() -> list[int]:
            granted = transport.call(request)
            found.append((granted.lease_id, granted.fence))
            return [granted.fence, granted.acquired_ms, granted.expires_ms]

        self.record("grant", key, owner, acquire)
        self._leases += found

    def _use(self, lease_id: str, fence: int) -> None:
        key, plane, choice = self._run.lease, self.plane(), self._chance.random()
        held = plane.lease(key).held(lease_id, fence=fence, ttl_seconds=LEASE_SECONDS)
        if choice < 0.3:
            self.record("keepalive", key, fence, lambda: round(held.keepalive().timestamp() * 1_000))
        elif choice < 0.7:
            value = self.value()
            self.record("guarded", key, fence, lambda: plane.state(key).update(value, lease=held).version)
        else:
            self.record("release", key, fence, held.release)

    # The world.

    def append(self) -> None:
        world, choice = self._run.world, self._chance.random()
        handle = self.plane().world(world)
        if choice < 0.3:
            self.record("journal", world, [0, 1_000], lambda: [list(entry_of(each)) for each in handle.read()])
            return
        try:
            head = handle.head()
        except FastnessError as error:
            self._run.errors[error.code] += 1
            return
        values = [self.value() for _ in range(self._chance.choice((1, 1, 3)))]
        self.record("append", world, values, lambda: handle.append(values, expected_head=head))

    # Mail.

    def mail(self) -> None:
        agent, plane, choice = self._run.mailbox, self.plane(), self._chance.random()
        if choice < 0.5:
            id = self.value().replace("/", "-")
            sender = plane.mailbox(f"{self._run.name}-ada")
            self.record(
                "send",
                agent,
                {"id": id, "from": sender.agent},
                lambda: [id, sender.send(agent, id, id=id).duplicate, None],
            )
            return

        def read() -> list[Any]:
            answer = plane._transport.call(ReadMail(agent, -1, 256))
            mails = [[mail.sequence, mail.id, mail.sent_ms, mail.expires_ms] for mail in answer.mails]
            return [mails, None, time.time_ns() // 1_000_000]

        answer = self.record("read", agent, [None, -1, 256], read)
        ids = [mail[1] for mail in answer[0]] if answer else []
        if ids and choice < 0.8:
            some = self._chance.sample(ids, self._chance.randrange(1, len(ids) + 1))
            other = self.plane().mailbox(agent)
            self.record("confirm", agent, some, lambda: other.confirm(some))

    def read_everything(self, servers: list[Any]) -> None:
        """Read the registers at every server: all of them show the same."""
        for server in servers:
            for key in self._run.registers:
                self.read_register(key, server.planes["patient"])
