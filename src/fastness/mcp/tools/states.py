"""Tools over states and entities: read, then compare and set."""

from typing import Annotated, Any, Final

from msgspec import Meta

from fastness.errors import InvalidArgument
from fastness.limits import ENTITY_FIELDS_MAX, NAME_BYTES_MAX
from fastness.mcp.caller import Caller
from fastness.mcp.contents import OFFSET_MAX, Content, content_of_value
from fastness.mcp.tool import Tool, ToolInput, ToolOutput
from fastness.mcp.tools.fields import BodyStart, Fence, LeaseId, ShortText

StateKey = Annotated[
    str, Meta(description="The key of the document: names joined by slashes.", min_length=1, max_length=NAME_BYTES_MAX)
]
Kind = Annotated[
    str, Meta(description="The kind of the entity, as in `order`.", min_length=1, max_length=NAME_BYTES_MAX)
]
EntityId = Annotated[
    str, Meta(description="The id of the entity within its kind.", min_length=1, max_length=NAME_BYTES_MAX)
]


class StateGet(ToolInput, frozen=True):
    key: StateKey
    body_start: BodyStart = 0


class StateFound(ToolOutput, frozen=True, omit_defaults=True):
    exists: Annotated[bool, Meta(description="Whether there is a document with this key.")]
    document: Annotated[Content | None, Meta(description="The value of the document.")] = None
    etag: Annotated[str | None, Meta(description="Give it to state_set as if_match.")] = None
    version: Annotated[int, Meta(description="How often it was written.")] = 0
    updated_at: Annotated[str | None, Meta(description="When it was last written, in UTC.")] = None


async def _get_state(caller: Caller, given: StateGet) -> StateFound:
    found = await caller.plane.state(given.key).get()
    if found is None:
        return StateFound(exists=False)
    document = content_of_value(
        found.value,
        rest=lambda end: f"Call state_get with key={given.key!r}, body_start={end}.",
        start=given.body_start,
    )
    return StateFound.of(found, exists=True, document=document)


class StateLease(ToolInput, frozen=True):
    lease_id: LeaseId
    fence: Fence


class StateSet(ToolInput, frozen=True):
    key: StateKey
    value: Annotated[Any, Meta(description="The whole new document: any JSON value, at most 256 KiB.")]
    if_match: Annotated[
        ShortText | None,
        Meta(description="The etag from state_get: write only if it is still the current one."),
    ] = None
    if_absent: Annotated[bool, Meta(description="Write only if there is no document yet.")] = False
    lease: Annotated[
        StateLease | None, Meta(description="Your lease of the same key; needed while the key is leased.")
    ] = None


class StateWritten(ToolOutput, frozen=True):
    etag: Annotated[str, Meta(description="Of the document now; for the next state_set.")]
    version: Annotated[int, Meta(description="How often it was written.")]


async def _set_state(caller: Caller, given: StateSet) -> StateWritten:
    if (given.if_match is None) == (not given.if_absent):
        raise InvalidArgument("Give either if_match, with the etag of state_get, or if_absent=true for a new document")
    lease = None
    if given.lease is not None:
        lease = caller.plane.lease(given.key).held(given.lease.lease_id, fence=given.lease.fence)
    written = await caller.plane.state(given.key).update(
        given.value, lease=lease, if_match=given.if_match, if_absent=given.if_absent
    )
    return StateWritten.of(written)


class EntityGet(ToolInput, frozen=True):
    kind: Kind
    id: EntityId
    body_start: BodyStart = 0


class EntityFound(ToolOutput, frozen=True, omit_defaults=True):
    exists: Annotated[bool, Meta(description="Whether there is such an entity.")]
    fields: Annotated[Content | None, Meta(description="All its fields, as one map.")] = None
    version: Annotated[int, Meta(description="Give it to entity_set as expected_version; 0: it does not exist.")] = 0
    updated_at: Annotated[str | None, Meta(description="When it was last written, in UTC.")] = None


async def _get_entity(caller: Caller, given: EntityGet) -> EntityFound:
    found = await caller.plane.entities.get(given.kind, given.id)
    if found is None:
        return EntityFound(exists=False)
    fields = content_of_value(
        found.fields,
        rest=lambda end: f"Call entity_get with kind={given.kind!r}, id={given.id!r}, body_start={end}.",
        start=given.body_start,
    )
    return EntityFound.of(found, exists=True, fields=fields)


class EntitySet(ToolInput, frozen=True):
    kind: Kind
    id: EntityId
    fields: Annotated[
        dict[str, Any],
        Meta(description="All fields of the entity; others are removed.", min_length=1, max_length=ENTITY_FIELDS_MAX),
    ]
    expected_version: Annotated[
        int, Meta(description="The version from entity_get; 0: it does not exist yet.", ge=0, le=OFFSET_MAX)
    ]


class EntityWritten(ToolOutput, frozen=True):
    version: Annotated[int | None, Meta(description="Of the entity now; null: it only has fields that are not kept.")]


async def _set_entity(caller: Caller, given: EntitySet) -> EntityWritten:
    written = await caller.plane.entities.put_if_version(
        given.kind, given.id, given.fields, expected_version=given.expected_version
    )
    return EntityWritten(version=written.versions[0])


TOOLS: Final[tuple[Tool[Any, Any], ...]] = (
    Tool(
        name="state_get",
        title="Read a document",
        description=(
            "Read the state document of a key: a value that agents share. Its etag is what state_set needs to change "
            "it."
        ),
        input=StateGet,
        output=StateFound,
        call=_get_state,
        verbs=("state:get",),
        read_only=True,
    ),
    Tool(
        name="state_set",
        title="Write a document",
        description=(
            "Replace a state document, if it has not changed since you read it: give if_match with its etag, or "
            "if_absent for a new one. If it is refused, read it again with state_get, and decide anew. While the key "
            "is leased, only the holder of the lease may write, with `lease`."
        ),
        input=StateSet,
        output=StateWritten,
        call=_set_state,
        verbs=("state:update",),
        destructive=True,
    ),
    Tool(
        name="entity_get",
        title="Read an entity",
        description="Read an entity: a record with fields, by kind and id. Its version is what entity_set needs.",
        input=EntityGet,
        output=EntityFound,
        call=_get_entity,
        verbs=("entity:get",),
        read_only=True,
    ),
    Tool(
        name="entity_set",
        title="Write an entity",
        description=(
            "Replace all fields of an entity, if it still has the version that you read; 0 creates it. If it is "
            "refused, another writer was first: read it again with entity_get, and decide anew."
        ),
        input=EntitySet,
        output=EntityWritten,
        call=_set_entity,
        verbs=("entity:put",),
        destructive=True,
    ),
)
