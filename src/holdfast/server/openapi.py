"""The OpenAPI document, made from the tables that the routes are made from, and a page to read it on."""

import copy
import re
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any, Final

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from holdfast.server.http import json_codec
from holdfast.server.http.endpoints import BYTES, Endpoint, Parameter, sentence_of
from holdfast.server.http.events import SSE
from holdfast.server.http.message_schemas import MessageView
from holdfast.server.http.problems import JSON, MSGPACK, PROBLEM
from holdfast.server.openapi_bounds import bound
from holdfast.wire.problems import Problem
from holdfast.wire.queues import Delivery

_REFS: Final = "#/components/schemas/{name}"
_PATH_TYPE: Final = re.compile(r"{(\w+):\w+}")
_ANYTHING: Final = {"description": "Any JSON value."}
_NOUNS: Final = {
    "calls": "Any request, and lists of them.",
    "messages": "Work queues: leased, fenced, at least once.",
    "queues": "Looking at queues and running them.",
    "mail": "Mail between agents, kept until it has arrived.",
    "agents": "Who is known by name, and by which key.",
    "leases": "Who may write, until when, and the proof of it.",
    "states": "One value a key, guarded by leases and ETags.",
    "entities": "Records whose fields have tiers.",
    "worlds": "Event-sourced agents: journals, inboxes, snapshots.",
    "universes": "Key spaces within the key space.",
    "activity": "Session logs.",
    "blobs": "Bytes that are named by what they are.",
    "backups": "Copies of everything, and whether it is sound.",
}
_EVERYWHERE: Final = (
    Parameter("X-Holdfast-Universe", "header", about="The universe, where neither body nor query names one."),
    Parameter("X-Correlation-Id", "header", about="1 to 128 printable ASCII characters; given back with the answer."),
    Parameter("traceparent", "header", about="W3C trace context; given back with the answer."),
)
_UNIVERSE: Final = Parameter("universe", "query", about="The universe, where the body names none.")
_IDEMPOTENCY: Final = Parameter(
    "Idempotency-Key",
    "header",
    about="A write that is sent again with the same key is done once, and answered alike; another one with that key is "
    "422 idempotency_key_reused. 1 to 255 characters.",
)


def document(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """The OpenAPI 3.1 document of these endpoints."""
    kinds = _kinds(endpoints)
    schemas, components = msgspec.json.schema_components(kinds, ref_template=_REFS)
    names = {id(kind): schema for kind, schema in zip(kinds, schemas, strict=True)}
    _translate(components)
    _bound(endpoints, names, components)
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        path = _PATH_TYPE.sub(r"{\1}", endpoint.path)
        paths.setdefault(path, {})[endpoint.method.lower()] = _operation(endpoint, names, components)
    spoken = {
        "openapi": "3.1.0",
        "info": {
            "title": "Holdfast",
            "version": "1",
            "summary": "A durable plane for fleets of agents.",
            "description": "Queues, mail, leases, state, entities, worlds, blobs and activity over one key space. "
            "Errors are problem+json (RFC 9457) with a stable `code`.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "tags": [{"name": name, "description": about} for name, about in _NOUNS.items()],
        "security": [{}, {"token": []}],
        "paths": paths,
        "components": {
            "schemas": dict(sorted(components.items())),
            "parameters": {_key(each): _parameter(each, {}) for each in (*_EVERYWHERE, _UNIVERSE, _IDEMPOTENCY)},
            "responses": {
                "Problem": {
                    "description": "What went wrong, and what to do about it.",
                    "content": {
                        media: {"schema": {"$ref": "#/components/schemas/Problem"}} for media in (PROBLEM, MSGPACK)
                    },
                }
            },
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(spoken))
    return plain


def routes(endpoints: Sequence[Endpoint]) -> list[Route]:
    """`/openapi.json`, and `/docs` for people. Neither asks the plane for anything, so neither asks for a token."""
    made: dict[str, bytes] = {}

    def described() -> dict[str, Any]:
        found = document(endpoints)
        made["json"] = msgspec.json.encode(found)
        return found

    async def spoken(request: HttpRequest) -> Response:
        del request
        if "json" not in made:
            described()
        return Response(made["json"], media_type=JSON)

    async def page(request: HttpRequest) -> Response:
        del request
        if "html" not in made:
            made["html"] = _page(described()).encode()
        policy = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; frame-ancestors 'none'"
        return HTMLResponse(made["html"], headers={"Content-Security-Policy": policy})

    return [Route("/openapi.json", spoken), Route("/docs", page)]


def _kinds(endpoints: Sequence[Endpoint]) -> list[Any]:
    """Every type that a body, an answer or a parameter has, once each."""
    found: dict[int, Any] = {id(Problem): Problem, id(MessageView): MessageView}
    for form in json_codec.FORMS.values():
        found[id(form)] = form
    for endpoint in endpoints:
        kinds = [*endpoint.takes.values(), *endpoint.answers.values(), *(each.type for each in endpoint.parameters)]
        for kind in kinds:
            for each in kind if isinstance(kind, tuple) else (kind,):
                found.setdefault(id(each), each)
    return list(found.values())


def _operation(endpoint: Endpoint, names: dict[int, Any], components: dict[str, Any]) -> dict[str, Any]:
    shared = [*_EVERYWHERE, *([_IDEMPOTENCY] if endpoint.keyed else [])]
    if _UNIVERSE.name not in (each.name for each in endpoint.parameters):
        shared.append(_UNIVERSE)
    spoken: dict[str, Any] = {
        "operationId": endpoint.name,
        "tags": [endpoint.noun],
        "summary": endpoint.summary,
        "parameters": [
            *(_parameter(each, names) for each in endpoint.parameters),
            *({"$ref": f"#/components/parameters/{_key(each)}"} for each in shared),
        ],
        "responses": {
            str(endpoint.status): {
                "description": _about(endpoint),
                "content": _content(endpoint, names, components),
            },
            **{
                str(status): _other(status, about, _content(endpoint, names, components))
                for status, about in endpoint.others.items()
            },
            "default": {"$ref": "#/components/responses/Problem"},
        },
    }
    if endpoint.takes:
        spoken["requestBody"] = {
            "required": endpoint.body_required,
            "content": {
                media: _parts(kind, components)
                if media.startswith("multipart/")
                else {"schema": _body(endpoint, kind, names, components)}
                for media, kind in endpoint.takes.items()
            },
        }
    return spoken


def _content(endpoint: Endpoint, names: dict[int, Any], components: dict[str, Any]) -> dict[str, Any]:
    content = {media: {"schema": _answer(kind, names)} for media, kind in endpoint.answers.items()}
    if SSE in content:
        content[SSE] = {"schema": _event(content[SSE]["schema"], components)}
    return content


def _event(lines: dict[str, Any], components: dict[str, Any]) -> dict[str, Any]:
    """The schema of a server-sent event: what is an object in a line is text in the `data` of an event."""
    events = []
    for line in lines["anyOf"]:
        schema = components[line["$ref"].rpartition("/")[2]]
        fields = schema["properties"]
        if fields["data"] != {"type": "null"}:  # That is a comment.
            data = {"type": "string", "contentMediaType": JSON, "contentSchema": fields["data"]}
            properties = {"event": fields["event"], "data": data, "id": {"type": "string"}}
            events.append({"type": "object", "properties": properties, "required": ["event", "data"]})
    return {"anyOf": events}


def _other(status: int, about: str, content: dict[str, Any]) -> dict[str, Any]:
    return {"description": about} | ({} if status in (204, 304) else {"content": content})  # Those have no body.


def _about(endpoint: Endpoint) -> str:
    kind = next(iter(endpoint.answers.values()), None)
    is_struct = isinstance(kind, type) and issubclass(kind, msgspec.Struct)
    return (sentence_of(kind) if is_struct and kind is not None else "") or "The answer."


def _answer(kind: Any, names: dict[int, Any]) -> dict[str, Any]:
    if kind is BYTES:
        return {"type": "string", "format": "binary"}
    if isinstance(kind, tuple):
        return {"anyOf": [_answer(each, names) for each in kind]}
    schema: dict[str, Any] = names[id(kind)]
    return schema or _ANYTHING


def _body(endpoint: Endpoint, kind: Any, names: dict[int, Any], components: dict[str, Any]) -> dict[str, Any]:
    """The schema of a body: that of its type, without what the path and the headers say."""
    schema = _answer(kind, names)
    reference = schema.get("$ref", "")
    if not reference or not (endpoint.elsewhere or endpoint.spare or _is_tagged(kind)):
        return schema
    whole = copy.deepcopy(components[reference.rpartition("/")[2]])
    gone = {*endpoint.elsewhere, kind.__struct_config__.tag_field}
    whole["title"] = f"{whole['title']}Body"
    whole["properties"] = {name: each for name, each in whole["properties"].items() if name not in gone}
    whole["required"] = [name for name in whole.get("required", []) if name not in gone | endpoint.spare]
    return {name: each for name, each in whole.items() if each != []}


def _parts(kind: Any, components: dict[str, Any]) -> dict[str, Any]:
    """A multipart body: structs are parts of JSON, and bytes are as they are."""
    schema = components.get(kind.__name__, {})
    fields = {
        name: {"type": "string", "format": "binary"} if "contentEncoding" in each else each
        for name, each in schema["properties"].items()
    }
    encoding = {name: {"contentType": JSON} for name, each in fields.items() if "$ref" in each}
    return {"schema": {**schema, "properties": fields}, "encoding": encoding}


def _is_tagged(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind.__struct_config__.tag is not None


def _translate(components: dict[str, Any]) -> None:
    """Say of the wire's structs what they look like as JSON."""
    for fields, value in ((json_codec.VALUES, _ANYTHING), (json_codec.RECORDS, {"type": "object"})):
        for (kind, name), shape in fields.items():
            if (component := _name_of(kind, components)) is not None:
                components[component]["properties"][name] = _shaped(shape, value)
    for kind, form in {**json_codec.FORMS, Delivery: MessageView}.items():
        if (component := _name_of(kind, components)) is not None:
            components[component] = {"$ref": _REFS.format(name=form.__name__)}


def _bound(endpoints: Sequence[Endpoint], names: dict[int, Any], components: dict[str, Any]) -> None:
    """Say of everything that a body may have what it is bound by."""
    left = [names[id(kind)] for endpoint in endpoints for kind in endpoint.takes.values() if kind is not BYTES]
    seen: set[str] = set()
    while left:
        for name in _references(left.pop()):
            if name not in seen:
                seen.add(name)
                schema = components[name]
                left.append(schema)
                if "properties" in schema:
                    schema["additionalProperties"] = False  # The dialect refuses what it does not know.
                for field, each in schema.get("properties", {}).items():
                    schema["properties"][field] = bound(each, name, field)


def _references(value: Any) -> Iterator[str]:
    """The components that a schema names."""
    if isinstance(value, dict):
        if isinstance(reference := value.get("$ref"), str):
            yield reference.rpartition("/")[2]
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from _references(each)


def _name_of(kind: type, components: dict[str, Any]) -> str | None:
    """What a struct is called; those whose names are taken have their module before it."""
    names = (f"{kind.__module__}.{kind.__qualname__}", kind.__name__)
    return next((name for name in names if name in components), None)


def _shaped(shape: json_codec.Shape, value: dict[str, str]) -> dict[str, Any]:
    if shape is json_codec.Shape.LIST:
        return {"type": "array", "items": value}
    if shape is json_codec.Shape.MAP:
        return {"type": "object", "additionalProperties": value}
    return value


def _parameter(parameter: Parameter, names: dict[int, Any]) -> dict[str, Any]:
    schema = bound(names.get(id(parameter.type)) or {"type": "string"}, parameter.place, parameter.name)
    spoken: dict[str, Any] = {"name": parameter.name, "in": parameter.place, "schema": schema}
    if parameter.required:
        spoken["required"] = True
    if parameter.about:
        spoken["description"] = parameter.about
    return spoken


def _key(parameter: Parameter) -> str:
    return parameter.name.lower().replace("-", "_")


_STYLE: Final = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "code,pre{font:13px/1.45 ui-monospace,monospace}pre{background:#f4f4f1;padding:.8rem;overflow:auto}"
    "details{border-top:1px solid #ddd;padding:.4rem 0}summary{cursor:pointer}b.m{display:inline-block;width:4.5rem}"
    "h2{margin-top:2.5rem}.s{color:#666}@media(prefers-color-scheme:dark){body{color:#ddd;background:#181818}"
    "pre{background:#242424}details{border-color:#333}.s{color:#999}a{color:#8bf}}"
)


def _page(spoken: dict[str, Any]) -> str:
    """The document as a page that asks nobody for anything."""
    sections = []
    for tag in spoken["tags"]:
        rows = [
            _row(method, path, operation)
            for path, methods in spoken["paths"].items()
            for method, operation in methods.items()
            if tag["name"] in operation["tags"]
        ]
        sections.append(f"<h2>{escape(tag['name'])}</h2><p>{escape(tag['description'])}</p>{''.join(rows)}")
    schemas = "".join(
        f"<details><summary><code>{escape(name)}</code></summary><pre>{_pretty(schema)}</pre></details>"
        for name, schema in spoken["components"]["schemas"].items()
    )
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Holdfast API</title>'
        '<meta name="viewport" content="width=device-width">'
        f"<style>{_STYLE}</style><h1>Holdfast API</h1><p>{escape(spoken['info']['description'])} "
        f'<a href="openapi.json">openapi.json</a></p>{"".join(sections)}<h2>Schemas</h2>{schemas}</html>'
    )


def _row(method: str, path: str, operation: dict[str, Any]) -> str:
    shown = {name: operation[name] for name in ("parameters", "requestBody", "responses") if name in operation}
    return (
        f'<details><summary><b class="m">{method.upper()}</b><code>{escape(path)}</code> '
        f'<span class="s">{escape(operation["summary"])}</span></summary><pre>{_pretty(shown)}</pre></details>'
    )


def _pretty(value: Any) -> str:
    return escape(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())
