"""What every tool has to promise in its schemas."""

import re
from collections.abc import Iterator
from typing import Any, Final

from jsonschema import Draft202012Validator

from fastness.mcp.tools import TOOLS
from fastness.wire.catalog import PERMISSIONS
from tests.support.failures import Failures

# What would let a caller say who it is. Mail has a `sender` in answers, never in arguments.
_IDENTITY: Final = {"agent", "as", "caller", "from", "holder", "identity", "owner", "sender", "token", "universe"}
_SETTLING: Final = {"queue_ack", "queue_nack", "queue_extend", "lease_keep", "lease_release"}


def objects(schema: Any) -> Iterator[dict[str, Any]]:
    """The schema of every struct inside a schema, with the root. A map with any keys is none."""
    if isinstance(schema, dict):
        if schema.get("type") == "object" and "properties" in schema:
            yield schema
        for each in schema.values():
            yield from objects(each)
    elif isinstance(schema, list):
        for each in schema:
            yield from objects(each)


def alternatives(schema: dict[str, Any], root: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A schema itself, or those that it allows one of, with references followed."""
    if "$ref" in schema:
        schema = root["$defs"][schema["$ref"].removeprefix("#/$defs/")] | schema
    if "anyOf" in schema:
        for each in schema["anyOf"]:
            yield from alternatives(each, root)
    else:
        yield schema


def test_names_are_unique_and_plain() -> None:
    names = [tool.name for tool in TOOLS]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch("[a-z]+(_[a-z]+)*", name) for name in names)
    assert set(names) >= _SETTLING


def test_schemas_are_valid_objects() -> None:
    failures = Failures()
    for tool in TOOLS:
        with failures.of(tool):
            listed = tool.listed
            assert listed.output_schema is not None
            for schema in (listed.input_schema, listed.output_schema):
                Draft202012Validator.check_schema(schema)
                assert schema["type"] == "object"
            for each in objects(listed.input_schema):
                assert each["additionalProperties"] is False
    failures.check()


def test_no_tool_has_an_argument_that_names_the_caller() -> None:
    failures = Failures()
    for tool in TOOLS:
        with failures.of(tool):
            for each in objects(tool.listed.input_schema):
                assert not _IDENTITY & set(each["properties"])
    failures.check()


def test_every_settling_tool_requires_a_fence() -> None:
    failures = Failures()
    for tool in TOOLS:
        with failures.of(tool):
            found = [
                each for each in objects(tool.listed.input_schema) if {"fence", "lease_id"} & set(each["properties"])
            ]
            assert found or tool.name not in _SETTLING
            for each in found:
                assert {"fence", "lease_id"} <= set(each["required"])
                assert tool.name not in _SETTLING or _is_required(each, tool.listed.input_schema)
    failures.check()


def test_every_answer_with_a_lease_has_its_fence_and_its_end() -> None:
    failures = Failures()
    for tool in TOOLS:
        with failures.of(tool):
            assert tool.listed.output_schema is not None
            for each in objects(tool.listed.output_schema):
                if "lease_id" in each["properties"]:
                    assert {"fence", "expires_at"} <= set(each["properties"])
    failures.check()


def test_every_tool_and_field_has_a_description() -> None:
    failures = Failures()
    for tool in TOOLS:
        with failures.of(tool):
            listed = tool.listed
            assert listed.title
            assert 40 <= len(listed.description or "") <= 1_024
            for schema in (listed.input_schema, listed.output_schema or {}):
                for each in objects(schema):
                    for name, field in each["properties"].items():
                        assert any(found.get("description") for found in (field, *alternatives(field, schema))), name
    failures.check()


def test_every_argument_has_a_bound() -> None:
    failures = Failures()
    for tool in TOOLS:
        with failures.of(tool):
            schema = tool.listed.input_schema
            for each in objects(schema):
                for name, field in each["properties"].items():
                    for found in alternatives(field, schema):
                        kind = found.get("type")
                        if kind == "string":
                            assert {"maxLength", "enum", "pattern"} & set(found), name
                        elif kind == "array":
                            assert "maxItems" in found, name
                        elif kind in ("integer", "number"):
                            assert {"minimum", "maximum"} <= set(found), name
    failures.check()


def test_hints_and_verbs_are_consistent() -> None:
    failures = Failures()
    for tool in TOOLS:
        with failures.of(tool):
            assert set(tool.verbs) <= PERMISSIONS
            assert tool.verbs or tool.name.startswith("task_")
            assert not (tool.read_only and tool.destructive)
    failures.check()


def _is_required(lease: dict[str, Any], root: dict[str, Any]) -> bool:
    """Whether the lease is the root, or in a field that is required."""
    if lease is root:
        return True
    (name,) = [name for name, each in root["$defs"].items() if each is lease]
    return any(f"#/$defs/{name}" in str(root["properties"][field]) for field in root["required"])
