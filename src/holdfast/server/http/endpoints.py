"""Endpoints: rows of the tables from which both the routes and the OpenAPI document are made."""

import inspect
import re
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from holdfast.server.http import json_codec
from holdfast.server.http.halls import Hall
from holdfast.server.http.media import chosen
from holdfast.server.http.middleware import admitted
from holdfast.server.http.problems import JSON, Refusal
from holdfast.server.http.request_context import Visit
from holdfast.wire.repeats import takes_key
from holdfast.wire.requests import Request, answer_type

Handle = Callable[[Visit], Awaitable[Response]]
Fill = Callable[[Visit, dict[str, Any]], None]
Render = Callable[[Visit, Any], Response]

BYTES: Final = bytes  # A body that is no JSON.
_PATH_FIELD: Final = re.compile(r"{(\w+)(?::\w+)?}")
_WITH_BODY: Final = ("POST", "PUT", "PATCH")


class Parameter(msgspec.Struct, frozen=True):
    """Something that a request says outside its body."""

    name: str
    place: str  # path, query or header
    type: Any = str
    required: bool = False
    about: str = ""


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A method of a path: how it is served, and what OpenAPI says of it."""

    method: str
    path: str
    noun: str
    summary: str
    handle: Handle
    parameters: tuple[Parameter, ...] = ()
    takes: Mapping[str, Any] = {}  # The type of the body for each media type.
    elsewhere: frozenset[str] = frozenset()  # Fields of that type that do not come in the body.
    spare: frozenset[str] = frozenset()  # Fields that may come in the body, or from elsewhere.
    body_required: bool = True
    answers: Mapping[str, Any]  # The type, or types, of the answer for each media type.
    status: int = 200
    others: Mapping[int, str] = {}  # Further statuses that are no errors, and what they mean.
    keyed: bool = False  # It heeds an Idempotency-Key.

    @property
    def name(self) -> str:
        """Names the operation in the OpenAPI document."""
        words = re.findall(r"[A-Za-z]+", _PATH_FIELD.sub(r"by \1", self.path.removeprefix("/v1")))
        return "_".join([self.method.lower(), *words])


def noun(
    method: str,
    path: str,
    request: type[Request[Any]],
    summary: str,
    *,
    of: str,
    fixed: Mapping[str, Any] | None = None,
    fill: Fill | None = None,
    headers: Sequence[Parameter] = (),
    filled: Sequence[str] = (),
    defaults: Mapping[str, Any] | None = None,
    optional: Sequence[str] = (),
    answered: Render | None = None,
    shows: Any = None,
    status: int = 200,
    others: Mapping[int, str] | None = None,
    takes: Any = None,
) -> Endpoint:
    """An endpoint that is one request to the plane.

    Fields of `request` come from the path, from `fixed`, and from the body, or from the query where there is no body.
    `fill` changes them before they are decoded, from headers for instance; `filled` names those that only it gives.
    `defaults` stand in for what is not given; `optional` names what `fill` may give instead of the body.
    `takes` and `shows` are the types of body and answer where they are not those of the request.
    """
    fixed, defaults = fixed or {}, defaults or {}
    from_path = _PATH_FIELD.findall(path)
    elsewhere = {*from_path, *fixed, *filled}
    has_body = method in _WITH_BODY
    fields = {field.encode_name: field for field in msgspec.structs.fields(request)}
    in_query = ["tier", "universe"] if has_body else [name for name in fields if name not in elsewhere]
    takes_part = takes or request

    async def handle(visit: Visit) -> Response:
        given: dict[str, Any] = {}
        if has_body:
            given = await _object(visit)
            for name in elsewhere & given.keys():
                raise Refusal(400, "invalid_body", f"{name} does not belong into the body of {path}; leave it out")
        _query(visit, fields, given)
        given = {**defaults, **given, **fixed}
        given.update(visit.http.path_params)
        if fill is not None:
            fill(visit, given)
        answer = await visit.ask(json_codec.decoded(request, given, universe=visit.universe))
        return (answered or (lambda _, each: rendered(each, status)))(visit, answer)

    spare = frozenset({*defaults, *optional})
    needed = any(field.required for name, field in fields.items() if name not in elsewhere | spare)
    return Endpoint(
        method=method,
        path=path,
        noun=of,
        summary=summary,
        handle=handle,
        parameters=(
            *(Parameter(name, "path", required=True) for name in from_path),
            *(
                Parameter(name, "query", fields[name].type, fields[name].required and name not in spare)
                for name in in_query
                if name in fields
            ),
            *headers,
        ),
        takes={JSON: takes_part} if has_body else {},
        elsewhere=frozenset(elsewhere),
        spare=spare,
        body_required=needed or takes is not None,
        answers={JSON: shows or answer_type(request)},
        status=status,
        others=others or {},
        keyed=takes_key(request),
    )


def rendered(answer: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """An answer as JSON."""
    return Response(json_codec.encoded(answer), status, headers, JSON)


def routes(hall: Hall, endpoints: Sequence[Endpoint]) -> list[Route]:
    """A route for each path, in the order of the endpoints."""
    paths: dict[str, dict[str, Endpoint]] = {}
    for endpoint in endpoints:
        paths.setdefault(endpoint.path, {})[endpoint.method] = endpoint
    return [Route(path, _served(hall, methods), methods=list(methods)) for path, methods in paths.items()]


def _served(hall: Hall, methods: Mapping[str, Endpoint]) -> Callable[[HttpRequest], Awaitable[Response]]:
    asked_in_query = {
        method: {"universe", *(each.name for each in endpoint.parameters if each.place == "query")}
        for method, endpoint in methods.items()
    }

    async def serve(request: HttpRequest) -> Response:
        guard = admitted(hall.doors, request.headers, request.client.host if request.client else "")
        endpoint = methods.get(request.method) or methods["GET"]  # Whoever takes GET takes HEAD.
        _check_query(request, asked_in_query[endpoint.method])
        media = chosen(request.headers, list(endpoint.answers))
        return await endpoint.handle(Visit(hall, request, guard, media))

    return serve


async def _object(visit: Visit) -> dict[str, Any]:
    given = await visit.json(or_nothing=True)
    if not isinstance(given, dict):
        raise Refusal(400, "invalid_body", f"The body is a {type(given).__name__}; send an object")
    return given


def _check_query(request: HttpRequest, names: Collection[str]) -> None:
    """Refuse a query that says what nobody asks for, or something twice: of two universes one would be wrong."""
    seen = set()
    for name, _ in request.query_params.multi_items():
        if name not in names:
            raise Refusal(400, "invalid_query", f"There is no {name[:80]!r} here; it knows {', '.join(sorted(names))}")
        if name in seen:
            raise Refusal(400, "invalid_query", f"{name} is given twice; give it once")
        seen.add(name)


def _query(visit: Visit, fields: Mapping[str, Any], given: dict[str, Any]) -> None:
    """Put what the query says into `given`. The body comes first; a lease has its universe inside."""
    for name, text in visit.http.query_params.items():
        if name not in fields:
            continue
        try:
            given.setdefault(name, msgspec.convert(text, fields[name].type, strict=False))
        except msgspec.ValidationError as error:
            raise Refusal(400, "invalid_query", f"{name} is {text[:80]!r}: {error}") from None


@lru_cache(maxsize=256)
def sentence_of(kind: type) -> str:
    """The first sentence of a docstring."""
    return (inspect.getdoc(kind) or "").split("\n\n")[0].replace("\n", " ")
