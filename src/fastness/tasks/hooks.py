"""Hooks of an app: functions that its workers call, as in `fastness.handles.workers`."""

import logging
from collections.abc import Callable
from inspect import iscoroutinefunction
from typing import TypeAlias

from fastness.errors import InvalidArgument
from fastness.handles.messages import AsyncMessage
from fastness.handles.sync.messages import Message
from fastness.handles.workers import WorkerOutcome

_log = logging.getLogger("fastness.tasks")

# Those of coroutines, and of queues that have both kinds of tasks, are AsyncMessages.
TaskMessage: TypeAlias = Message | AsyncMessage
OnStart: TypeAlias = Callable[[], object]
OnMessage: TypeAlias = Callable[[TaskMessage], object]
OnSettled: TypeAlias = Callable[[TaskMessage, WorkerOutcome], object]
OnError: TypeAlias = Callable[[Exception, str], object]


class Hooks:
    """The hooks of an app, by their names, in the order in which they were added."""

    def __init__(self) -> None:
        self._functions: dict[str, list[Callable[..., object]]] = {}

    def add(self, name: str, function: Callable[..., object]) -> None:
        """Call `function` as the hook `name`, too.

        Raises:
            InvalidArgument: it is a coroutine function; hooks of an app run on threads and on the event loop.
        """
        if iscoroutinefunction(function):
            raise InvalidArgument(f"{name} is a coroutine function; a hook of an app must be a function")
        self._functions.setdefault(name, []).append(function)

    def together(self, name: str, *more: Callable[..., object] | None) -> Callable[..., object] | None:
        """One function that calls all hooks of this name and `more`; None if there are none. Errors are logged."""
        functions = [*self._functions.get(name, ()), *(function for function in more if function is not None)]
        if not functions:
            return None

        def call(*args: object) -> None:
            for function in functions:
                try:
                    function(*args)
                except Exception:
                    _log.exception("%s raised an error", name)

        return call
