"""The protected-resource metadata of `/mcp` (RFC 9728): where a client learns which tokens the endpoint accepts."""

import re
from collections.abc import Iterable, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from fastness.server.http.middleware import MCP_PATH
from fastness.server.mcp.options import METADATA_PATH
from fastness.server.problems import JSON

_HOST: Final = re.compile(r"[A-Za-z0-9.\-]+(:\d+)?|\[[0-9A-Fa-f:.]+\](:\d+)?")


class ResourceMetadata:
    """The metadata document, and the URLs that it names."""

    def __init__(self, url: str | None, authorization_servers: Sequence[str], verbs: Iterable[str]) -> None:
        """`url` is the public URL of `/mcp`; without it, URLs are made of the host that a client has called.

        `verbs` are those that the tools need: a client asks for as many of them as it can get.
        """
        self._url = url
        self._scopes = sorted(set(verbs))
        self._authorization_servers = list(authorization_servers)

    def resource(self, request: HttpRequest) -> str:
        """The URL of `/mcp`, as the client knows it."""
        return self._url or f"{_origin(request)}{MCP_PATH}"

    def challenge(self, request: HttpRequest, *, error: str = "", scope: str = "") -> str:
        """The `WWW-Authenticate` header of a refusal."""
        url = urlsplit(self.resource(request))
        metadata = f"{url.scheme}://{url.netloc}{METADATA_PATH}{url.path}"  # Before the path, by RFC 9728.
        parameters = {"error": error, "scope": scope, "resource_metadata": metadata}
        given = "".join(f', {name}="{value}"' for name, value in parameters.items() if value)
        return f'Bearer realm="fastness"{given}'

    def answer(self, request: HttpRequest) -> Response:
        """The document. It needs no token."""
        document: dict[str, Any] = {
            "resource": self.resource(request),
            "bearer_methods_supported": ["header"],
            "scopes_supported": self._scopes,
            "resource_name": "Fastness",
            "resource_documentation": f"{_origin(request)}/docs",
        }
        if self._authorization_servers:
            document["authorization_servers"] = self._authorization_servers
        return Response(msgspec.json.encode(document), headers={"Cache-Control": "no-store"}, media_type=JSON)


def _origin(request: HttpRequest) -> str:
    """The scheme and host of the server, by the Host header if it has a usable one."""
    host = request.headers.get("host", "")
    if not _HOST.fullmatch(host):
        address, port = request.scope.get("server") or ("localhost", None)
        host = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    return f"{request.url.scheme}://{host}"
