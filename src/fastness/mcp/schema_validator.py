"""Validates values against JSON Schema in bounded time, whatever the schema and the value are.

The keywords are those of the package jsonschema, except for those whose time can grow faster than the value:

    uniqueItems                      compares a text of each item, instead of each item with each other
    pattern, patternProperties       regular expressions of Rust (from pydantic), whose time is linear in the text
    additionalProperties             uses the same regular expressions
    unevaluatedItems, …Properties    of values with a bounded number of members
    multipleOf                       a number that cannot be divided does not fit

References and alternatives can still multiply the work, so a validation ends after a bounded CPU time of its thread.
Call `errors_of` in a thread: it may take that long.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from functools import lru_cache
from math import isfinite
from time import thread_time
from typing import Any, Final

from jsonschema import Draft202012Validator, validators
from jsonschema.exceptions import ValidationError
from pydantic_core import SchemaError, SchemaValidator, core_schema

from fastness.errors import InvalidArgument
from fastness.limits import (
    MCP_PATTERN_CHARACTERS_MAX,
    MCP_UNEVALUATED_MAX,
    MCP_VALIDATION_SECONDS,
)

_CHILD_SECONDS: Final = 1e-5  # What jsonschema needs at least for an item or a property with a schema.

Check = Callable[[Any, Any, Any, Any], Iterable[ValidationError] | None]

_ends_at: ContextVar[float] = ContextVar("_ends_at")  # In CPU time of the thread.


class ValidationTooLong(Exception):
    """The value cannot be validated in the time that a validation may take."""


def errors_of(validator: Any, value: object) -> Iterator[ValidationError]:
    """The errors of a value. Read them in one thread.

    Raises:
        ValidationTooLong: it takes too long.
        InvalidArgument: the schema has a pattern that cannot be used.
    """
    _ends_at.set(thread_time() + MCP_VALIDATION_SECONDS)
    yield from validator.iter_errors(value)


def check_pattern(pattern: str) -> None:
    """Check that a regular expression can be used.

    Raises:
        InvalidArgument: it is not valid, or cannot be matched in linear time.
    """
    _matcher(pattern)


@lru_cache(maxsize=256)
def _matcher(pattern: str) -> SchemaValidator:
    try:
        return SchemaValidator(core_schema.str_schema(pattern=pattern, regex_engine="rust-regex"))
    except SchemaError as error:
        said = str(error).splitlines()[-1].strip().removeprefix("SchemaError: ").removeprefix("error: ")
        raise InvalidArgument(
            f"{pattern[:200]!r}: {said}. Patterns are regular expressions of Rust, which match in linear time: without "
            "look-around and backreferences"
        ) from None


def _is_match(pattern: str, text: str) -> bool:
    _check_time()
    return _matcher(pattern).isinstance_python(text)


def _check_time(more_seconds: float = 0.0) -> None:
    if thread_time() + more_seconds > _ends_at.get():
        raise ValidationTooLong


def _timed(keyword: str, check: Check) -> Check:
    has_children = keyword in _WITH_CHILDREN

    def timed(validator: Any, wanted: Any, instance: Any, schema: Any) -> Iterable[ValidationError] | None:
        # A loop over children whose schema has no keywords would not come back here.
        is_loop = has_children and isinstance(instance, dict | list) and not isinstance(wanted, bool)
        _check_time(len(instance) * _CHILD_SECONDS if is_loop else 0.0)
        return check(validator, wanted, instance, schema)

    return timed


def _unique_items(validator: Any, wanted: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    del validator, schema
    if not wanted or not isinstance(instance, list):
        return
    # Texts, because an attacker can choose many integers with one hash.
    seen: dict[str, int] = {}
    for number, item in enumerate(instance):
        _check_time()
        first = seen.setdefault(json.dumps(_comparable(item), sort_keys=True), number)
        if first != number:
            yield ValidationError(f"items {first} and {number} are equal, and all must differ")
            return


def _comparable(value: Any) -> Any:
    """A value whose JSON is that of all equal values: 1.0 is 1, but not true."""
    if isinstance(value, dict):
        return {name: _comparable(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_comparable(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _pattern(validator: Any, wanted: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    del validator, schema
    if not isinstance(instance, str):
        return
    if len(instance) > MCP_PATTERN_CHARACTERS_MAX:
        yield _too_long(instance)
    elif not _is_match(wanted, instance):
        yield ValidationError(f"{instance!r} does not match {wanted!r}")


def _pattern_properties(validator: Any, wanted: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    del schema
    if not isinstance(instance, dict):
        return
    for name, value in instance.items():
        if len(name) > MCP_PATTERN_CHARACTERS_MAX:
            yield _too_long(name)
            continue
        for pattern, subschema in wanted.items():
            if _is_match(pattern, name):
                yield from validator.descend(value, subschema, path=name, schema_path=pattern)


def _additional_properties(validator: Any, wanted: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if not isinstance(instance, dict):
        return
    declared = schema.get("properties", {})
    patterns = schema.get("patternProperties", {})
    extras = [
        name
        for name in instance
        if name not in declared
        and not any(len(name) <= MCP_PATTERN_CHARACTERS_MAX and _is_match(pattern, name) for pattern in patterns)
    ]
    if isinstance(wanted, dict):
        for name in extras:
            yield from validator.descend(instance[name], wanted, path=name)
    elif not wanted and extras:
        names = ", ".join(repr(name) for name in sorted(extras))
        verb = "was" if len(extras) == 1 else "were"
        yield ValidationError(f"Additional properties are not allowed ({names} {verb} unexpected)")


def _too_long(text: str) -> ValidationError:
    return ValidationError(
        f"text of {len(text)} characters is too long for a pattern; at most {MCP_PATTERN_CHARACTERS_MAX} are allowed"
    )


def _unevaluated(check: Check) -> Check:
    def bounded(validator: Any, wanted: Any, instance: Any, schema: Any) -> Iterable[ValidationError] | None:
        if isinstance(instance, dict | list) and len(instance) > MCP_UNEVALUATED_MAX:
            return [ValidationError(f"has {len(instance)} members; at most {MCP_UNEVALUATED_MAX} are allowed here")]
        return check(validator, wanted, instance, schema)

    return bounded


def _multiple_of(validator: Any, wanted: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    try:
        if not isinstance(instance, float) or isfinite(instance):
            yield from _STANDARD["multipleOf"](validator, wanted, instance, schema) or ()
            return
    except (OverflowError, ValueError):  # An integer that is too large for a quotient.
        pass
    yield ValidationError(f"{instance!r} is not a multiple of {wanted!r}")


_STANDARD: Final[dict[str, Check]] = dict(Draft202012Validator.VALIDATORS)
_WITH_CHILDREN: Final = {
    "additionalProperties",
    "contains",
    "items",
    "patternProperties",
    "propertyNames",
    "unevaluatedItems",
    "unevaluatedProperties",
}
_BOUNDED: Final[dict[str, Check]] = _STANDARD | {
    "additionalProperties": _additional_properties,
    "multipleOf": _multiple_of,
    "pattern": _pattern,
    "patternProperties": _pattern_properties,
    "unevaluatedItems": _unevaluated(_STANDARD["unevaluatedItems"]),
    "unevaluatedProperties": _unevaluated(_STANDARD["unevaluatedProperties"]),
    "uniqueItems": _unique_items,
}

BoundedValidator: Final[Any] = validators.extend(
    Draft202012Validator, {keyword: _timed(keyword, check) for keyword, check in _BOUNDED.items()}
)
