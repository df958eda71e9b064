"""JSON-RPC 2.0 of the agents' protocol: its error codes and message structures.

{"jsonrpc": "2.0", "id": 7, "error": {"code": -32010, "message": "ERR_BUSY", "data": {"details": "…"}}}
"""

from enum import IntEnum
from typing import Any, Final

import msgspec

VERSION: Final = "2.0"


class RpcCode(IntEnum):
    """Error codes. Those from -32001 on belong to the agents' protocol, the others to JSON-RPC."""

    UNAUTHORIZED = -32001
    PEER_ID_MISMATCH = -32002
    METHOD_NOT_ALLOWED = -32004
    PAYLOAD_TOO_LARGE = -32005
    RATE_LIMITED = -32006
    BUSY = -32010
    INVALID_REQUEST = -32600
    METHOD_NOT_FOUND = -32601
    INVALID_PARAMS = -32602
    INTERNAL = -32603
    PARSE = -32700

    @property
    def symbol(self) -> str:
        """Its name on the wire."""
        return f"ERR_{self.name}"


class RpcErrorData(msgspec.Struct, frozen=True, omit_defaults=True):
    """Details for people; Fastness's error code and the retry delay for programs."""

    details: str
    code: str | None = None
    retry_after_seconds: float | None = None


class RpcError(msgspec.Struct, frozen=True):
    """An error. `message` is its symbol."""

    code: int
    message: str
    data: RpcErrorData


class RpcResult(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a call that succeeded."""

    jsonrpc: str = VERSION
    id: Any
    result: Any


class RpcFailure(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a call that failed."""

    jsonrpc: str = VERSION
    id: Any
    error: RpcError


class Ping(msgspec.Struct, frozen=True):
    """The answer to `agent.ping`."""

    ok: bool
    ts: str  # RFC 3339.


class PushLimits(msgspec.Struct, frozen=True):
    """The limits of a call."""

    rpc_bytes: int
    batch_calls: int
    payload_bytes: int
    pushes_per_minute: int  # 0: no limit.


class Capabilities(msgspec.Struct, frozen=True):
    """The answer to `agent.capabilities.get`."""

    protocol_min: int
    protocol_max: int
    capabilities: list[str]
    allowed_methods: list[str]
    limits: PushLimits
