"""The arguments and results of tasks: JSON in messages, and the types of the function's annotations in Python."""

import inspect
from collections.abc import Callable
from functools import cached_property
from typing import Any, Final, get_type_hints

import msgspec

from fastness.errors import InvalidArgument
from fastness.handles.task_control import Reject

_JSON_TYPES: Final = (str, int, float, bool, type(None))
_BYTES_TYPES: Final = (bytes, bytearray, memoryview)


class TaskArguments:
    """Checks and converts the arguments of one function."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name = name
        self.function = function
        self.signature = inspect.signature(function)

    def sent(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments of a call as JSON has them, if they fit the annotations.

        Raises:
            InvalidArgument: they do not fit, or JSON has no form for them.
        """
        return converted(self._bind(args, kwargs), self._sent)

    def received(self, args: list[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments of a message as the annotations say.

        Raises:
            InvalidArgument: they do not fit.
        """
        return converted(self._bind(tuple(args), kwargs), self._received)

    def with_defaults(self, args: list[Any], kwargs: dict[str, Any]) -> inspect.BoundArguments:
        """The arguments by name, with the defaults of those that were not given."""
        bound = self._bind(tuple(args), kwargs)
        bound.apply_defaults()
        return bound

    @cached_property
    def _types(self) -> dict[str, Any]:
        # Resolved at the first call: an annotation may name a class that is defined below the function.
        return get_type_hints(self.function)

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> inspect.BoundArguments:
        try:
            return self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise InvalidArgument(f"Task {self.name}{self.signature} cannot be called like this: {error}") from None

    def _sent(self, name: str, value: Any) -> Any:
        if self._types.get(name, Any) is Any:
            if not _is_json(value):
                raise InvalidArgument(
                    f"The argument {name} of task {self.name} has no annotation, and JSON has no "
                    f"{type(value).__name__}; annotate it, so that workers get the same type"
                )
            return value
        try:
            plain = msgspec.to_builtins(value, str_keys=True)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidArgument(f"The argument {name} of task {self.name} cannot be JSON: {error}") from None
        self._received(name, plain)
        return plain

    def _received(self, name: str, value: Any) -> Any:
        try:
            return msgspec.convert(value, self._types.get(name, Any), str_keys=True)
        except (msgspec.ValidationError, TypeError) as error:
            raise InvalidArgument(f"The argument {name} of task {self.name} does not fit: {error}") from None


def converted(bound: inspect.BoundArguments, convert: Callable[[str, Any], Any]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments after `convert(name, value)` of each."""
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            bound.arguments[name] = tuple([convert(name, each) for each in value])
        elif kind is inspect.Parameter.VAR_KEYWORD:
            bound.arguments[name] = {key: convert(name, each) for key, each in value.items()}
        else:
            bound.arguments[name] = convert(name, value)
    return list(bound.args), bound.kwargs


def json_form(value: Any) -> Any:
    """An argument of a step as JSON has it. It is checked against the annotations when the step is put or received.

    Raises:
        InvalidArgument: JSON has no form for it.
    """
    try:
        return msgspec.to_builtins(value, str_keys=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"An argument cannot be JSON: {error}") from None


def result_form(task: str, value: Any) -> Any:
    """The result of a task as it is stored: bytes as they are, and what JSON has.

    Raises:
        Reject: JSON has no form for it.
    """
    if isinstance(value, _BYTES_TYPES):
        return bytes(value)
    try:
        return msgspec.to_builtins(value, str_keys=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise Reject(f"The result of task {task} cannot be JSON ({error}); return bytes, or what JSON has") from None


def _is_json(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(each) for key, each in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_json, value))
    return isinstance(value, _JSON_TYPES)
