"""JSON Schemas (2020-12) of structs, in the form that MCP clients expect: an object at the root."""

from typing import Any

import msgspec


def schema_of(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """The schema of a struct. Its own properties are at the root, nested structs are in `$defs`."""
    (root,), found = msgspec.json.schema_components([kind], ref_template="#/$defs/{name}")
    components: dict[str, dict[str, Any]] = dict(found)
    name = str(root["$ref"]).removeprefix("#/$defs/")
    schema = components.pop(name)
    schema.pop("title", None)  # The name of a Python class.
    for component in components.values():
        component.pop("title", None)
    if components:
        schema["$defs"] = components
    return schema
