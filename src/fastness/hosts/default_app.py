"""The app of programs, workflows and adapters that name none."""

from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, Final, ParamSpec, TypeVar, overload

from fastness.hosts.adapters import AdapterFunction
from fastness.hosts.apps import HostApp, WorkflowDecorator
from fastness.hosts.programs import Handle, Program
from fastness.hosts.workflows.run import WorkflowRun
from fastness.hosts.workflows.workflow import Workflow

DEFAULT_HOST_APP: Final = HostApp()

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


@overload
def program(handle: Handle, /) -> Program: ...


@overload
def program(name: str | None = None, /) -> Callable[[Handle], Program]: ...


def program(given: Handle | str | None = None, /) -> Any:
    """Make a function a program of the default app: `@program`, or `@program("name")`.

    The function is called with (state, event, context) for every item of its world's inbox, in order, and returns the
    next state. It must be pure: its result depends on its arguments only. What else it wants done, it tells `context`.
    """
    return DEFAULT_HOST_APP.program(given)


@overload
def workflow(
    function: Callable[Concatenate[WorkflowRun, Parameters], Coroutine[Any, Any, Result]], /
) -> Workflow[Parameters, Result]: ...


@overload
def workflow(function: None = None, /, *, name: str | None = None) -> WorkflowDecorator: ...


def workflow(function: Callable[..., Any] | None = None, /, *, name: str | None = None) -> Any:
    """Make an async function a workflow of the default app: `@workflow`, or `@workflow(name="name")`.

    Its first argument is a `WorkflowRun`. Everything that it does to the outside goes through it, and is recorded, so
    that a run continues where it was after a crash, on this host or another one.
    """
    return DEFAULT_HOST_APP.workflow(name=name) if function is None else DEFAULT_HOST_APP.workflow(function)


def adapter(kind: str, /) -> Callable[[AdapterFunction], AdapterFunction]:
    """Make a function the adapter of a kind of effects in the default app: `@adapter("charge_card")`.

    It carries out the effects of this kind that programs ask for with `context.call`, each at least once.
    """
    return DEFAULT_HOST_APP.adapter(kind)
