"""What a workflow must have to be started with its arguments checked and its result converted."""

from typing import Any, Protocol

from fastness.errors import InvalidArgument
from fastness.wire.run_values import encode_value


class WorkflowLike(Protocol):
    """A function that was decorated with `workflow`."""

    @property
    def name(self) -> str: ...

    @property
    def result_type(self) -> Any:
        """The annotation of its result; `Any` if it has none."""
        ...

    def sent(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments of a call in the form that is stored, if they fit the annotations.

        Raises:
            InvalidArgument: they do not fit.
        """
        ...


def name_of(workflow: WorkflowLike | str) -> str:
    """The name of a workflow.

    Raises:
        InvalidArgument: it is neither a name nor a workflow.
    """
    name = workflow if isinstance(workflow, str) else getattr(workflow, "name", None)
    if not isinstance(name, str):
        raise InvalidArgument(f"{workflow!r} is not a workflow; decorate the function with fastness.workflow")
    return name


def result_type_of(workflow: WorkflowLike | str | None) -> Any:
    """The type of a workflow's result; `Any` if it is not known."""
    return Any if workflow is None or isinstance(workflow, str) else workflow.result_type


def encoded_arguments(workflow: WorkflowLike | str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """The arguments of a run as canonical CBOR; those of a workflow that is only named are not checked.

    Raises:
        InvalidArgument, InvalidValue: they do not fit, or cannot be stored.
    """
    name = name_of(workflow)
    sent = (list(args), kwargs) if isinstance(workflow, str) else workflow.sent(args, kwargs)
    return encode_value([*sent], f"An argument of workflow {name}")
