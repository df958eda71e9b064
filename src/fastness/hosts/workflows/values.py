"""Arguments and results of workflows and steps: CBOR in the journal, and the types of annotations in the code."""

import inspect
from collections.abc import Callable
from functools import cached_property, lru_cache
from typing import Any, Final, get_type_hints

import cbor2
import msgspec

from fastness.errors import InvalidArgument, PayloadTooLarge
from fastness.limits import RUN_VALUE_BYTES_MAX
from fastness.tasks.arguments import converted
from fastness.wire.canonical import canonical

Convert = Callable[[Any], Any]

_PLAIN: Final = frozenset({str, int, float, bool, bytes, type(None)})


def plain(value: Any) -> Any:
    """A value as CBOR has it: structs and dataclasses as maps, tuples and sets as lists.

    Raises:
        InvalidArgument: there is no form for it.
    """
    if value.__class__ in _PLAIN:
        return value
    try:
        return msgspec.to_builtins(value, builtin_types=(bytes,))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(
            f"A {type(value).__name__} cannot be recorded ({error}); use text, numbers, bytes, lists, maps, "
            "dataclasses or msgspec.Struct"
        ) from None


def canonical_flat(record: list[Any]) -> bytes:
    """Canonical CBOR of a list whose last part may be nested; 4 µs faster than `canonical` if it is not."""
    if record[-1].__class__ in _PLAIN:
        encoded: bytes = cbor2.dumps(record, canonical=True)
        return encoded
    return canonical(record)


def checked_value(what: str, encoded: bytes) -> bytes:
    """A value that the record of a run, or an item of its inbox, can have.

    Raises:
        PayloadTooLarge: it is too large.
    """
    if len(encoded) > RUN_VALUE_BYTES_MAX:
        raise PayloadTooLarge(
            f"{what} has {len(encoded)} bytes and may have {RUN_VALUE_BYTES_MAX}; store a blob in a step, and give its "
            "hash"
        )
    return encoded


def result_converter(function: Callable[..., Any]) -> Convert:
    """Converts a recorded result of a function to the type of its annotation."""
    try:
        return _cached_converter(function)
    except TypeError:  # It cannot be hashed.
        return _converter(function)


def result_type(function: Callable[..., Any]) -> Any:
    """The annotation of a function's result; `Any` if it has none, or none that can be used."""
    try:
        wanted = get_type_hints(inspect.unwrap(function)).get("return", Any)
    except (TypeError, NameError, AttributeError):  # It is no plain function, or its annotations cannot be resolved.
        return Any
    return wanted if _is_supported(wanted) else Any


def _converter(function: Callable[..., Any]) -> Convert:
    return converter_to(result_type(function), f"The result of {getattr(function, '__name__', function)}")


_cached_converter = lru_cache(maxsize=1_024)(_converter)


def converter_to(wanted: Any, what: str) -> Convert:
    """Converts recorded values to a type."""
    if wanted is Any or wanted is None or wanted is object or not _is_supported(wanted):
        return _unchanged

    def convert(value: Any) -> Any:
        if value.__class__ is wanted and wanted in _PLAIN:
            return value
        try:
            return msgspec.convert(value, wanted)
        except msgspec.ValidationError as error:
            raise InvalidArgument(f"{what} does not fit {wanted}: {error}") from None

    return convert


def _unchanged(value: Any) -> Any:
    return value


def _is_supported(wanted: Any) -> bool:
    try:
        msgspec.json.Decoder(wanted)
    except TypeError:
        return False
    return True


class WorkflowArguments:
    """Converts the arguments of a workflow, without `run`, and its result."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        """The function's signature.

        Raises:
            InvalidArgument: it has no first argument for `run`.
        """
        self._name = name
        self._function = function
        signature = inspect.signature(function)
        parameters = list(signature.parameters.values())
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        if not parameters or parameters[0].kind not in positional:
            raise InvalidArgument(f"The workflow {name} takes no run; write: async def {name}(run, …)")
        self._signature = signature.replace(parameters=parameters[1:])

    def sent(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments of a call as CBOR has them, if they fit the annotations.

        Raises:
            InvalidArgument: they do not fit, or cannot be recorded.
        """
        stored, named = [plain(each) for each in args], {key: plain(each) for key, each in kwargs.items()}
        self.decode(stored, named)
        return stored, named

    def encode(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
        """`sent` as canonical CBOR [args, kwargs]."""
        return canonical([*self.sent(args, kwargs)])

    def decode(self, args: list[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Recorded arguments, as the annotations say.

        Raises:
            InvalidArgument: they do not fit.
        """
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise InvalidArgument(
                f"Workflow {self._name}{self._signature} cannot be called like this: {error}"
            ) from None
        return converted(bound, lambda name, value: self._converters.get(name, _unchanged)(value))

    @cached_property
    def _converters(self) -> dict[str, Convert]:
        # Resolved at the first call: an annotation may name a class that is defined below the function.
        try:
            types = get_type_hints(self._function)
        except NameError:  # Of a local class, which cannot be found by its name.
            return {}
        return {
            name: converter_to(types[name], f"The argument {name} of workflow {self._name}")
            for name in self._signature.parameters
            if name in types
        }
