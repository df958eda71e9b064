"""The function of a task, as workers run it."""

import asyncio
import inspect
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextvars import copy_context
from pathlib import Path
from typing import Any

from fastness.errors import InvalidArgument
from fastness.handles.task_flow import RunningMessage
from fastness.tasks.arguments import TaskArguments, result_form
from fastness.tasks.jobs import Job, running

KeyOf = str | Callable[..., str]  # The name of an argument, or a function of all arguments.


class TaskFunction(TaskArguments):
    """A function with its name in messages, and the options of messages that follow from its arguments."""

    def __init__(self, name: str, function: Callable[..., Any], *, queue: str, keys: Mapping[str, KeyOf]) -> None:
        """`keys` has an entry for `key` and `unique_key`, where they follow from arguments.

        Raises:
            InvalidArgument: one of them is not the name of an argument.
        """
        super().__init__(name, function)
        self.queue = queue
        self.keys = dict(keys)
        self.is_async = inspect.iscoroutinefunction(function)
        for option, key in self.keys.items():
            if isinstance(key, str) and key not in self.signature.parameters:
                said = "concurrency_key" if option == "key" else "unique"
                raise InvalidArgument(
                    f"{said} of task {name} is {key!r}, which is not one of its arguments {self.signature}; name one "
                    "of them, or give a function of them"
                )

    def message_keys(self, args: list[Any], kwargs: dict[str, Any]) -> dict[str, str]:
        """The options `key` and `unique_key` of a call."""
        found = {}
        for option, key in self.keys.items():
            if isinstance(key, str):
                found[option] = str(self.with_defaults(args, kwargs).arguments[key])
            else:
                typed = self.with_defaults(*self.received(args, kwargs))
                found[option] = key(*typed.args, **typed.kwargs)
                if not isinstance(found[option], str):
                    raise InvalidArgument(f"The function for the {option} of task {self.name} must return text")
        return found

    def run(self, message: RunningMessage, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Run it as the job of a message; its result as it is stored."""
        with running(Job(self.name, message)):
            result = self.function(*args, **kwargs)
            return result_form(self.name, asyncio.run(result) if self.is_async else result)

    async def run_async(self, message: RunningMessage, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """`run` for asyncio. A function that is not a coroutine runs on a thread."""
        with running(Job(self.name, message)):
            if self.is_async:
                return result_form(self.name, await self.function(*args, **kwargs))
            return result_form(self.name, await _run_on_thread(self.function, args, kwargs))


def name_of(function: Callable[..., Any]) -> str:
    """The module and name of a function. A script has the name that a worker imports it by."""
    module = getattr(function, "__module__", "") or ""
    if module == "__main__":
        main = sys.modules["__main__"]
        spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
        module = spec.name if spec is not None else Path(file).stem if file else module
    return f"{module}.{getattr(function, '__qualname__', repr(function))}"


async def _run_on_thread(function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The result of a blocking function. Its thread does not keep the process from exiting."""
    outcome: Future[Any] = Future()
    context = copy_context()

    def run() -> None:
        try:
            found = context.run(function, *args, **kwargs)
        except BaseException as error:
            outcome.set_exception(error)
        else:
            outcome.set_result(found)

    outcome.set_running_or_notify_cancel()
    threading.Thread(target=run, name="fastness-task", daemon=True).start()
    return await asyncio.wrap_future(outcome)
