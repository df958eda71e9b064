"""What the code of a workflow awaits: calls that are recorded, strands of execution, and groups of them."""

from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from fastness.errors import InvalidArgument, RunCancelled
from fastness.wire import run_records as words
from fastness.wire.requests import Request

if TYPE_CHECKING:
    from fastness.hosts.workflows.retry import Retry

Result = TypeVar("Result")


class Operation(Generic[Result]):
    """Something that the code can await, once it has a result or an error.

    What it stands for begins when it is called, not when it is awaited; awaiting it again returns the same result.
    """

    __slots__ = ("_error", "_value", "_waiting", "is_awaited", "is_done", "made_by")

    def __init__(self) -> None:
        self.is_done = False
        self.is_awaited = False  # Or a group that it is in.
        self.made_by: Strand[Any] | None = None
        self._value: Any = None
        self._error: BaseException | None = None
        self._waiting: list[Callable[[Operation[Any]], None]] | None = None

    def __await__(self) -> Generator[Any, Any, Result]:
        self.note_awaited()
        if not self.is_done:
            yield self
        if self._error is not None:
            raise self._error
        result: Result = self._value
        return result

    def note_awaited(self) -> None:
        """Note that the code waits for it."""
        self.is_awaited = True

    def when_done(self, notify: Callable[["Operation[Any]"], None]) -> None:
        """Call `notify` when it is done, or now."""
        if self.is_done:
            notify(self)
        elif self._waiting is None:
            self._waiting = [notify]
        else:
            self._waiting.append(notify)

    def resolve(self, value: Any) -> None:
        """Give it a result."""
        self._value = value
        self._end()

    def fail(self, error: BaseException) -> None:
        """Give it an error, which is raised where it is awaited."""
        self._error = error
        self._end()

    @property
    def error(self) -> BaseException | None:
        """Its error, if it has failed."""
        return self._error

    @property
    def value(self) -> Any:
        """Its result, if it has one."""
        return self._value

    def _end(self) -> None:
        self.is_done = True
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            for notify in waiting:
                notify(self)


class Call(Operation[Result]):
    """A call of `run` that is recorded: the `number`-th one of the code, with its kind and name."""

    __slots__ = ("kind", "name", "number")

    def __init__(self, kind: str, name: str) -> None:
        super().__init__()
        self.kind = kind
        self.name = name
        self.number = 0  # The scheduler counts.


class StepCall(Call[Result]):
    """A function to run outside of the workflow's code: here, or as a task of a queue."""

    __slots__ = (
        "args",
        "attempts",
        "convert",
        "due_ms",
        "function",
        "is_started",
        "key",
        "kwargs",
        "message_id",
        "queue",
        "retry",
        "timeout",
    )

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        convert: Callable[[Any], Any],
        retry: "Retry | None",
        timeout: float | None,
        queue: str | None,
        key: str | None,
    ) -> None:
        super().__init__(words.STEP, name)
        self.function = function
        self.args = args
        self.kwargs = kwargs
        self.convert = convert
        self.retry = retry
        self.timeout = timeout
        self.queue = queue
        self.key = key
        self.is_started = False  # Its start is recorded, so that no other call gets its id.
        self.attempts = 0  # That have failed.
        self.due_ms: int | None = None  # Of the next attempt.
        self.message_id: str | None = None  # Of the task.


class SleepCall(Call[None]):
    """A timer."""

    __slots__ = ("seconds",)

    def __init__(self, seconds: float) -> None:
        super().__init__(words.SLEEP, "")
        self.seconds = seconds


class WaitCall(Call[Any]):
    """A wait for a signal."""

    __slots__ = ("seconds",)

    def __init__(self, signal: str, seconds: float | None) -> None:
        super().__init__(words.WAIT, signal)
        self.seconds = seconds


class ChildCall(Call[Result]):
    """Another run."""

    __slots__ = ("arguments", "convert", "has_own_id", "id")

    def __init__(
        self, workflow: str, id: str, arguments: bytes, convert: Callable[[Any], Any], *, has_own_id: bool
    ) -> None:
        super().__init__(words.CHILD, workflow)
        self.id = id
        self.has_own_id = has_own_id  # The code has chosen it.
        self.arguments = arguments
        self.convert = convert


class SentCall(Call[None]):
    """Something that is done in the commit of its record: a message, an item, a mail, a signal, or published state."""

    __slots__ = ("published", "request")

    def __init__(self, kind: str, name: str, request: Request[Any] | None, published: bytes | None = None) -> None:
        super().__init__(kind, name)
        self.request = request
        self.published = published


class Strand(Operation[Result]):
    """A coroutine of the workflow: its main one, or a branch of a group."""

    __slots__ = ("_ready", "coroutine")

    def __init__(self, coroutine: Coroutine[Any, Any, Result], ready: "deque[Strand[Any]]") -> None:
        super().__init__()
        self.coroutine = coroutine
        self._ready = ready

    def wake(self, _: Operation[Any]) -> None:
        """Let it run on: what it awaits is done."""
        self._ready.append(self)


class Group(Operation[list[Any]]):
    """Several operations: done when all of them are, or when the first one of them fails.

    When the run is cancelled, it waits for all of them: they may clean up.
    """

    __slots__ = ("_cancelled", "_left", "_members")

    def __init__(self, members: Sequence[Operation[Any]]) -> None:
        super().__init__()
        self._members = members
        self._left = len(members)
        self._cancelled: RunCancelled | None = None
        if not members:
            self.resolve([])
        for member in members:
            member.when_done(self._count)

    def note_awaited(self) -> None:
        super().note_awaited()
        for member in self._members:
            member.note_awaited()

    def _count(self, member: Operation[Any]) -> None:
        self._left -= 1
        if self.is_done:
            return
        if isinstance(member.error, RunCancelled):
            self._cancelled = self._cancelled or member.error
        elif member.error is not None:
            self.fail(member.error)
            return
        if self._left:
            return
        if self._cancelled is not None:
            self.fail(self._cancelled)
        else:
            self.resolve([each.value for each in self._members])


_YEARS: Final = 3_155_760_000.0  # 100: what is longer is a mistake, and timers end in 2262.


def seconds_of(duration: float | timedelta, what: str) -> float:
    """A duration in seconds.

    Raises:
        InvalidArgument: it is negative, or not a duration.
    """
    seconds = duration.total_seconds() if isinstance(duration, timedelta) else duration
    if not 0 <= seconds < _YEARS:
        raise InvalidArgument(f"{what} is {duration!r}; give 0 seconds to 100 years, as a number or a timedelta")
    return seconds


async def as_coroutine(awaitable: Awaitable[Result]) -> Result:
    """A coroutine that awaits another kind of awaitable."""
    return await awaitable
