"""Random sequences of SQS calls answer as the plain model does, on standard and FIFO queues, under a manual clock."""

import asyncio
import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count, repeat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fastness.errors import FastnessError
from fastness.kv import Database
from fastness.layers import queues, sqs
from fastness.layers.queues import QueueKey
from fastness.plane.open import Options, open_plane_async
from fastness.server.authorization import AllowAll
from fastness.server.context import ServerContext
from fastness.server.sqs.actions import SqsActions
from fastness.server.sqs.caller import SqsCaller
from fastness.server.sqs.errors import SqsError, sqs_error
from fastness.testing.clock import ManualClock
from tests.properties.sqs_model import Message, Queue, Refused, SqsModel

BASE = "http://127.0.0.1/sqs"
ARN = "arn:aws:sqs:us-east-1:000000000000:"
BODIES = st.sampled_from(["one", "two", "three", "čtyři", "x" * 2_000])
RETENTIONS = st.sampled_from([60, 300, 300, 345_600])
SECONDS = st.sampled_from([0, 1, 5, 30])
STALE = {"MessageNotInflight", "InvalidParameterValue", "ReceiptHandleIsInvalid"}  # Of a handle that is not in use.


class SqsMachine(RuleBasedStateMachine):
    """Calls the actions and the model in turn."""

    fifo: bool
    urls: Iterator[str]
    universes = count()  # Machines may share a database.

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.model = SqsModel()
        self.handles: list[tuple[str, str]] = []  # Queue and receipt handle, also of older receives.
        self.known: set[str] = set()  # Ids of messages.
        self.runner = asyncio.Runner()
        self.transport = self.runner.run(open_plane_async(next(self.urls), Options(clock=self.clock)))
        self.actions = SqsActions(ServerContext(self.transport))
        self.caller = SqsCaller(
            authorizer=AllowAll(), universe=f"universe-{next(self.universes)}", base_url=BASE, region="us-east-1"
        )
        self.suffix = ".fifo" if self.fifo else ""

    def teardown(self) -> None:
        self.runner.run(self.transport.close())
        self.runner.close()

    def call(self, action: str, **parameters: Any) -> dict[str, Any]:
        """The answer of an action; a refusal is raised as the model raises it."""
        try:
            return self.runner.run(self.actions.call(self.caller, action, parameters))
        except SqsError as error:
            raise Refused(error.name.removesuffix("Exception")) from error
        except FastnessError as error:
            raise Refused(sqs_error(error).name.removesuffix("Exception")) from error

    def both(self, ours: Callable[[], Any], model: Callable[[], Any], *, same: set[str] | None = None) -> Any:
        """Call both; they answer, or refuse with the same code, or with two codes of `same`."""
        try:
            answer = ours()
        except Refused as refused:
            with pytest.raises(Refused) as expected:
                model()
            codes = {refused.code, expected.value.code}
            assert len(codes) == 1 or (same is not None and codes <= same), codes
            return None
        model()
        return answer

    def queue_url(self, name: str) -> str:
        return f"{BASE}/000000000000/{name}"

    @property
    def database(self) -> Database:
        return self.transport.services.database

    @property
    def jobs(self) -> str:
        return f"jobs{self.suffix}"

    @property
    def dead(self) -> str:
        return f"dead{self.suffix}"

    def attributes_of(self, queue: Queue) -> dict[str, str]:
        attributes = {
            "VisibilityTimeout": str(queue.visibility),
            "DelaySeconds": str(queue.delay),
            "MessageRetentionPeriod": str(queue.retention),
        }
        if queue.is_fifo:
            attributes["FifoQueue"] = "true"
            attributes["ContentBasedDeduplication"] = str(queue.content_based).lower()
            attributes["DeduplicationScope"] = "messageGroup" if queue.by_group else "queue"
        if queue.receives_max is not None:
            policy = {"deadLetterTargetArn": f"{ARN}{queue.dead_letter_queue}", "maxReceiveCount": queue.receives_max}
            attributes["RedrivePolicy"] = json.dumps(policy)
        return attributes

    def create(self, queue: Queue) -> None:
        self.both(
            lambda: self.call("CreateQueue", QueueName=queue.name, Attributes=self.attributes_of(queue)),
            lambda: self.model.create(queue),
        )

    @initialize(
        visibility=SECONDS,
        delay=st.sampled_from([0, 0, 10]),
        retention=RETENTIONS,
        content_based=st.booleans(),
        by_group=st.booleans(),
        receives_max=st.sampled_from([None, 1, 2, 3, 3]),
        dead_retention=RETENTIONS,
    )
    def create_queues(
        self,
        *,
        visibility: int,
        delay: int,
        retention: int,
        content_based: bool,
        by_group: bool,
        receives_max: int | None,
        dead_retention: int,
    ) -> None:
        self.create(Queue(self.dead, self.model.now_ms, visibility=5, retention=dead_retention))
        self.create(
            Queue(
                self.jobs,
                self.model.now_ms,
                visibility=visibility,
                delay=delay,
                retention=retention,
                content_based=content_based and self.fifo,
                by_group=by_group and self.fifo,
                receives_max=receives_max,
                dead_letter_queue=None if receives_max is None else self.dead,
            )
        )

    # Sends.

    @rule(
        body=BODIES,
        delay=st.sampled_from([None, 0, 5, 60]),
        group=st.sampled_from("abc"),
        deduplication=st.sampled_from([None, "1", "2", "3", "4", "5", "6"]),
    )
    def send(self, body: str, delay: int | None, group: str, deduplication: str | None) -> None:
        parameters = self.entry(body, delay, group, deduplication)
        self.check_send(
            lambda: self.call("SendMessage", QueueUrl=self.queue_url(self.jobs), **parameters),
            body,
            delay,
            group,
            deduplication,
        )

    @rule(
        entries=st.lists(
            st.tuples(BODIES, st.sampled_from([None, 0, 5]), st.sampled_from("abc"), st.sampled_from("123456789")),
            min_size=1,
            max_size=10,
        )
    )
    def send_batch(self, entries: list[tuple[str, int | None, str, str]]) -> None:
        sent = self.call(
            "SendMessageBatch",
            QueueUrl=self.queue_url(self.jobs),
            Entries=[{"Id": str(number), **self.entry(*entry)} for number, entry in enumerate(entries)],
        )
        assert not sent.get("Failed")
        by_id = {each["Id"]: each for each in sent["Successful"]}
        for number, entry in enumerate(entries):
            self.check_send(lambda: by_id[str(number)], *entry)  # noqa: B023

    def entry(self, body: str, delay: int | None, group: str, deduplication: str | None) -> dict[str, Any]:
        parameters: dict[str, Any] = {"MessageBody": body}
        if self.fifo:
            parameters["MessageGroupId"] = group
            if deduplication is not None:
                parameters["MessageDeduplicationId"] = deduplication
        elif delay is not None:
            parameters["DelaySeconds"] = delay
        return parameters

    def check_send(
        self, send: Callable[[], Any], body: str, delay: int | None, group: str, deduplication: str | None
    ) -> None:
        in_group = group if self.fifo else None
        first: list[str | None] = []
        answer = self.both(
            send, lambda: first.append(self.model.is_duplicate(self.jobs, body, in_group, deduplication))
        )
        if answer is None:
            return
        id = answer["MessageId"]
        assert answer["MD5OfMessageBody"] == hashlib.md5(body.encode(), usedforsecurity=False).hexdigest()
        if first[0] is not None:
            assert id == first[0]
            return
        assert id not in self.known
        self.known.add(id)
        self.model.send(
            self.jobs,
            id,
            body,
            delay=None if self.fifo else delay,
            group=in_group,
            deduplication=deduplication,
        )

    # Receives.

    @rule(
        dead=st.sampled_from([False, False, False, True]),
        count=st.integers(1, 10),
        visibility=st.sampled_from([None, None, 0, 2, 20, 100]),
    )
    def receive(self, dead: bool, count: int, visibility: int | None) -> None:
        name = self.dead if dead else self.jobs
        parameters: dict[str, Any] = {"MaxNumberOfMessages": count, "MessageSystemAttributeNames": ["All"]}
        if visibility is not None:
            parameters["VisibilityTimeout"] = visibility
        answer = self.both(
            lambda: self.call("ReceiveMessage", QueueUrl=self.queue_url(name), **parameters),
            lambda: self.model.counts(name),
        )
        if answer is None:
            return
        received = answer.get("Messages", [])
        expected = self.model.receive(name, count, visibility)
        assert [each["MessageId"] for each in received] == [each.id for each in expected]
        for ours, message in zip(received, expected, strict=True):
            self.check_message(ours, message, name)
            handle = ours["ReceiptHandle"]
            assert (name, handle) not in self.handles
            message.handles[handle] = self.model.now_ms
            self.handles.append((name, handle))

    @rule(
        body=BODIES,
        group=st.sampled_from("abc"),
        seconds=st.sampled_from([0, 60, 180, 299]),
        later_seconds=st.sampled_from([0, 60, 180, 299]),
        deletion=st.sampled_from([None, None, None, "begun", "finished"]),
    )
    def receive_too_often(self, body: str, group: str, seconds: int, later_seconds: int, deletion: str | None) -> None:
        """Receive a message as often as it may be, and then once more, when its dead-letter queue may be deleted."""
        queue = self.model.queues.get(self.jobs)
        if queue is None or queue.receives_max is None:
            return
        self.send(body, 0, group, f"{self.model.now_ms}")
        self.advance(queue.delay)
        for _ in range(queue.receives_max):
            self.receive(dead=False, count=10, visibility=0)
        self.advance(seconds)
        if deletion is not None:
            self.delete_dead_letter_queue(is_finished=deletion == "finished")
        self.receive(dead=False, count=10, visibility=0)
        self.advance(later_seconds)
        self.receive(dead=True, count=10, visibility=0)

    def check_message(self, ours: dict[str, Any], message: Message, name: str) -> None:
        attributes = ours["Attributes"]
        assert ours["Body"] == message.body
        if name == self.jobs:
            assert attributes["ApproximateReceiveCount"] == str(message.receives)
            assert attributes["SentTimestamp"] == str(self.clock_ms(message.sent_ms))
            assert message.first_received_ms is not None
            assert attributes["ApproximateFirstReceiveTimestamp"] == str(self.clock_ms(message.first_received_ms))
        if self.fifo:
            assert attributes["MessageGroupId"] == message.group

    def clock_ms(self, model_ms: int) -> int:
        return self.clock.now_ms() - self.model.now_ms + model_ms

    # Deletes and visibility.

    @precondition(lambda self: self.handles)
    @rule(choice=st.integers(0, 1_000_000), recent=st.booleans())
    def delete(self, choice: int, recent: bool) -> None:
        name, handle = self.chosen(choice, recent)
        if self.is_free(name, handle):
            with suppress(Refused):
                self.call("DeleteMessage", QueueUrl=self.queue_url(name), ReceiptHandle=handle)
            return
        self.both(
            lambda: self.call("DeleteMessage", QueueUrl=self.queue_url(name), ReceiptHandle=handle),
            lambda: self.model.delete(name, handle),
            same=STALE,
        )

    @precondition(lambda self: self.handles)
    @rule(choices=st.lists(st.integers(0, 1_000_000), min_size=1, max_size=10))
    def delete_batch(self, choices: list[int]) -> None:
        handles = {self.chosen(choice, True)[1] for choice in choices if self.chosen(choice, True)[0] == self.jobs}
        entries = [{"Id": str(number), "ReceiptHandle": handle} for number, handle in enumerate(sorted(handles))]
        if not entries or self.jobs not in self.model.queues:
            return
        answer = self.call("DeleteMessageBatch", QueueUrl=self.queue_url(self.jobs), Entries=entries)
        failed = {each["Id"] for each in answer.get("Failed", [])}
        for entry in entries:
            if self.is_free(self.jobs, entry["ReceiptHandle"]):
                continue
            try:
                self.model.delete(self.jobs, entry["ReceiptHandle"])
            except Refused:
                assert entry["Id"] in failed
            else:
                assert entry["Id"] not in failed

    @precondition(lambda self: self.handles)
    @rule(choice=st.integers(0, 1_000_000), recent=st.booleans(), seconds=SECONDS)
    def change_visibility(self, choice: int, recent: bool, seconds: int) -> None:
        name, handle = self.chosen(choice, recent)
        self.both(
            lambda: self.call(
                "ChangeMessageVisibility",
                QueueUrl=self.queue_url(name),
                ReceiptHandle=handle,
                VisibilityTimeout=seconds,
            ),
            lambda: self.model.change_visibility(name, handle, seconds),
        )

    @rule(
        group=st.sampled_from("abc"),
        count=st.integers(2, 10),
        choice=st.integers(0, 9),
        seconds=SECONDS,
        advanced=st.sampled_from([0, 0, 5, 40]),
    )
    def change_one_of_several(self, group: str, count: int, choice: int, seconds: int, advanced: int) -> None:
        """Receive messages of a group, let one be visible sooner, later or again, and receive what is visible then."""
        queue = self.model.queues.get(self.jobs)
        if queue is None:
            return
        self.send_batch([("one", None, group, f"{len(self.known)}-{number}") for number in range(3)])
        self.advance(queue.delay)
        before = len(self.handles)
        self.receive(dead=False, count=count, visibility=40)
        received = len(self.handles) - before
        if received:
            self.advance(advanced)
            self.sweep(self.jobs)  # Messages that are too old are gone.
            self.change_visibility(before + choice % received, recent=False, seconds=seconds)
            self.receive(dead=False, count=10, visibility=5)

    def is_free(self, name: str, handle: str) -> bool:
        """Whether SQS may accept or refuse a delete: an old handle of a FIFO queue."""
        return self.fifo and name in self.model.queues and not self.model.has_handle(name, handle)

    def chosen(self, choice: int, recent: bool) -> tuple[str, str]:
        handles = self.handles[-10:] if recent else self.handles
        return handles[choice % len(handles)]

    # Queues.

    @rule(
        visibility=st.sampled_from([None, 0, 3, 40]),
        retention=st.sampled_from([None, 60, 120, 345_600]),
        receives_max=st.sampled_from([None, 1, 2, 5]),
    )
    def set_attributes(self, visibility: int | None, retention: int | None, receives_max: int | None) -> None:
        queue = self.model.queues.get(self.jobs)
        if queue is None:
            return
        if visibility is not None:
            queue.visibility = visibility
        if retention is not None:
            queue.retention = min(retention, queue.retention)  # A longer one may bring expired messages back.
            self.model.expire(queue)
        if receives_max is not None and self.dead in self.model.queues:
            queue.receives_max, queue.dead_letter_queue = receives_max, self.dead
        attributes = self.attributes_of(queue)
        for fixed in ("FifoQueue", "DelaySeconds"):
            attributes.pop(fixed, None)
        if self.dead not in self.model.queues:  # A RedrivePolicy cannot name a queue that does not exist.
            attributes.pop("RedrivePolicy", None)
        self.call("SetQueueAttributes", QueueUrl=self.queue_url(self.jobs), Attributes=attributes)

    @rule()
    def purge(self) -> None:
        self.both(
            lambda: self.call("PurgeQueue", QueueUrl=self.queue_url(self.jobs)),
            lambda: self.model.purge(self.jobs),
        )

    @rule(body=BODIES, group=st.sampled_from("abc"), deduplication=st.sampled_from("123"))
    def send_again_after_a_purge(self, body: str, group: str, deduplication: str) -> None:
        """The second message is a new one."""
        self.send(body, 0, group, deduplication)
        self.purge()
        self.send(body, 0, group, deduplication)
        self.receive(dead=False, count=10, visibility=0)

    @rule(again=st.booleans())
    def delete_queue(self, again: bool) -> None:
        queue = self.model.queues.get(self.jobs)
        self.both(
            lambda: self.call("DeleteQueue", QueueUrl=self.queue_url(self.jobs)),
            lambda: self.model.delete_queue(self.jobs),
        )
        if queue is None:
            return
        if again:  # Refused for a minute.
            self.create(Queue(self.jobs, 0))
        self.advance(60)
        self.create(Queue(self.jobs, self.model.now_ms, content_based=queue.content_based))

    @rule(is_finished=st.booleans())
    def delete_dead_letter_queue(self, is_finished: bool) -> None:
        """Delete the dead-letter queue, or begin to: other calls come before its messages are removed."""
        queue = QueueKey(self.caller.universe, self.dead)
        if is_finished:
            self.both(
                lambda: self.call("DeleteQueue", QueueUrl=self.queue_url(self.dead)),
                lambda: self.model.delete_queue(self.dead),
            )
        elif self.dead in self.model.queues:
            self.database.transact(sqs.begin_delete, queue)
            self.actions = SqsActions(ServerContext(self.transport))  # Without the settings of the queue in memory.
            self.model.delete_queue(self.dead)

    @precondition(lambda self: self.dead not in self.model.queues)
    @rule(retention=RETENTIONS, seconds=st.sampled_from([0, 60]))
    def create_dead_letter_queue(self, retention: int, seconds: int) -> None:
        queue = QueueKey(self.caller.universe, self.dead)
        key = queues.WorkKey(*queue, "delete")
        while self.database.transact(queues.listed_step, key, sqs.delete_step, "") == 0:
            pass
        self.advance(seconds)
        self.create(Queue(self.dead, self.model.now_ms, visibility=5, retention=retention))

    @rule(seconds=st.sampled_from([0, 1, 4, 10, 30, 60, 180, 299, 300, 345_540]))
    def advance(self, seconds: int) -> None:
        self.clock.advance_ms(seconds * 1_000)
        self.model.advance(seconds * 1_000)

    def sweep(self, name: str) -> None:
        """Process what is due, as the sweeper of a server does: counts follow it."""
        queue = QueueKey(self.caller.universe, name)
        while self.database.transact(queues.due_in, queue) <= 0:
            self.database.transact(queues.sweep, queue)

    @invariant()
    def names_and_counts_agree(self) -> None:
        urls = self.call("ListQueues", QueueNamePrefix="").get("QueueUrls", [])
        assert sorted(urls) == [self.queue_url(name) for name in self.model.names("")]
        for name in self.model.queues:
            self.sweep(name)
            attributes = self.call("GetQueueAttributes", QueueUrl=self.queue_url(name), AttributeNames=["All"])[
                "Attributes"
            ]
            counts, expired = self.model.counts(name), self.model.queues[name].expired
            visible, in_flight, delayed = (
                int(attributes[f"ApproximateNumberOfMessages{each}"]) for each in ("", "NotVisible", "Delayed")
            )
            if self.fifo:  # Messages behind a delayed one of their group may count as visible.
                assert delayed <= counts.delayed + expired
                assert counts.visible + counts.delayed <= visible + delayed <= counts.visible + counts.delayed + expired
            else:
                assert counts.visible <= visible <= counts.visible + expired
                assert counts.delayed <= delayed <= counts.delayed + expired
            assert counts.in_flight <= in_flight <= counts.in_flight + expired


@pytest.mark.parametrize("fifo", [False, True], ids=["standard", "fifo"])
@pytest.mark.examples(40)
def test_calls_in_memory_match_the_model(run_machine: Callable[..., None], fifo: bool) -> None:
    run_machine(SqsMachine, steps=40, fifo=fifo, urls=repeat("memory:"))


@pytest.mark.parametrize("fifo", [False, True], ids=["standard", "fifo"])
@pytest.mark.examples(10)
def test_calls_on_rocksdb_match_the_model(run_machine: Callable[..., None], tmp_path: Path, fifo: bool) -> None:
    run_machine(SqsMachine, steps=40, fifo=fifo, urls=(f"dir:{tmp_path / str(number)}" for number in count()))


@pytest.mark.parametrize("fifo", [False, True], ids=["standard", "fifo"])
@pytest.mark.examples(5)
def test_calls_on_postgres_match_the_model(run_machine: Callable[..., None], postgres_url: str, fifo: bool) -> None:
    run_machine(SqsMachine, steps=40, fifo=fifo, urls=repeat(postgres_url))
