"""Resources: queues, their dead letters, worlds, the caller's own mail threads, and reports, as JSON documents.

    fastness://{universe}/queues/{queue}                 counts of a queue
    fastness://{universe}/queues/{queue}/dead-letters    its first dead letters
    fastness://{universe}/worlds/{world}                 the state of a world, and its last entries
    fastness://{universe}/mail/{thread}                  mails of the caller with this correlation id
    fastness://{universe}/reports/{report}               a JSON document that a program has published

A report is a row of the collection `reports`: its partition is `reports`, its key is the name.
A caller sees its own universe and mailbox only: any other URI is not found, whether it exists or not.
"""

from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Annotated, Any, Final, Literal
from urllib.parse import quote, unquote

import mcp_types
import msgspec

from fastness import Envelope, Row, RowKey
from fastness.errors import FastnessError, InvalidName, NotFound
from fastness.limits import (
    MAIL_BATCH_MAX,
    MCP_DEAD_LETTERS_SHOWN,
    MCP_ENTRIES_SHOWN,
    MCP_MAILS_SCANNED_MAX,
    MCP_PAGE,
    MCP_URI_CHARACTERS_MAX,
)
from fastness.mcp.caller import Caller
from fastness.mcp.contents import JSON, content_of
from fastness.mcp.dispatch import FastnessServer, RequestContext
from fastness.mcp.errors import with_fields
from fastness.mcp.pages import cursor_of, place_of
from fastness.mcp.task_marks import TASK_WORLD
from fastness.mcp.tool import converted
from fastness.mcp.tools import TOOLS
from fastness.mcp.tools.mail import shown_mails
from fastness.names import REPORTS, checked_name
from fastness.plurals import counted

_Number = Annotated[int, msgspec.Meta(ge=0)]
Kind = Literal["queue", "dead_letters", "world", "mail", "report"]

_TOOLS: Final = {tool.name: tool for tool in TOOLS}
_SCHEME: Final = "fastness://"
_FORMS: Final[dict[Kind, tuple[str, str]]] = {  # Before and after the name.
    "dead_letters": ("queues/", "/dead-letters"),
    "queue": ("queues/", ""),
    "world": ("worlds/", ""),
    "mail": ("mail/", ""),
    "report": ("reports/", ""),
}
_TEMPLATES: Final[dict[Kind, tuple[str, str, str]]] = {
    "queue": ("queue", "Queue", "How many messages of a queue are ready, leased, delayed and dead."),
    "dead_letters": ("queue", "Dead letters", "The first dead letters of a queue, with their last errors."),
    "world": ("world", "World", "The state of a world, and the last entries of its journal."),
    "mail": ("thread", "Mail thread", "The mails of one thread (correlation id) in your own mailbox."),
    "report": ("report", "Report", "A JSON document that a program or an agent has published."),
}
_VERBS: Final[dict[Kind, tuple[str, ...]]] = {
    "queue": ("queue:stats",),
    "dead_letters": ("queue:stats", "queue:policy.get", "queue:peek"),
    "world": ("world:describe", "world:read"),
    "mail": ("mail:read",),
    "report": ("collection:get",),
}


class ResourceUri(msgspec.Struct, frozen=True):
    """What a URI names, in the caller's universe: a queue, a world, a thread of its mailbox, or a report."""

    kind: Kind
    name: str


def uri_of(universe: str, kind: Kind, name: str) -> str:
    """The URI of a resource."""
    before, after = _FORMS[kind]
    return f"{_SCHEME}{quote(universe, safe='')}/{before}{quote(name, safe='')}{after}"


def checked_uri(caller: Caller, uri: str) -> ResourceUri:
    """What a URI names.

    Raises:
        NotFound: it is not a URI of a resource, or one of another universe.
    """
    home = f"{_SCHEME}{quote(caller.universe, safe='')}/"
    if len(uri) <= MCP_URI_CHARACTERS_MAX:
        universe, _, path = uri.removeprefix(_SCHEME).partition("/")
        if uri.startswith(_SCHEME) and unquote(universe) == caller.universe:
            for kind, (before, after) in _FORMS.items():
                if path.startswith(before) and path.endswith(after):
                    name = path[len(before) : len(path) - len(after)]
                    if name and "/" not in name:
                        return ResourceUri(kind, _checked(kind, unquote(name)))
    raise NotFound(f"There is no resource {uri[:300]!r}; yours begin with {home}, list the templates for their forms")


async def read(caller: Caller, uri: str) -> str:
    """A resource as JSON text.

    Raises:
        NotFound: there is no such resource for this caller.
        NotAllowed: the caller's token does not allow to read it.
    """
    found = checked_uri(caller, uri)
    return msgspec.json.encode(await _READERS[found.kind](caller, found.name)).decode()


def add_resources(server: FastnessServer) -> None:
    """List and read resources."""
    server.handle("resources/list", mcp_types.PaginatedRequestParams, _list_resources)
    server.handle("resources/templates/list", mcp_types.PaginatedRequestParams, _list_templates)
    server.handle("resources/read", mcp_types.ReadResourceRequestParams, _read_resource)


async def _list_resources(
    context: RequestContext, caller: Caller, params: mcp_types.PaginatedRequestParams
) -> mcp_types.ListResourcesResult:
    """A page of all resources: first the queues, then worlds, mail threads and reports."""
    del context
    number, after = (0, "") if params.cursor is None else place_of(params.cursor, tuple[_Number, str])
    found: list[mcp_types.Resource] = []
    while number < len(_LISTS) and len(found) < MCP_PAGE:
        verb, list_some = _LISTS[number]
        next_after = None
        if caller.is_allowed(verb):
            some, next_after = await list_some(caller, after, MCP_PAGE - len(found))
            found += some
        number, after = (number + 1, "") if next_after is None else (number, next_after)
    cursor = cursor_of((number, after)) if number < len(_LISTS) else None
    return mcp_types.ListResourcesResult(resources=found, next_cursor=cursor)


async def _list_templates(
    context: RequestContext, caller: Caller, params: mcp_types.PaginatedRequestParams
) -> mcp_types.ListResourceTemplatesResult:
    del context, params
    found = []
    for kind, (variable, title, description) in _TEMPLATES.items():
        if all(caller.is_allowed(verb) for verb in _VERBS[kind]):
            before, after = _FORMS[kind]
            home = f"{_SCHEME}{quote(caller.universe, safe='')}/"
            found.append(
                mcp_types.ResourceTemplate(
                    uri_template=f"{home}{before}{{{variable}}}{after}",
                    name=kind,
                    title=title,
                    description=description,
                    mime_type=JSON,
                )
            )
    return mcp_types.ListResourceTemplatesResult(resource_templates=found)


async def _read_resource(
    context: RequestContext, caller: Caller, params: mcp_types.ReadResourceRequestParams
) -> mcp_types.ReadResourceResult:
    del context
    uri = str(params.uri)
    try:
        text = await read(caller, uri)
    except NotFound as error:
        raise with_fields(error, uri=uri) from None
    contents = mcp_types.TextResourceContents(uri=uri, mime_type=JSON, text=text)
    return mcp_types.ReadResourceResult(contents=[contents])


def resource_of(caller: Caller, kind: Kind, name: str, description: str) -> mcp_types.Resource:
    """A resource as `resources/list` shows it."""
    title = f"{_TEMPLATES[kind][1]} {name}"
    uri = uri_of(caller.universe, kind, name)
    return mcp_types.Resource(uri=uri, name=name, title=title, description=description, mime_type=JSON)


async def _list_queues(caller: Caller, after: str, limit: int) -> tuple[list[mcp_types.Resource], str | None]:
    page = await caller.plane.survey_queues(after=after, limit=max(limit // 2, 1))  # A queue is up to two resources.
    found = []
    for stats in page.queues:
        counts = f"{stats.ready} ready, {stats.leased} leased, {stats.dead} dead"
        found.append(resource_of(caller, "queue", stats.queue, counts))
        if stats.dead:
            found.append(resource_of(caller, "dead_letters", stats.queue, counted(stats.dead, "dead letter")))
    return found, page.next


async def _list_worlds(caller: Caller, after: str, limit: int) -> tuple[list[mcp_types.Resource], str | None]:
    page = await caller.plane.survey_worlds(after=after, limit=limit)
    found = [
        resource_of(caller, "world", each.name, f"{each.state}, {each.head} entries in its journal")
        for each in page.worlds
        if not each.name.startswith(TASK_WORLD)  # Found by their task ids.
    ]
    return found, page.next


async def _list_mail(caller: Caller, after: str, limit: int) -> tuple[list[mcp_types.Resource], str | None]:
    first: dict[str, Envelope] = {}  # Of each thread, in the order of the mailbox.
    counts: dict[str, int] = {}
    for mail in await own_mails(caller):
        first.setdefault(mail.correlation_id, mail)
        counts[mail.correlation_id] = counts.get(mail.correlation_id, 0) + 1
    start = int(after) if after.isdecimal() and len(after) < 20 else -1
    rest = [mail for mail in first.values() if mail.sequence > start]
    found = [
        resource_of(
            caller, "mail", mail.correlation_id, f"{counts[mail.correlation_id]} mails, the first from {mail.sender}"
        )
        for mail in rest[:limit]
    ]
    return found, str(rest[limit - 1].sequence) if len(rest) > limit else None


async def _list_reports(caller: Caller, after: str, limit: int) -> tuple[list[mcp_types.Resource], str | None]:
    start = place_of(after, RowKey) if after else None
    page = await caller.plane.collection(REPORTS).scan(REPORTS, after=start, limit=limit)
    found = [
        resource_of(caller, "report", name, f"version {row.version}, {len(row.value)} bytes")
        for name, row in named_reports(page.rows).items()
    ]
    return found, None if page.next is None else cursor_of(page.next)


def named_reports(rows: Iterable[Row]) -> dict[str, Row]:
    """Reports by their names, in their order. A row whose key is not a name is none."""
    found = {}
    for row in rows:
        with suppress(InvalidName):
            if len(row.key) == 1:
                found[checked_name("report", row.key[0])] = row
    return found


_List = Callable[[Caller, str, int], Awaitable[tuple[list[mcp_types.Resource], str | None]]]
_LISTS: Final[tuple[tuple[str, _List], ...]] = (
    ("queue:survey", _list_queues),
    ("world:survey", _list_worlds),
    ("mail:read", _list_mail),
    ("collection:scan", _list_reports),
)


async def _read_queue(caller: Caller, name: str) -> Any:
    return await caller.plane.queue(name).stats(must_exist=True)


async def _read_dead_letters(caller: Caller, name: str) -> Any:
    await _read_queue(caller, name)
    return await _asked("dead_letters_search", caller, {"queue": name, "limit": MCP_DEAD_LETTERS_SHOWN})


async def _read_world(caller: Caller, name: str) -> Any:
    asked = {"world": name, "limit": MCP_ENTRIES_SHOWN}
    found = await _asked("world_read", caller, asked)
    if found.head > MCP_ENTRIES_SHOWN:
        found = await _asked("world_read", caller, asked | {"start": found.head - MCP_ENTRIES_SHOWN})
    return found


async def _asked(tool: str, caller: Caller, arguments: dict[str, Any]) -> Any:
    """The answer of a tool: a resource has the same form."""
    found = _TOOLS[tool]
    return await found.call(caller, converted(arguments, found.input))


async def _read_mail(caller: Caller, name: str) -> Any:
    mails = [mail for mail in await own_mails(caller) if mail.correlation_id == name]
    if not mails:
        raise NotFound(f"Your mailbox has no mail of the thread {name[:300]!r}; confirmed mail is removed")
    return {"thread": name, "mails": shown_mails(mails)}


async def _read_report(caller: Caller, name: str) -> Any:
    row = await caller.plane.collection(REPORTS).get(REPORTS, (name,))
    if row is None:
        raise NotFound(f"There is no report {name!r}; list the resources for the names of reports")
    rest = f"The resource ends here. To read all: fastness collection scan {REPORTS} {REPORTS} --prefix '[\"{name}\"]'"
    return {"report": name, "version": row.version, "body": content_of(row.value, JSON, rest=lambda _: rest)}


async def own_mails(caller: Caller) -> list[Envelope]:
    """The first mails of the caller's mailbox. Their senders get no receipts for it."""
    mailbox = caller.plane.mailbox(caller.agent)
    found: list[Envelope] = []
    while len(found) < MCP_MAILS_SCANNED_MAX:
        after = found[-1].sequence if found else -1
        some = await mailbox.read(after=after, limit=MAIL_BATCH_MAX, peek=True)
        found += some
        if len(some) < MAIL_BATCH_MAX:
            break
    return found


def _checked(kind: Kind, name: str) -> str:
    """A name as the URI has it.

    Raises:
        NotFound: no resource can have this name.
    """
    if kind == "mail":
        return name
    try:
        return checked_name(kind, name)
    except FastnessError as error:
        raise NotFound(str(error)) from error


_READERS: Final[dict[Kind, Callable[[Caller, str], Awaitable[Any]]]] = {
    "queue": _read_queue,
    "dead_letters": _read_dead_letters,
    "world": _read_world,
    "mail": _read_mail,
    "report": _read_report,
}
