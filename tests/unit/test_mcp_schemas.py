"""What every tool has to promise in its schemas."""

import re
from collections.abc import Iterator
from typing import Any, Final

import pytest
from jsonschema import Draft202012Validator

from fastness.mcp.tool import Tool
from fastness.mcp.tools import TOOLS
from fastness.wire.catalog import PERMISSIONS

# What would let a caller say who it is. Mail has a `sender` in answers, never in arguments.
_IDENTITY: Final = {"agent", "as", "caller", "from", "holder", "identity", "owner", "sender", "token", "universe"}
_SETTLING: Final = {"queue_ack", "queue_nack", "queue_extend", "lease_keep", "lease_release"}

every_tool = pytest.mark.parametrize("tool", TOOLS, ids=[tool.name for tool in TOOLS])


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


@every_tool
def test_schemas_are_valid_objects(tool: Tool[Any, Any]) -> None:
    listed = tool.listed
    assert listed.output_schema is not None
    for schema in (listed.input_schema, listed.output_schema):
        Draft202012Validator.check_schema(schema)
        assert schema["type"] == "object"
    for each in objects(listed.input_schema):
        assert each["additionalProperties"] is False


@every_tool
def test_no_tool_has_an_argument_that_names_the_caller(tool: Tool[Any, Any]) -> None:
    for each in objects(tool.listed.input_schema):
        assert not _IDENTITY & set(each["properties"])


@every_tool
def test_every_settling_tool_requires_a_fence(tool: Tool[Any, Any]) -> None:
    found = [each for each in objects(tool.listed.input_schema) if {"fence", "lease_id"} & set(each["properties"])]
    assert found or tool.name not in _SETTLING
    for each in found:
        assert {"fence", "lease_id"} <= set(each["required"])
        assert tool.name not in _SETTLING or _is_required(each, tool.listed.input_schema)


@every_tool
def test_every_answer_with_a_lease_has_its_fence_and_its_end(tool: Tool[Any, Any]) -> None:
    assert tool.listed.output_schema is not None
    for each in objects(tool.listed.output_schema):
        if "lease_id" in each["properties"]:
            assert {"fence", "expires_at"} <= set(each["properties"])


@every_tool
def test_every_tool_and_field_has_a_description(tool: Tool[Any, Any]) -> None:
    listed = tool.listed
    assert listed.title
    assert 40 <= len(listed.description or "") <= 1_024
    for schema in (listed.input_schema, listed.output_schema or {}):
        for each in objects(schema):
            for name, field in each["properties"].items():
                assert any(found.get("description") for found in (field, *alternatives(field, schema))), name


@every_tool
def test_every_argument_has_a_bound(tool: Tool[Any, Any]) -> None:
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


@every_tool
def test_hints_and_verbs_are_consistent(tool: Tool[Any, Any]) -> None:
    assert set(tool.verbs) <= PERMISSIONS
    assert tool.verbs or tool.name.startswith("task_")
    assert not (tool.read_only and tool.destructive)


def _is_required(lease: dict[str, Any], root: dict[str, Any]) -> bool:
    """Whether the lease is the root, or in a field that is required."""
    if lease is root:
        return True
    (name,) = [name for name, each in root["$defs"].items() if each is lease]
    return any(f"#/$defs/{name}" in str(root["properties"][field]) for field in root["required"])
