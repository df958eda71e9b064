"""Fields that several tools have."""

from typing import Annotated

from msgspec import Meta

from fastness.limits import MCP_LEASE_SECONDS_MAX, MCP_LEASE_SECONDS_MIN, MCP_WAIT_SECONDS_MAX, NAME_BYTES_MAX
from fastness.mcp.contents import OFFSET_MAX

ShortText = Annotated[
    str, Meta(min_length=1, max_length=NAME_BYTES_MAX)
]  # Of optional fields, which have their own description.
WaitSeconds = Annotated[
    float, Meta(description="How long to wait if there is nothing yet.", ge=0, le=MCP_WAIT_SECONDS_MAX)
]
LeaseSeconds = Annotated[
    float,
    Meta(
        description="How long it is yours from now on. Nothing extends it for you.",
        ge=MCP_LEASE_SECONDS_MIN,
        le=MCP_LEASE_SECONDS_MAX,
    ),
]
LeaseId = Annotated[
    str, Meta(description="The lease_id of the answer that gave you the lease.", max_length=NAME_BYTES_MAX)
]
Fence = Annotated[
    int, Meta(description="The fence of the answer that gave you the lease, exactly.", ge=1, le=2**63 - 1)
]
BodyStart = Annotated[
    int, Meta(description="Show bodies from this byte on; `rest` of a cut body has the number.", ge=0, le=OFFSET_MAX)
]
AfterName = Annotated[
    str, Meta(description="The `next` of the page before; empty for the first.", max_length=NAME_BYTES_MAX)
]
IsBase64 = Annotated[bool, Meta(description="The body is base64 text of bytes, and is stored as these bytes.")]
ExpiresAt = Annotated[str, Meta(description="When the lease ends, in UTC.")]
AtExpiry = Annotated[str, Meta(description="What happens when the lease ends, and which tool keeps it.")]
Next = Annotated[str | None, Meta(description="Give it as `after` for the next page; null: this is the last.")]
