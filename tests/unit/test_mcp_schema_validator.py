"""Validation takes a bounded time, and finds what the package jsonschema finds."""

import json
import sys
from collections import Counter
from itertools import count
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from fastness.errors import InvalidArgument
from fastness.limits import MCP_VALIDATION_SECONDS
from fastness.mcp import schema_validator
from fastness.mcp.exposed_tools import ExposedTool, check_arguments, check_value
from fastness.mcp.schema_validator import BoundedValidator, errors_of
from tests.support.failures import Failures

CHECKS_MAX: Final = 100  # Of the time, before the clock of the test says that it is up.
CALLS_MAX: Final = 5_000_000  # Of functions. A loop over items that no check interrupts makes most of them.
TREE: Final = {
    "$ref": "#/$defs/tree",
    "$defs": {"tree": {"anyOf": [{"properties": {"a": {"$ref": "#/$defs/tree"}}, "minProperties": 9}] * 3}},
}


def nested(depth: int) -> Any:
    return json.loads('{"a":' * depth + "{}" + "}" * depth)


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"uniqueItems": True}, [{"n": number} for number in range(20_000)]),
        ({"uniqueItems": True}, [number * (2**61 - 1) for number in range(20_000)]),  # Python hashes them to 0.
        ({"pattern": "^(a+)+$"}, "a" * 40 + "!"),
        ({"pattern": "a*a*a*a*a*b"}, "a" * 16_000),
        ({"pattern": "a"}, "b" * 4_000_000),
        ({"patternProperties": {"^(a+)+$": {}}}, {"a" * 40 + "!": 1}),
        ({"patternProperties": {"^(a|a)*$": {}}, "additionalProperties": False}, {"a" * 40 + "!": 1}),
        ({"items": {"type": "string"}}, [1] * 2_000_000),
        ({"items": {}}, [1] * 2_000_000),
        ({"items": {"title": "x"}}, [1] * 90_000),
        ({"contains": {"type": "string"}}, [1] * 2_000_000),
        ({"prefixItems": [{}], "unevaluatedItems": {"type": "string"}}, [1] * 100_000),
        ({"unevaluatedProperties": {"type": "string"}}, {str(number): 1 for number in range(100_000)}),
        ({"anyOf": [{"minItems": 10**9}] * 500}, ["x" * 100] * 40_000),
        ({"items": {"enum": [[1] * 500 + [number] for number in range(30)]}}, [[1] * 501] * 2_000),
        (TREE, nested(50)),
    ],
    ids=lambda each: json.dumps(each)[:50],
)
@pytest.mark.rotating
def test_no_schema_and_value_take_long(schema: Any, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    times = count(0.0, MCP_VALIDATION_SECONDS / CHECKS_MAX)
    monkeypatch.setattr(schema_validator, "thread_time", lambda: next(times))
    calls: Counter[str] = Counter()
    sys.setprofile(lambda frame, event, function: calls.update([event]))
    try:
        check_value({"type": "object", "properties": {"v": schema}, "$defs": schema.get("$defs", {})}, {"v": value})
    finally:
        sys.setprofile(None)
    assert calls["call"] + calls["c_call"] < CALLS_MAX


def test_numbers_that_cannot_be_divided_are_refused() -> None:
    failures = Failures()
    for step in [0.5, 3, 1e-300]:
        for number in [float("inf"), float("-inf"), float("nan"), 10**400, -(10**400)]:
            with failures.of((step, number)):
                schema = {"type": "object", "properties": {"n": {"multipleOf": step}}}
                tool = ExposedTool("t", "queue", "jobs", "", schema)
                with pytest.raises(InvalidArgument, match=r"n: the number is too large"):
                    check_arguments(tool, {"n": number})
                with pytest.raises(InvalidArgument, match=r"a\[0\].b: the number is too large"):
                    check_arguments(tool, {"a": [{"b": number}]})
                check_value(schema, {"n": number})  # Of a result, in which they are allowed.
    failures.check()


def test_a_value_that_takes_too_long_is_refused_with_what_to_do() -> None:
    tool = ExposedTool("t", "queue", "jobs", "", {"type": "object", "properties": {"a": {"items": {}}}})
    with pytest.raises(InvalidArgument, match="longer than 1 s; send fewer items"):
        check_arguments(tool, {"a": [1] * 200_000})


def test_a_stored_schema_that_cannot_be_used_is_refused_when_the_tool_is_called() -> None:
    for schema in ({"type": "object", "minProperties": "1"}, {"type": "object", "properties": {"a": {"pattern": "("}}}):
        with pytest.raises(InvalidArgument, match=r"cannot be called: The schema .* exposed again"):
            check_arguments(ExposedTool("t", "queue", "jobs", "", schema), {"a": "x"})
        [problem] = check_value(schema, {"a": "x"})
        assert "cannot be checked" in problem


PATTERNS: Final = st.sampled_from(["a", "^a", "b$", "^[ab]{1,2}$", "^(a|b)*$", "", r"\d"])
NAMES: Final = st.sampled_from(["a", "b", "ab", "aab", "1", ""])
SCALARS: Final = st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from([0.0, 1.0, 1.5, -0.0, 1e300]) | NAMES
VALUES: Final = st.recursive(
    SCALARS,
    lambda each: st.lists(each, max_size=4) | st.dictionaries(NAMES, each, max_size=3),
    max_leaves=6,
)
LEAVES: Final = st.booleans() | st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["object", "array", "string", "number", "integer", "null"]),
        "uniqueItems": st.booleans(),
        "multipleOf": st.sampled_from([1, 2, 0.5, 1.5]),
        "pattern": PATTERNS,
    },
)
SCHEMAS: Final = st.recursive(
    LEAVES,
    lambda each: st.fixed_dictionaries(
        {},
        optional={
            "uniqueItems": st.booleans(),
            "items": each,
            "contains": each,
            "properties": st.dictionaries(NAMES, each, max_size=2),
            "patternProperties": st.dictionaries(PATTERNS, each, max_size=2),
            "additionalProperties": each,
            "propertyNames": each,
            "anyOf": st.lists(each, min_size=1, max_size=2),
            "oneOf": st.lists(each, min_size=1, max_size=2),
            "not": each,
            "unevaluatedItems": each,
        },
    ),
    max_leaves=6,
)


@given(SCHEMAS, VALUES)
def test_the_errors_are_those_of_jsonschema(schema: Any, value: Any) -> None:
    def places(errors: Any) -> list[Any]:
        return sorted(
            (list(map(str, each.absolute_path)), list(map(str, each.absolute_schema_path))) for each in errors
        )

    assert places(errors_of(BoundedValidator(schema), value)) == places(Draft202012Validator(schema).iter_errors(value))
