"""Endpoint declarations, from which both the routes and the OpenAPI document are generated."""

import inspect
import re
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, Final, get_origin

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from fastness.server.http import json_codec
from fastness.server.http.context import HttpContext
from fastness.server.http.media import negotiated_media_type
from fastness.server.http.middleware import authenticate_request
from fastness.server.http.request_context import RequestContext
from fastness.server.problems import JSON, HttpError
from fastness.wire.fields import Count, Name, bare
from fastness.wire.requests import Request, answer_type
from fastness.wire.type_checks import refused, refused_field

Handler = Callable[[RequestContext], Awaitable[Response]]
Prepare = Callable[[RequestContext, dict[str, Any]], None]
Render = Callable[[RequestContext, Any], Response]

BYTES: Final = bytes  # A body that is not JSON.
_PATH_FIELD: Final = re.compile(r"{(\w+)(?::\w+)?}")
_PATH_TYPES: Final[dict[str, Any]] = {  # Of those that are no field of the request.
    **dict.fromkeys(("kind", "id", "name"), Name),
    **dict.fromkeys(("height", "number", "sequence"), Count),
    "hash": Annotated[str, msgspec.Meta(pattern="^[0-9A-Fa-f]{64}$")],
}
_METHODS_WITH_BODY: Final = ("POST", "PUT", "PATCH")


class Parameter(msgspec.Struct, frozen=True):
    """A path, query or header parameter."""

    name: str
    location: str  # path, query or header
    type: Any = str
    required: bool = False
    description: str = ""


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One method of one path: its handler, and its description for OpenAPI."""

    method: str
    path: str
    tag: str
    summary: str
    handle: Handler
    parameters: tuple[Parameter, ...] = ()
    query_aliases: frozenset[str] = frozenset()  # Query parameters that are accepted, and not described.
    accepts: Mapping[str, Any] = {}  # The type of the request body by media type.
    not_in_body: frozenset[str] = frozenset()  # Fields of that type that are not read from the body.
    optional_in_body: frozenset[str] = frozenset()  # Required fields that may come from a header or a default instead.
    body_required: bool = True
    response_types: Mapping[str, Any]  # The type, or types, of the response body by media type.
    status: int = 200
    other_statuses: Mapping[int, str] = {}  # Further success statuses and their meaning.
    keyed: bool = False  # Whether the endpoint supports an Idempotency-Key.

    @property
    def name(self) -> str:
        """The operation id in the OpenAPI document."""
        words = re.findall(r"[A-Za-z]+", _PATH_FIELD.sub(r"by \1", self.path.removeprefix("/v1")))
        return "_".join([self.method.lower(), *words])


def operation(
    method: str,
    path: str,
    request: type[Request[Any]],
    summary: str,
    *,
    tag: str,
    fixed: Mapping[str, Any] | None = None,
    prepare: Prepare | None = None,
    headers: Sequence[Parameter] = (),
    prepared: Sequence[str] = (),
    defaults: Mapping[str, Any] | None = None,
    optional: Sequence[str] = (),
    render: Render | None = None,
    response_type: Any = None,
    status: int = 200,
    other_statuses: Mapping[int, str] | None = None,
    body_type: Any = None,
    body_field: str = "",
    wrapper: str = "",
    read_only: Sequence[str] = (),
) -> Endpoint:
    """An endpoint that makes one request to the plane.

    Args:
        request: the plane's request. Its fields come from the path, from `fixed`, and from the body, or from the query
            if the method has no body.
        prepare: changes the fields before they are decoded, for example from headers.
        prepared: fields that only `prepare` sets.
        defaults: values for fields that the caller does not send.
        optional: required fields that `prepare` may set if the body does not.
        body_type: the type of the request body, if it is not `request`.
        body_field: the field whose value is the whole body. An object with this single field is accepted, too.
        wrapper: the body may be an object with this single field.
        read_only: fields of the body that are ignored, so that what a GET returned can be sent back.
        response_type: the type of the response body, if it is not the answer of `request`.
    """
    fixed, defaults = fixed or {}, defaults or {}
    from_path = _PATH_FIELD.findall(path)
    not_in_body = {*from_path, *fixed, *prepared}
    has_body = method in _METHODS_WITH_BODY
    fields = {field.encode_name: field for field in msgspec.structs.fields(request)}
    wrapper = wrapper or body_field
    if body_field:
        body_type = fields[body_field].type
    # A call that its caller gave up must not go on waiting. One that takes a key may have been executed: it goes on.
    waits = "wait_seconds" in fields and (method == "GET" or bool(request.operation.repeatable))
    in_query = [name for name in (("tier", "universe") if has_body else fields) if name not in not_in_body]

    async def handle(context: RequestContext) -> Response:
        given: dict[str, Any] = {}
        if has_body:
            given = _writable(await _json_object(context), context, wrapper=wrapper, read_only=read_only)
            for name in not_in_body & given.keys():
                raise HttpError(400, "invalid_body", f"{name} is not a body field of {method} {path}; remove it")
        if body_field:
            inner = {name: each for name, each in given.items() if name not in in_query}
            given = {body_field: inner, **{name: given[name] for name in in_query if name in given}}
        _add_query(context, request, fields, given)
        given = {**defaults, **given, **fixed}
        _add_path(context, fields, given)
        if prepare is not None:
            prepare(context, given)
        decoded = json_codec.decode(request, given, universe=context.universe)
        answer = await (context.call_while_connected(decoded) if waits else context.call(decoded))
        return (render or (lambda _, each: json_response(each, status)))(context, answer)

    optional_in_body = frozenset({*defaults, *optional})
    needed = any(field.required for name, field in fields.items() if name not in not_in_body | optional_in_body)
    return Endpoint(
        method=method,
        path=path,
        tag=tag,
        summary=summary,
        handle=handle,
        parameters=(
            *(Parameter(name, "path", _path_type(fields, name), required=True) for name in from_path),
            *(
                Parameter(
                    name,
                    "query",
                    fields[name].type,
                    fields[name].required and name not in optional_in_body,
                )
                for name in in_query
                if name in fields
            ),
            *headers,
        ),
        accepts={JSON: body_type or request} if has_body else {},
        not_in_body=frozenset(not_in_body),
        optional_in_body=optional_in_body,
        body_required=needed or body_type is not None,
        response_types={JSON: response_type or answer_type(request)},
        status=status,
        other_statuses=other_statuses or {},
        keyed=request.operation.takes_key,
    )


def json_response(answer: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON response."""
    return Response(json_codec.encode(answer), status, headers, JSON)


def routes(http_context: HttpContext, endpoints: Sequence[Endpoint]) -> list[Route]:
    """A route for each path, in the order of the endpoints."""
    paths: dict[str, dict[str, Endpoint]] = {}
    for endpoint in endpoints:
        paths.setdefault(endpoint.path, {})[endpoint.method] = endpoint
    return [Route(path, _handler(http_context, methods), methods=list(methods)) for path, methods in paths.items()]


def _handler(
    http_context: HttpContext, methods: Mapping[str, Endpoint]
) -> Callable[[HttpRequest], Awaitable[Response]]:
    query_names = {
        method: {"universe", *(each.name for each in endpoint.parameters if each.location == "query")}
        | endpoint.query_aliases
        for method, endpoint in methods.items()
    }

    async def serve(request: HttpRequest) -> Response:
        authorizer = authenticate_request(
            http_context.server, request.headers, request.client.host if request.client else ""
        )
        endpoint = methods.get(request.method) or methods["GET"]  # A GET endpoint also serves HEAD.
        _check_query(request, query_names[endpoint.method])
        media = negotiated_media_type(request.headers, list(endpoint.response_types))
        return await endpoint.handle(RequestContext(http_context, request, authorizer, media))

    return serve


async def _json_object(context: RequestContext) -> dict[str, Any]:
    given = await context.json(allow_empty=True)
    if not isinstance(given, dict):
        raise HttpError(400, "invalid_body", f"The body is a {type(given).__name__}; send a JSON object")
    return given


def _writable(
    given: dict[str, Any], context: RequestContext, *, wrapper: str, read_only: Sequence[str]
) -> dict[str, Any]:
    """The fields of a body, without those that a GET of the same path returns and a PUT cannot change."""
    if wrapper and given.keys() == {wrapper} and isinstance(given[wrapper], dict):
        given = given[wrapper]
    named = context.request.path_params.items() if context.request.method == "PUT" else ()
    return {name: each for name, each in given.items() if name not in read_only and (name, each) not in named}


def _check_query(request: HttpRequest, names: Collection[str]) -> None:
    """Reject unknown and repeated query parameters: a repeated one would silently be ignored."""
    seen = set()
    for name, _ in request.query_params.multi_items():
        if name not in names:
            raise HttpError(
                400, "invalid_query", f"Unknown query parameter {name[:80]!r}; known: {', '.join(sorted(names))}"
            )
        if name in seen:
            raise HttpError(400, "invalid_query", f"{name} is given twice; give it once")
        seen.add(name)


def _add_path(context: RequestContext, fields: Mapping[str, Any], given: dict[str, Any]) -> None:
    """Add the path parameters to `given`."""
    for name, text in context.request.path_params.items():
        try:
            is_number = bare(_path_type(fields, name)) is int
            given[name] = msgspec.convert(text, int, strict=False) if is_number else text
        except msgspec.ValidationError:
            raise refused(name, text, "a whole number") from None


def _path_type(fields: Mapping[str, Any], name: str) -> Any:
    """The type of a path parameter: that of its field if it has one."""
    kind = fields[name].type if name in fields else None
    return kind if bare(kind) in (int, str) else _PATH_TYPES.get(name, str)


def _add_query(
    context: RequestContext, request: type[Request[Any]], fields: Mapping[str, Any], given: dict[str, Any]
) -> None:
    """Add the query parameters to `given`; those of a list are separated by commas. Fields of the body come first."""
    for name, text in context.request.query_params.items():
        if name not in fields:
            continue
        is_list = get_origin(bare(fields[name].type)) is list
        value = text.split(",") if is_list and text else [] if is_list else text
        try:
            given.setdefault(name, msgspec.convert(value, fields[name].type, strict=False))
        except msgspec.ValidationError:
            error = refused_field(request, name, text, plain=True)
            if _has_type(value, bare(fields[name].type)):
                raise error from None
            raise HttpError(400, "invalid_query", str(error)) from None


def _has_type(value: Any, kind: Any) -> bool:
    try:
        msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError:
        return False
    return True


@lru_cache(maxsize=256)
def first_sentence(kind: type) -> str:
    """The first sentence of a docstring."""
    return (inspect.getdoc(kind) or "").split("\n\n")[0].replace("\n", " ")
