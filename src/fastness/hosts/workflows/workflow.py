"""A workflow: an async function whose steps are recorded."""

import inspect
from collections.abc import Callable, Coroutine
from functools import cached_property, update_wrapper
from typing import Any, Generic, ParamSpec, TypeVar

from fastness.errors import InvalidArgument
from fastness.hosts.workflows.values import Convert, WorkflowArguments, result_converter, result_type
from fastness.names import checked_name
from fastness.wire.runs import WORKFLOW_PREFIX

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class Workflow(Generic[Parameters, Result]):
    """An async function `(run, …)` that hosts run; `plane.workflows.start(workflow, …)` starts a run of it."""

    def __init__(self, function: Callable[..., Coroutine[Any, Any, Result]], *, name: str | None = None) -> None:
        """The workflow of a function.

        Raises:
            InvalidArgument: it is not an async function with a first argument `run`.
        """
        if not inspect.iscoroutinefunction(function):
            raise InvalidArgument(
                f"A workflow is an async function, not {type(function).__name__}; write: async def name(run, …)"
            )
        self.name = checked_name("workflow", name or function.__name__)
        self.program = checked_name("workflow", WORKFLOW_PREFIX + self.name)
        self.function = function
        self.arguments = WorkflowArguments(self.name, function)
        update_wrapper(self, function)

    def __call__(self, run: Any, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Coroutine[Any, Any, Result]:
        """Call the function itself: in the code of another workflow, its steps become those of the caller's run."""
        return self.function(run, *args, **kwargs)

    @cached_property
    def result_type(self) -> Any:
        """The annotation of its result; `Any` if it has none."""
        return result_type(self.function)

    def sent(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments of a call in the form that is stored.

        Raises:
            InvalidArgument: they do not fit the annotations, or cannot be stored.
        """
        return self.arguments.sent(args, kwargs)

    @cached_property
    def convert_result(self) -> Convert:
        """Converts a recorded result to the type of the function's annotation."""
        return result_converter(self.function)

    def __repr__(self) -> str:
        return f"<workflow {self.name}>"
