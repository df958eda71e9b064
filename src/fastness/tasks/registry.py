"""The functions of an app by their names, and the plane of their calls."""

from collections.abc import Iterable
from uuid import uuid4

from fastness.errors import InvalidArgument
from fastness.handles import task_runs
from fastness.handles.receipts import AsyncPutReceipt
from fastness.handles.sync import task_runs as sync_runs
from fastness.handles.sync.receipts import PutReceipt
from fastness.handles.task_control import Reject
from fastness.handles.task_flow import Started, start
from fastness.tasks.functions import TaskFunction, name_of
from fastness.tasks.planes import AppPlanes, check_no_loop
from fastness.wire.tasks import Step


class TaskRegistry:
    """Finds the functions of an app, and puts their calls."""

    def __init__(self, planes: AppPlanes) -> None:
        self.planes = planes
        self.functions: dict[str, TaskFunction] = {}

    def add(self, function: TaskFunction) -> None:
        """Add a function; replaces the same one of a module that was loaded again.

        Raises:
            InvalidArgument: another function has its name.
        """
        other = self.functions.get(function.name)
        if other is not None and name_of(other.function) != name_of(function.function):
            raise InvalidArgument(
                f"Two tasks have the name {function.name}; give one of them another name: task(name=…)"
            )
        self.functions[function.name] = function

    def find(self, name: str) -> TaskFunction:
        """The function of that name.

        Raises:
            Reject: there is none.
        """
        found = self.functions.get(name)
        if found is None:
            known = ", ".join(sorted(self.functions)) or "none"
            raise Reject(f"No task has the name {name}; import its module in the worker. Known tasks: {known}")
        return found

    def queues(self, names: Iterable[str] | None) -> list[str]:
        """The given queues, or all that have tasks.

        Raises:
            InvalidArgument: there are no tasks, or a queue has none.
        """
        known = sorted({function.queue for function in self.functions.values()})
        if not known:
            raise InvalidArgument("The app has no tasks; import the modules that define them")
        chosen = known if names is None else list(dict.fromkeys(names))
        unknown = [name for name in chosen if name not in known]
        if unknown or not chosen:
            raise InvalidArgument(
                f"No task has the queue {', '.join(unknown) or 'that is needed'}; the queues are {', '.join(known)}"
            )
        return chosen

    def put(self, steps: list[Step]) -> list[PutReceipt]:
        """Put the first messages of a chain; their receipts."""
        check_no_loop("send")
        return sync_runs.put_started(self.planes.get(), self.started(steps))

    async def put_async(self, steps: list[Step]) -> list[AsyncPutReceipt]:
        """`put` for asyncio."""
        return await task_runs.put_started(await self.planes.get_async(), self.started(steps))

    def started(self, steps: list[Step]) -> Started:
        """What starts a chain."""
        return start(steps, new_id=lambda: uuid4().hex, find_task=self.find)
