"""Tools over blobs: content that is too large for a message or a mail, by its hash."""

from typing import Annotated, Any, Final

from msgspec import Meta

from fastness.errors import PayloadTooLarge
from fastness.limits import MCP_BLOB_BYTES_MAX, MCP_CONTENT_BYTES_MAX
from fastness.mcp.caller import Caller
from fastness.mcp.contents import OFFSET_MAX, Content, body_of, content_of_part, read_range
from fastness.mcp.tool import Tool, ToolInput, ToolOutput

_HASH: Final = Meta(description="The hash of the blob: 64 hexadecimal digits.", pattern="^[0-9a-f]{64}$")


class BlobPut(ToolInput, frozen=True):
    content: Annotated[
        str,
        Meta(description="Text; or base64 text of bytes, with is_base64.", max_length=MCP_BLOB_BYTES_MAX * 4 // 3 + 4),
    ]
    is_base64: Annotated[bool, Meta(description="The content is base64 text, and is stored as its bytes.")] = False
    keep: Annotated[
        bool,
        Meta(
            description="Keep it for good. If false, it is removed some time after no message or other data names it."
        ),
    ] = True


class BlobStored(ToolOutput, frozen=True):
    hash: Annotated[str, Meta(description="Names the blob: give it to others, and to blob_get.")]
    size: Annotated[int, Meta(description="How many bytes it has.")]


async def _put(caller: Caller, given: BlobPut) -> BlobStored:
    data = body_of(given.content, is_base64=True) if given.is_base64 else given.content.encode()
    if len(data) > MCP_BLOB_BYTES_MAX:
        raise PayloadTooLarge(
            f"The content has {len(data):,} bytes, one call stores at most {MCP_BLOB_BYTES_MAX:,}; store it in parts"
        )
    return BlobStored(hash=await caller.plane.blobs.put(data, pinned=given.keep), size=len(data))


class BlobGet(ToolInput, frozen=True):
    hash: Annotated[str, _HASH]
    start: Annotated[int, Meta(description="The first byte to read.", ge=0, le=OFFSET_MAX)] = 0
    length: Annotated[int, Meta(description="How many bytes at most.", ge=1, le=MCP_CONTENT_BYTES_MAX)] = (
        MCP_CONTENT_BYTES_MAX // 3
    )


class BlobPart(ToolOutput, frozen=True):
    content: Content


async def _get(caller: Caller, given: BlobGet) -> BlobPart:
    size = await caller.plane.blobs.size(given.hash)
    start = min(given.start, size)
    data = await read_range(caller.plane, given.hash, start, given.length)
    content = content_of_part(
        data,
        rest=lambda end: f"Call blob_get with hash={given.hash!r}, start={end}.",
        size=size,
        start=start,
    )
    return BlobPart(content=content)


TOOLS: Final[tuple[Tool[Any, Any], ...]] = (
    Tool(
        name="blob_put",
        title="Store a blob",
        description=(
            "Store text or bytes, up to 1 MiB, under their hash. Use it for what is too large for a mail or a message, "
            "and send the hash there. The same content has the same hash and is stored once."
        ),
        input=BlobPut,
        output=BlobStored,
        call=_put,
        verbs=("blob:put",),
        idempotent=True,
    ),
    Tool(
        name="blob_get",
        title="Read a blob",
        description=(
            "Read a part of a blob by its hash. `rest` of the content says how to read the next part; what is not text "
            "comes as base64."
        ),
        input=BlobGet,
        output=BlobPart,
        call=_get,
        verbs=("blob:find", "blob:open"),
        read_only=True,
    ),
)
