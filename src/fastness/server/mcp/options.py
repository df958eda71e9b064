"""Settings of `/mcp`, and the path of its metadata."""

from typing import Final

import msgspec

METADATA_PATH: Final = "/.well-known/oauth-protected-resource"
LOCAL_AGENT: Final = "local"  # The caller's name on a loopback address without tokens.


class McpOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of `/mcp`."""

    enabled: bool | None = None  # None: if the package `mcp` is installed.
    agent: str = LOCAL_AGENT  # The name of all callers of a server without tokens.
    url: str | None = None  # The public URL of `/mcp`; by default made of the host that a client has called.
    authorization_servers: tuple[str, ...] = ()  # Named in the metadata.
