"""Tasks, and the app that they belong to."""

from collections.abc import Callable, Iterable, Mapping
from functools import update_wrapper
from types import TracebackType
from typing import Any, Final, Generic, ParamSpec, Self, TypedDict, TypeVar, Unpack, overload

from fastness.errors import InvalidArgument
from fastness.handles.arguments import checked_items
from fastness.handles.queues import MessageOptions
from fastness.handles.receipts import AsyncPutReceipt
from fastness.handles.sync import task_runs as sync_runs
from fastness.handles.sync.messages import Message
from fastness.handles.sync.plane import Plane
from fastness.handles.sync.receipts import PutReceipt
from fastness.names import checked_name
from fastness.tasks.arguments import json_form
from fastness.tasks.chains import Signature
from fastness.tasks.functions import KeyOf, TaskFunction, name_of
from fastness.tasks.hooks import Hooks, OnError, OnMessage, OnSettled, OnStart
from fastness.tasks.planes import AppPlanes, check_no_loop
from fastness.tasks.registry import TaskRegistry
from fastness.tasks.workers import TaskWorker
from fastness.wire.queues import NewMessage, Schedule
from fastness.wire.tasks import TaskCall

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class TaskOptions(TypedDict, total=False):
    """The options of `task`, which describes them."""

    name: str | None
    queue: str
    max_attempts: int | None
    retry_delay_seconds: float | None
    visibility_seconds: float | None
    priority: int | None
    ttl_seconds: float | None
    concurrency_key: KeyOf | None
    unique: KeyOf | None
    keep_result: bool


class Task(Generic[Parameters, Result]):
    """A function whose calls can be sent to workers. Called plainly, it runs here."""

    def __init__(
        self,
        registry: TaskRegistry,
        function: Callable[Parameters, Result],
        runnable: TaskFunction,
        options: MessageOptions,
        timezone: str,
    ) -> None:
        self.name = runnable.name
        self.queue = runnable.queue
        self.function = function
        update_wrapper(self, function)
        self._registry = registry
        self._runnable = runnable
        self._options = options
        self._timezone = timezone

    def __call__(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        return self.function(*args, **kwargs)

    def send(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> PutReceipt:
        """Put a call into the task's queue. `result(wait_seconds=…)` of the receipt waits for its result.

        Raises:
            InvalidArgument: arguments do not fit the annotations, and nothing was put; or an event loop is running in
                this thread: await `send_async` there.
        """
        return self._registry.put([self._call(args, kwargs)])[0]

    async def send_async(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> AsyncPutReceipt:
        """`send` for asyncio."""
        return (await self._registry.put_async([self._call(args, kwargs)]))[0]

    def send_many(self, calls: Iterable[tuple[Any, ...]]) -> list[PutReceipt]:
        """Put up to 256 calls in one commit; each is a tuple of its arguments."""
        check_no_loop("send_many")
        messages = self._messages(calls)
        return self._registry.planes.get().queue(self.queue).put_many(messages)

    async def send_many_async(self, calls: Iterable[tuple[Any, ...]]) -> list[AsyncPutReceipt]:
        """`send_many` for asyncio."""
        messages = self._messages(calls)
        return await (await self._registry.planes.get_async()).queue(self.queue).put_many(messages)

    def message(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> NewMessage:
        """The message of a call, for code that puts it by itself; `send` puts it.

        Raises:
            InvalidArgument: arguments do not fit the annotations.
        """
        return self._message(self._call(args, kwargs))

    def with_options(self, **options: Unpack[MessageOptions]) -> "Task[Parameters, Result]":
        """The task with other options of `queue.put` for what is sent: delay_seconds, priority, unique_key, …"""
        merged: MessageOptions = {**self._options, **options}
        return Task(self._registry, self.function, self._runnable, merged, self._timezone)

    def schedule(self, name: str, cron: str, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Schedule:
        """Call the task at the times of a cron expression, in the app's time zone; replaces a schedule of that name."""
        check_no_loop("schedule")
        body, options = self._scheduled(args, kwargs)
        queue = self._registry.planes.get().queue(self.queue)
        return queue.schedule(name, cron, body, timezone=self._timezone, **options)

    async def schedule_async(
        self, name: str, cron: str, *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Schedule:
        """`schedule` for asyncio."""
        body, options = self._scheduled(args, kwargs)
        queue = (await self._registry.planes.get_async()).queue(self.queue)
        return await queue.schedule(name, cron, body, timezone=self._timezone, **options)

    def s(self, *args: Any, **kwargs: Any) -> Signature:
        """A call to send later, or a step of a chain. There, the result of the step before comes before `args`."""
        return Signature(self._registry, lambda takes_result: self._call(args, kwargs, takes_result=takes_result))

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, takes_result: bool = False) -> TaskCall:
        """A call as it is stored. With `takes_result`, its first argument is not known yet."""
        options: dict[str, Any] = dict(self._options)
        if takes_result:
            some, named = [json_form(each) for each in args], {key: json_form(each) for key, each in kwargs.items()}
        else:
            some, named = self._runnable.sent(args, kwargs)
            options = {**self._runnable.message_keys(some, named), **options}
        keys_from_result = takes_result and bool(self._runnable.keys)
        return TaskCall(self.name, self.queue, some, named, options, takes_result, keys_from_result)

    def _messages(self, calls: Iterable[tuple[Any, ...]]) -> list[NewMessage]:
        found: list[NewMessage] = []
        for args in checked_items(calls, "write send_many([(argument, …), …])"):
            if not isinstance(args, tuple):
                raise InvalidArgument(
                    f"Each call of send_many is a tuple of arguments, not {type(args).__name__}; write [(argument,), …]"
                )
            found.append(self._message(self._call(args, {})))
        return found

    def _message(self, call: TaskCall) -> NewMessage:
        return self._registry.started([call]).messages[0].message

    def _scheduled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bytes, MessageOptions]:
        """The payload of a scheduled message, and its options."""
        call = self._call(args, kwargs)
        message = self._message(call)
        options: Any = {**call.options, "attributes": message.attributes, "content_type": message.content_type}
        return message.payload, options

    def __repr__(self) -> str:
        return f"<task {self.name} of queue {self.queue}>"


class TaskApp:
    """Tasks, and the plane whose queues have their calls.

    Nothing is opened before the first call is sent or a worker starts. Close it, or use it as a context manager.
    """

    def __init__(
        self,
        target: str | Plane | None = None,
        *,
        token: str | None = None,
        universe: str | None = None,
        timezone: str = "UTC",
    ) -> None:
        """The tasks of one plane.

        Args:
            target: a URL that `connect` or `open` takes, or an open plane. By default the plane of the command line,
                with its token and universe: FASTNESS_URL, the current context, or http://127.0.0.1:9440.
            token: the access token for a server.
            universe: the tenant to work in.
            timezone: the time zone of schedules.
        """
        self._registry = TaskRegistry(AppPlanes(target, token=token, universe=universe))
        self._hooks = Hooks()
        self._timezone = timezone
        self._tasks: dict[str, Task[Any, Any]] = {}

    @property
    def plane(self) -> Plane:
        """The plane, opened when it is first used.

        Raises:
            Closed: the app was closed.
        """
        return self._registry.planes.get()

    @property
    def has_target(self) -> bool:
        """Whether the app was given a URL or a plane."""
        return self._registry.planes.has_target

    @property
    def tasks(self) -> Mapping[str, Task[Any, Any]]:
        """The tasks by their names."""
        return self._tasks

    @overload
    def task(self, function: Callable[Parameters, Result], /) -> Task[Parameters, Result]: ...

    @overload
    def task(
        self, function: None = None, /, **options: Unpack[TaskOptions]
    ) -> Callable[[Callable[Parameters, Result]], Task[Parameters, Result]]: ...

    def task(self, function: Callable[..., Any] | None = None, /, **options: Unpack[TaskOptions]) -> Any:
        """Make a function a task of an app: `@app.task`, `@app.task(queue=…)`; `@fastness.task` is of the default app.

        The default app uses the plane of the command line.

        Args:
            name: its name in messages; by default the module and name of the function. Workers find it by that.
            queue: the queue of its calls; `tasks` by default.
            max_attempts: how often it may fail before its message is a dead letter.
            retry_delay_seconds: the delay after the first failure, from which the back-off of the queue grows.
            visibility_seconds: how soon a call is delivered again whose worker has crashed.
            priority: 0 to 9; 9 is delivered first.
            ttl_seconds: how long a call is kept.
            concurrency_key: the name of an argument, or a function of the arguments that returns text. Calls with the
                same key share `concurrency_per_key` and `rate_per_key` of the queue's policy, and take turns if it is
                `fair`.
            unique: the same for `unique_key`: while a call with the key is not done, another one is not put.
            keep_result: whether the result, or the failure, is kept for the receipt; True by default.
        """

        def make(function: Callable[..., Any]) -> Task[..., Any]:
            return self._add(function, **options)

        return make if function is None else make(function)

    def worker(
        self,
        *,
        concurrency: int = 8,
        queues: Iterable[str] | None = None,
        drain_seconds: float = 10.0,
        delay_on_close_seconds: float | None = None,
        on_error: OnError | None = None,
    ) -> TaskWorker:
        """A worker for the tasks of these queues; of all queues by default.

        Args:
            concurrency: how many calls of each queue run at a time.
            queues: names of queues that tasks of this app have.
            drain_seconds: how long a worker that stops waits for running tasks.
            delay_on_close_seconds: the delay of calls that a worker returns when it stops; at once by default.
            on_error: called with every error and the name of its queue.

        Raises:
            InvalidArgument: the app has no tasks, or none of a queue.
        """
        chosen = self._registry.queues(queues)
        asynchronous = {function.queue for function in self._registry.functions.values() if function.is_async}
        return TaskWorker(
            self._registry.planes,
            [queue for queue in chosen if queue not in asynchronous],
            [queue for queue in chosen if queue in asynchronous],
            self._registry.find,
            hooks=self._hooks,
            concurrency=concurrency,
            drain_seconds=drain_seconds,
            delay_on_close_seconds=delay_on_close_seconds,
            on_error=on_error,
        )

    def on_start(self, function: OnStart) -> OnStart:
        """Call a function when a worker of this app starts: `@app.on_start`. Several hooks run in their order.

        Hooks must be functions, and should be short: they run where a worker does its work. Their errors are logged and
        have no other effect.
        """
        self._hooks.add("on_start", function)
        return function

    def on_message(self, function: OnMessage) -> OnMessage:
        """Call a function with every message before its task runs: `@app.on_message`."""
        self._hooks.add("on_message", function)
        return function

    def on_settled(self, function: OnSettled) -> OnSettled:
        """Call a function with every message that a worker is done with, and its `WorkerOutcome`: `@app.on_settled`."""
        self._hooks.add("on_settled", function)
        return function

    def on_error(self, function: OnError) -> OnError:
        """Call a function with every error of a worker and the name of its queue: `@app.on_error`."""
        self._hooks.add("on_error", function)
        return function

    def on_stop(self, function: OnStart) -> OnStart:
        """Call a function when a worker has stopped and settled its messages: `@app.on_stop`."""
        self._hooks.add("on_stop", function)
        return function

    def run_ready(self, queues: Iterable[str] | None = None) -> int:
        """Run the calls that are ready, and those that they send, in this thread until none is left; how many.

        For tests and scripts. A call that fails is delivered again later, as with a worker. Errors are not raised.
        """
        check_no_loop("run_ready")
        count, names = 0, self._registry.queues(queues)
        while True:
            messages = [message for name in names for message in self.plane.queue(name).receive_many(1)]
            if not messages:
                return count
            for message in messages:
                self._run(message)
            count += len(messages)

    def use(self, plane: Plane) -> None:
        """Use an open plane from now on, for example that of a test. Its owner closes it."""
        self._registry.planes.use(plane)

    def close(self) -> None:
        """Close the plane that the app has opened. Its tasks can be called, and not sent any more."""
        self._registry.planes.close()

    async def close_async(self) -> None:
        """`close` for asyncio."""
        await self._registry.planes.close_async()

    def _add(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        queue: str = "tasks",
        concurrency_key: KeyOf | None = None,
        unique: KeyOf | None = None,
        keep_result: bool = True,
        **message_options: float | None,
    ) -> Task[..., Any]:
        given: Any = {key: each for key, each in message_options.items() if each is not None}
        if keep_result:
            given["keep_result"] = True
        keys = {"key": concurrency_key, "unique_key": unique}
        runnable = TaskFunction(
            name or name_of(function),
            function,
            queue=checked_name("queue", queue),
            keys={option: key for option, key in keys.items() if key is not None},
        )
        self._registry.add(runnable)
        task: Task[..., Any] = Task(self._registry, function, runnable, given, self._timezone)
        self._tasks[task.name] = task
        return task

    def _run(self, message: Message) -> None:
        try:
            sync_runs.run_message(self.plane, message, self._registry.find)
        except Exception as error:
            if not message.settled and not message.lost:
                message.nack(error=error)
        else:
            if not message.settled:
                message.ack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close_async()


DEFAULT_APP: Final = TaskApp()  # Of tasks that name none. Its plane is that of the command line.
task = DEFAULT_APP.task
