"""The `run` that a workflow's code gets: everything that it does to the world outside goes through it."""

from collections.abc import Awaitable, Callable, Coroutine
from datetime import UTC, datetime, timedelta
from inspect import iscoroutine
from typing import Any, NoReturn, TypeVar, Unpack, overload
from uuid import UUID

import cbor2

from fastness.errors import InvalidArgument
from fastness.handles.queues import MessageOptions, new_message, payload_of
from fastness.hosts.programs import address_of
from fastness.hosts.workflows.operations import (
    ChildCall,
    Group,
    Operation,
    SentCall,
    SleepCall,
    StepCall,
    WaitCall,
    as_coroutine,
    seconds_of,
)
from fastness.hosts.workflows.retry import Retry
from fastness.hosts.workflows.scheduler import Continued, Scheduler
from fastness.hosts.workflows.values import checked_value, plain, result_converter
from fastness.hosts.workflows.workflow import Workflow
from fastness.names import checked_name
from fastness.wire import run_records as words
from fastness.wire.canonical import canonical
from fastness.wire.inboxes import DomainEvent
from fastness.wire.mail import NewMail, SendMail
from fastness.wire.queues import PutMessages
from fastness.wire.runs import RUN_PREFIX, SignalRun
from fastness.wire.worlds import PutItem

Result = TypeVar("Result")
First = TypeVar("First")
Second = TypeVar("Second")
Third = TypeVar("Third")


class WorkflowRun:
    """One run of a workflow, as its code sees it.

    The code is executed again when the run is restored, and every call gets the answer that was recorded. So it must do
    the same each time: everything with a result that may differ belongs into a step. A call begins when it is made;
    awaiting it waits for its result. What is sent (`put`, `send`, `mail`, `signal`, `state`) is sent exactly once, and
    a child is started, also if they are not awaited. A step must be awaited before the code ends.
    """

    def __init__(
        self, id: str, workflow: Workflow[..., Any], universe: str, scheduler: Scheduler, *, incarnation: int = 1
    ) -> None:
        self.id = id
        # A run that was deleted and started again does not share children with the deleted one.
        self._child_prefix = f"{id}." if incarnation == 1 else f"{id}.{incarnation}."
        self._workflow = workflow
        self._universe = universe
        self._scheduler = scheduler

    @overload
    def step(
        self,
        function: Callable[..., Coroutine[Any, Any, Result]],
        /,
        *args: Any,
        retry: Retry | None = None,
        timeout: float | timedelta | None = None,
        queue: str | None = None,
        key: str | None = None,
        name: str | None = None,
        **kwargs: Any,
    ) -> Operation[Result]: ...

    @overload
    def step(
        self,
        function: Callable[..., Result],
        /,
        *args: Any,
        retry: Retry | None = None,
        timeout: float | timedelta | None = None,
        queue: str | None = None,
        key: str | None = None,
        name: str | None = None,
        **kwargs: Any,
    ) -> Operation[Result]: ...

    def step(
        self,
        function: Callable[..., Any],
        /,
        *args: Any,
        retry: Retry | None = None,
        timeout: float | timedelta | None = None,
        queue: str | None = None,
        key: str | None = None,
        name: str | None = None,
        **kwargs: Any,
    ) -> Operation[Any]:
        """Call a function outside of the workflow's code, and record its result: it is not called again after that.

        A coroutine function runs on the host's event loop, and any other function on a thread. If the host ends before
        the result is recorded, the step is run again.

        Args:
            function: its result is converted as its annotation says, and has at most 64 MiB.
            args: its arguments, with `kwargs`.
            retry: how often it is tried; once by default.
            timeout: how long an attempt may take, in seconds or as a timedelta.
            queue: run it as a task of this queue, on a worker that has the function as a task.
            key: the key of the task, for the limits of the queue's policy.
            name: its name in the history; that of the function by default.
            kwargs: named arguments.

        Raises:
            StepFailed: awaiting it: the last attempt has failed.
        """
        if not callable(function):
            raise InvalidArgument(f"A step is a function, not {type(function).__name__}; write run.step(function, …)")
        if key is not None and queue is None:
            raise InvalidArgument("key is that of a task; give a queue as well")
        call: StepCall[Any] = StepCall(
            str(name or getattr(function, "__name__", type(function).__name__)),
            function,
            args,
            kwargs,
            convert=result_converter(function),
            retry=retry,
            timeout=None if timeout is None else seconds_of(timeout, "timeout"),
            queue=None if queue is None else checked_name("queue", queue),
            key=key,
        )
        self._scheduler.call(call)
        return call

    @overload
    def gather(self, first: Awaitable[First], /) -> Operation[tuple[First]]: ...

    @overload
    def gather(self, first: Awaitable[First], second: Awaitable[Second], /) -> Operation[tuple[First, Second]]: ...

    @overload
    def gather(
        self, first: Awaitable[First], second: Awaitable[Second], third: Awaitable[Third], /
    ) -> Operation[tuple[First, Second, Third]]: ...

    @overload
    def gather(self, *awaitables: Awaitable[Result]) -> Operation[list[Result]]: ...

    def gather(self, *awaitables: Awaitable[Any]) -> Operation[Any]:
        """Wait for all of them: calls of `run`, and coroutines, which run side by side; their results as a list.

        The first one that fails raises its error here at once; the others go on, and their results are ignored.
        """
        self._scheduler.check_running()
        members: list[Operation[Any]] = []
        for awaitable in awaitables:
            if isinstance(awaitable, Operation):
                members.append(awaitable)
            else:
                coroutine: Any = awaitable if iscoroutine(awaitable) else as_coroutine(awaitable)
                members.append(self._scheduler.branch(coroutine))
        return Group(members)

    def sleep(self, duration: float | timedelta) -> Operation[None]:
        """Wait for this time, in seconds or as a timedelta. The run needs no memory and no host meanwhile."""
        call = SleepCall(seconds_of(duration, "duration"))
        self._scheduler.call(call)
        return call

    def wait_for(self, signal: str, timeout: float | timedelta | None = None) -> Operation[Any]:
        """Wait for a signal, and consume it; its value, or None after the timeout.

        A signal that arrived before is kept until it is waited for; the oldest one of the name comes first.
        """
        call = WaitCall(checked_name("signal", signal), None if timeout is None else seconds_of(timeout, "timeout"))
        self._scheduler.call(call)
        return call

    def child(
        self, workflow: "Workflow[..., Result]", /, *args: Any, id: str | None = None, **kwargs: Any
    ) -> Operation[Result]:
        """Start another run, once, and wait for its result. It is cancelled with this one.

        Args:
            workflow: the workflow to run.
            args: its arguments, with `kwargs`.
            id: the id of the run; by default this run's id and the number of the call.
            kwargs: named arguments.

        Raises:
            RunFailed: awaiting it: the run has failed, or was cancelled.
            StepFailed: awaiting it: the run could not be started, as when another one has its id.
        """
        scheduler = self._scheduler
        scheduler.check_running()
        child_id = f"{self._child_prefix}{scheduler.timer_of(scheduler.next_number)}" if id is None else id
        checked_name("run", RUN_PREFIX + child_id)
        if child_id in scheduler.child_ids:
            raise InvalidArgument(f"Run {self.id} has started the child {child_id} before; choose another id")
        scheduler.child_ids.add(child_id)
        arguments = checked_value("The arguments", workflow.arguments.encode(args, kwargs))
        call: ChildCall[Result] = ChildCall(
            workflow.name, child_id, arguments, workflow.convert_result, has_own_id=id is not None
        )
        scheduler.call(call)
        return call

    def signal(self, run_id: str, name: str, value: Any = None) -> Operation[None]:
        """Send a signal to another run."""
        encoded = checked_value("The value of the signal", canonical(plain(value)))
        request = SignalRun(run_id, checked_name("signal", name), encoded, self._universe)
        return self._sent(words.SIGNAL, name, request)

    def put(self, queue: str, body: Any, **options: Unpack[MessageOptions]) -> Operation[None]:
        """Put a message into a queue, with the options of `queue.put`."""
        request = PutMessages(checked_name("queue", queue), [new_message(body, **options)], self._universe)
        return self._sent(words.PUT, queue, request)

    def send(self, world: str, body: Any, *, schema: str = "message", key: str | None = None) -> Operation[None]:
        """Send a domain event to another world: `body` as JSON, or bytes.

        `world@universe` is a world of another universe, if both universes allow it (`plane.hosting.set_policy`).

        Raises:
            StepFailed: awaiting it: the world does not exist or is archived, or a universe does not allow it.
        """
        name, universe = address_of(world)
        payload, _ = payload_of(body)
        item = DomainEvent(schema=schema, key=None if key is None else key.encode(), payload=payload)
        return self._sent(words.SEND, world, PutItem(name, item, universe or self._universe))

    def mail(
        self, to: str, body: Any, *, sender: str | None = None, correlation_id: str | None = None
    ) -> Operation[None]:
        """Send a mail: `body` as JSON, or bytes.

        Args:
            to: the address.
            body: its content.
            sender: the agent that sends it; by default the world of this run, `run:<id>`.
            correlation_id: of the conversation.

        Raises:
            StepFailed: awaiting it: the mailbox has refused it.
        """
        payload, content_type = payload_of(body)
        mail = NewMail(to, payload, content_type=content_type, correlation_id=correlation_id)
        sent_by = checked_name("agent", RUN_PREFIX + self.id if sender is None else sender)
        return self._sent(words.MAIL, to, SendMail(sent_by, [mail], self._universe))

    def state(self, value: Any) -> Operation[None]:
        """Publish a value, which `query` of the run's handle returns from then on."""
        call = SentCall(words.STATE, "", None, checked_value("What is published", canonical(plain(value))))
        self._scheduler.call(call)
        return call

    def now(self) -> datetime:
        """The time of the last record, which is the same each time the code is executed."""
        self._scheduler.check_running()
        return datetime.fromtimestamp(self._scheduler.now_ms / 1_000, UTC)

    def random(self) -> float:
        """A random number from 0 to 1, the same each time the code is executed."""
        self._scheduler.check_running()
        return self._scheduler.random.random()

    def uuid(self) -> UUID:
        """A random UUID, the same each time the code is executed."""
        self._scheduler.check_running()
        return UUID(int=self._scheduler.random.getrandbits(128), version=4)

    def patched(self, name: str) -> bool:
        """Whether to run changed code: False in a run that came here before the change, else True.

        if run.patched("ask twice"):
            answer = await run.step(ask_twice)
        else:
            answer = await run.step(ask)
        """
        return self._scheduler.patched(name)

    def continue_as_new(self, *args: Any, **kwargs: Any) -> NoReturn:
        """End this execution, and start the workflow again with other arguments and an empty history.

        The run keeps its id, and the signals that it has not consumed. Nothing after this call is executed.
        """
        self._scheduler.check_running()
        raise Continued(cbor2.loads(self._workflow.arguments.encode(args, kwargs)))

    def _sent(self, kind: str, name: str, request: Any) -> Operation[None]:
        call = SentCall(kind, name, request)
        self._scheduler.call(call)
        return call

    def __repr__(self) -> str:
        return f"<run {self.id} of workflow {self._workflow.name}>"
