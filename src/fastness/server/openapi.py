"""The OpenAPI document, generated from the endpoint declarations."""

import copy
import inspect
import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Annotated, Any, Final

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from fastness.server.http import json_codec
from fastness.server.http.endpoints import BYTES, Endpoint, Parameter, first_sentence
from fastness.server.http.events import SSE
from fastness.server.http.limits import IDEMPOTENCY_KEY_CHARACTERS_MAX
from fastness.server.http.message_schemas import VIEWS
from fastness.server.http.routes import TAGS
from fastness.server.openapi_examples import add_examples, problem_responses, problems, response_name
from fastness.server.problems import JSON
from fastness.wire.fields import Name
from fastness.wire.problems import Problem

_REFS: Final = "#/components/schemas/{name}"
_PATH_TYPE: Final = re.compile(r"{(\w+):\w+}")
_VIEWS: Final = {kind: view for kind, (view, _) in VIEWS.items()}
_BASE64: Final = "^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"
_ANY_JSON: Final = {"description": "Any JSON value."}
_COMMON_PARAMETERS: Final = (
    Parameter(
        "X-Fastness-Universe", "header", Name, description="The universe, if neither the body nor the query has one."
    ),
    Parameter(
        "X-Correlation-Id", "header", description="1 to 128 printable ASCII characters; returned with the response."
    ),
    Parameter("traceparent", "header", description="W3C trace context; returned with the response."),
)
_UNIVERSE: Final = Parameter("universe", "query", description="The universe, if the body has none.")
_IDEMPOTENCY: Final = Parameter(
    "Idempotency-Key",
    "header",
    Annotated[str, msgspec.Meta(min_length=1, max_length=IDEMPOTENCY_KEY_CHARACTERS_MAX)],
    description="1 to 255 characters. A write that is repeated with the same key is executed once and gets the same "
    "response. A different write with that key is rejected with 422 idempotency_key_reused.",
)


def document(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """The OpenAPI 3.1 document of these endpoints."""
    kinds = _types_of(endpoints)
    schemas, components = msgspec.json.schema_components(kinds, ref_template=_REFS)
    names = {id(kind): schema for kind, schema in zip(kinds, schemas, strict=True)}
    for component in components.values():
        if "description" in component:  # A docstring; before Python 3.13 it has the indentation of the source.
            component["description"] = inspect.cleandoc(component["description"])
    _use_json_schemas(components)
    _add_bounds(endpoints, names, components)
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        path = _PATH_TYPE.sub(r"{\1}", endpoint.path)
        paths.setdefault(path, {})[endpoint.method.lower()] = _operation(endpoint, names, components)
    openapi = {
        "openapi": "3.1.0",
        "info": {
            "title": "Fastness",
            "version": "1",
            "summary": "A durable coordination plane for fleets of agents.",
            "description": "Queues, mail, leases, state, entities, worlds, blobs and activity over one key space. "
            "Errors are problem+json (RFC 9457) with a stable `code`.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "tags": [{"name": name, "description": description} for name, description in TAGS.items()],
        "security": [{}, {"token": []}],
        "paths": paths,
        "components": {
            "schemas": dict(sorted(components.items())),
            "parameters": {
                _component_key(each): _parameter(each, {}) for each in (*_COMMON_PARAMETERS, _UNIVERSE, _IDEMPOTENCY)
            },
            "responses": problem_responses(),
            "examples": problems(),
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(openapi))
    return plain


def routes(endpoints: Sequence[Endpoint]) -> list[Route]:
    """`/openapi.json`. It reads no data, so it needs no token."""

    @cache
    def encoded() -> bytes:
        return msgspec.json.encode(document(endpoints))

    async def json(request: HttpRequest) -> Response:
        del request
        return Response(encoded(), media_type=JSON)

    return [Route("/openapi.json", json)]


def _types_of(endpoints: Sequence[Endpoint]) -> list[Any]:
    """The types of all bodies, responses and parameters, without duplicates."""
    found: dict[int, Any] = {id(Problem): Problem}
    shared = (each.type for each in (*_COMMON_PARAMETERS, _UNIVERSE, _IDEMPOTENCY))
    for body_type in (*_VIEWS.values(), *json_codec.BODY_TYPES.values(), *shared):
        found[id(body_type)] = body_type
    for endpoint in endpoints:
        kinds = [
            *endpoint.accepts.values(),
            *endpoint.response_types.values(),
            *(each.type for each in endpoint.parameters),
        ]
        for kind in kinds:
            for each in kind if isinstance(kind, tuple) else (kind,):
                found.setdefault(id(each), each)
    return list(found.values())


def _operation(endpoint: Endpoint, names: dict[int, Any], components: dict[str, Any]) -> dict[str, Any]:
    shared = [*_COMMON_PARAMETERS, *([_IDEMPOTENCY] if endpoint.keyed else [])]
    if _UNIVERSE.name not in (each.name for each in endpoint.parameters):
        shared.append(_UNIVERSE)
    operation: dict[str, Any] = {
        "operationId": endpoint.name,
        "tags": [endpoint.tag],
        "summary": endpoint.summary,
        "parameters": [
            *(_parameter(each, names) for each in endpoint.parameters),
            *({"$ref": f"#/components/parameters/{_component_key(each)}"} for each in shared),
        ],
        "responses": {
            str(endpoint.status): {
                "description": _response_description(endpoint),
                "content": _content(endpoint, names, components),
            },
            **{
                str(status): _other_response(status, description, _content(endpoint, names, components))
                for status, description in endpoint.other_statuses.items()
            },
            "default": {"$ref": f"#/components/responses/{response_name(endpoint.tag)}"},
        },
    }
    if endpoint.accepts:
        operation["requestBody"] = {
            "required": endpoint.body_required,
            "content": {
                media: _multipart_schema(kind, components)
                if media.startswith("multipart/")
                else {"schema": _body_schema(endpoint, kind, names, components)}
                for media, kind in endpoint.accepts.items()
            },
        }
    add_examples(endpoint.name, operation)
    return operation


def _content(endpoint: Endpoint, names: dict[int, Any], components: dict[str, Any]) -> dict[str, Any]:
    content = {media: {"schema": _type_schema(kind, names)} for media, kind in endpoint.response_types.items()}
    if SSE in content:
        content[SSE] = {"schema": _event_schema(content[SSE]["schema"], components)}
    return content


def _event_schema(lines: dict[str, Any], components: dict[str, Any]) -> dict[str, Any]:
    """The schema of a server-sent event, whose `data` is the object of a line as JSON text."""
    events = []
    for line in lines["anyOf"]:
        schema = components[line["$ref"].rpartition("/")[2]]
        fields = schema["properties"]
        if fields["data"] != {"type": "null"}:  # A heartbeat is a comment.
            data = {"type": "string", "contentMediaType": JSON, "contentSchema": fields["data"]}
            properties = {"event": fields["event"], "data": data, "id": {"type": "string"}}
            events.append({"type": "object", "properties": properties, "required": ["event", "data"]})
    return {"anyOf": events}


def _other_response(status: int, description: str, content: dict[str, Any]) -> dict[str, Any]:
    return {"description": description} | ({} if status in (204, 304) else {"content": content})  # These have no body.


def _response_description(endpoint: Endpoint) -> str:
    kind = next(iter(endpoint.response_types.values()), None)
    is_struct = isinstance(kind, type) and issubclass(kind, msgspec.Struct)
    return (first_sentence(kind) if is_struct and kind is not None else "") or "The response."


def _type_schema(kind: Any, names: dict[int, Any]) -> dict[str, Any]:
    if kind is BYTES:
        return {"type": "string", "format": "binary"}
    if isinstance(kind, tuple):
        return {"anyOf": [_type_schema(each, names) for each in kind]}
    schema: dict[str, Any] = names[id(kind)]
    return schema or _ANY_JSON


def _body_schema(endpoint: Endpoint, kind: Any, names: dict[int, Any], components: dict[str, Any]) -> dict[str, Any]:
    """The schema of a body: that of its type, without the fields that come from the path or headers."""
    schema = _type_schema(kind, names)
    reference = schema.get("$ref", "")
    if not reference or not (endpoint.not_in_body or endpoint.optional_in_body or _is_tagged(kind)):
        return schema
    body = copy.deepcopy(components[reference.rpartition("/")[2]])
    not_in_body = {*endpoint.not_in_body, kind.__struct_config__.tag_field}
    body["title"] = f"{body['title']}Body"
    body["properties"] = {name: each for name, each in body["properties"].items() if name not in not_in_body}
    body["required"] = [
        name for name in body.get("required", []) if name not in not_in_body | endpoint.optional_in_body
    ]
    return {name: each for name, each in body.items() if each != []}


def _multipart_schema(kind: Any, components: dict[str, Any]) -> dict[str, Any]:
    """The schema of a multipart body: structs are JSON parts, bytes are binary parts."""
    schema = components.get(kind.__name__, {})
    fields = {
        name: {"type": "string", "format": "binary"} if "contentEncoding" in each else each
        for name, each in schema["properties"].items()
    }
    encoding = {name: {"contentType": JSON} for name, each in fields.items() if "$ref" in each}
    return {"schema": {**schema, "properties": fields}, "encoding": encoding}


def _is_tagged(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind.__struct_config__.tag is not None


def _use_json_schemas(components: dict[str, Any]) -> None:
    """Replace the schemas of wire structs by those of their JSON form."""
    for fields, value in ((json_codec.CBOR_FIELDS, _ANY_JSON), (json_codec.JSON_FIELDS, {"type": "object"})):
        for (kind, name), shape in fields.items():
            if (component := _name_of(kind, components)) is not None:
                components[component]["properties"][name] = _shape_schema(shape, value)
    for (kind, name), schemas in json_codec.ARGUMENT_FIELDS.items():
        if (component := _name_of(kind, components)) is not None:
            del components[component]["properties"][name]
            components[component]["properties"] |= copy.deepcopy(schemas)
    for kind, json_type in {**json_codec.BODY_TYPES, **_VIEWS}.items():
        if (component := _name_of(kind, components)) is not None:
            components[component] = {"$ref": _REFS.format(name=json_type.__name__)}


def _add_bounds(endpoints: Sequence[Endpoint], names: dict[int, Any], components: dict[str, Any]) -> None:
    """Add bounds to the schemas of all request bodies."""
    pending = [names[id(kind)] for endpoint in endpoints for kind in endpoint.accepts.values() if kind is not BYTES]
    seen: set[str] = set()
    while pending:
        for name in _references(pending.pop()):
            if name not in seen:
                seen.add(name)
                schema = components[name]
                pending.append(schema)
                if "properties" in schema:
                    schema["additionalProperties"] = False  # `json_codec` rejects unknown fields.
                for field, each in schema.get("properties", {}).items():
                    schema["properties"][field] = _strict(each)


def _strict(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of a field, with the form of its numbers and bytes."""
    if "anyOf" in schema:
        return {**schema, "anyOf": [*map(_strict, schema["anyOf"])]}
    if schema.get("type") == "string" and "contentEncoding" in schema:
        return {**schema, "pattern": _BASE64}
    return {**schema, "format": "int64"} if schema.get("type") == "integer" else schema


def _references(value: Any) -> Iterator[str]:
    """The components that a schema refers to."""
    if isinstance(value, dict):
        if isinstance(reference := value.get("$ref"), str):
            yield reference.rpartition("/")[2]
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from _references(each)


def _name_of(kind: type, components: dict[str, Any]) -> str | None:
    """The component name of a struct; ambiguous names are prefixed with their module."""
    names = (f"{kind.__module__}.{kind.__qualname__}", kind.__name__)
    return next((name for name in names if name in components), None)


def _shape_schema(shape: json_codec.Shape, value: dict[str, str]) -> dict[str, Any]:
    if shape is json_codec.Shape.LIST:
        return {"type": "array", "items": value}
    if shape is json_codec.Shape.MAP:
        return {"type": "object", "additionalProperties": value}
    return value


def _parameter(parameter: Parameter, names: dict[int, Any]) -> dict[str, Any]:
    schema = _strict(names.get(id(parameter.type)) or msgspec.json.schema(parameter.type))
    described: dict[str, Any] = {"name": parameter.name, "in": parameter.location, "schema": schema}
    if schema.get("type") == "array":
        described |= {"style": "form", "explode": False}  # Separated by commas.
    if parameter.required:
        described["required"] = True
    if parameter.description:
        described["description"] = parameter.description
    return described


def _component_key(parameter: Parameter) -> str:
    return parameter.name.lower().replace("-", "_")
