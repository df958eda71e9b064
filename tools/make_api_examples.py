"""Record an example of every endpoint for the OpenAPI document, or check that each has one.

python tools/make_api_examples.py           run tools/api_examples.py, and write server/openapi_examples.json
python tools/make_api_examples.py --check   exit 1 if an endpoint has no example, or if an answer changed its shape

The script is run by a server on a data directory of its own, whose clock stands still. Ids and secrets differ from run
to run, so that a recorded example is kept as long as its request is the same and its answer has the same fields.
"""

import asyncio
import json
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlencode

import api_examples
from fastness.clock import IdSource
from fastness.plane.open import Options, open_plane_async
from fastness.server.app import make_app
from fastness.server.context import ServerContext
from fastness.server.http.endpoints import Endpoint
from fastness.server.http.routes import ENDPOINTS
from fastness.testing.clock import ManualClock

RECORD: Final = Path(__file__).parent.parent / "src" / "fastness" / "server" / "openapi_examples.json"
NOW_MS: Final = 1_767_258_000_000  # 2026-01-01 09:00 UTC.
_JSON: Final = "application/json"
_SECONDS_MAX: Final = 20.0  # No call waits; one that takes longer has been written wrongly.
Example = dict[str, Any]


def main() -> None:
    recorded = asyncio.run(record())
    problems = missing(recorded)
    if problems:
        sys.exit("\n".join(problems))
    known: dict[str, list[Example]] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    changed = [name for name in recorded if not same(known.get(name), recorded[name])]
    removed = known.keys() - recorded.keys()
    if "--check" in sys.argv[1:]:
        if changed or removed:
            names = ", ".join(sorted({*changed, *removed}))
            sys.exit(f"The examples of {names} are out of date; run: python tools/make_api_examples.py")
        return
    kept = {name: recorded[name] if name in changed else known[name] for name in recorded}
    RECORD.write_text(json.dumps(kept, indent=1, ensure_ascii=False, sort_keys=True) + "\n")


def missing(recorded: Mapping[str, object]) -> list[str]:
    """A line for each endpoint without an example, which says where to add it."""
    return [
        f"{endpoint.method} {endpoint.path} has no example. Call it in the function {endpoint.tag}() of "
        f'tools/api_examples.py: await api("{endpoint.method} {endpoint.path}", …), then run: '
        "python tools/make_api_examples.py"
        for endpoint in ENDPOINTS
        if endpoint.name not in recorded
    ]


def same(known: Any, recorded: Any) -> bool:
    """Whether two recordings have the same shape."""
    return bool(shape(known) == shape(recorded))


def shape(value: Any) -> Any:
    """The fields and types of a value; texts and numbers may differ."""
    if isinstance(value, dict):
        return {key: shape(each) for key, each in value.items()}
    if isinstance(value, list):
        return [shape(each) for each in value]
    return "number" if isinstance(value, (int, float)) and not isinstance(value, bool) else type(value).__name__


async def record() -> dict[str, list[Example]]:
    """Run the script; the examples of each endpoint by its operation id."""
    clock = ManualClock(NOW_MS)
    with tempfile.TemporaryDirectory() as folder:
        options = Options(clock=clock, ids=IdSource(seed=1), gc_every_seconds=None)
        transport = await open_plane_async(f"dir:{folder}/data", options)
        try:
            recorder = Recorder(make_app(ServerContext(transport)), clock)
            await api_examples.run(recorder)
        finally:
            await transport.close()
    return recorder.examples


class Recorder:
    """Makes calls of the HTTP API, and keeps them as examples."""

    def __init__(self, app: Any, clock: ManualClock) -> None:
        self._app = app
        self.clock = clock
        self.examples: dict[str, list[Example]] = {}
        self._endpoints: dict[str, Endpoint] = {f"{each.method} {each.path}": each for each in ENDPOINTS}

    async def __call__(
        self,
        operation: str,
        body: Any = None,
        *,
        example: str = "",
        headers: Mapping[str, str] | None = None,
        **parameters: Any,
    ) -> Any:
        """Call `operation`, as in `GET /v1/queues/{queue}`; returns the JSON of the answer.

        The call becomes an example, with `example` as its summary. The first example of an endpoint needs no summary;
        a further call without one is not kept.
        """
        endpoint = self._endpoints.get(operation)
        if endpoint is None:
            sys.exit(f"tools/api_examples.py calls {operation}, which is no endpoint; see server/http/routes.py.")
        in_path = set(re.findall(r"{(\w+)", endpoint.path))
        path = re.sub(r"{(\w+)(?::\w+)?}", lambda found: quote(str(parameters[found[1]]), safe="/"), endpoint.path)
        query = {name: each for name, each in parameters.items() if name not in in_path}
        sent = dict(headers or {})
        content = body
        if body is not None and not isinstance(body, bytes):
            content = json.dumps(body).encode()
            sent.setdefault("content-type", _JSON)
        elif isinstance(body, bytes):
            sent.setdefault("content-type", "application/octet-stream")
        status, media, answer = await self._send(endpoint.method, path, query, sent, content or b"")
        if status >= 400:
            sys.exit(f"tools/api_examples.py: {endpoint.method} {path} answered {status}: {answer.decode()[:1000]}")
        shown = _shown(media, answer)
        kept = self.examples.setdefault(endpoint.name, [])
        if not kept or example:
            kept.append(
                {
                    "summary": example or endpoint.summary,
                    "parameters": {**parameters, **(headers or {})},
                    **({} if body is None else {"body": body.decode() if isinstance(body, bytes) else body}),
                    **({} if body is None else {"media": sent["content-type"]}),
                    "status": status,
                    **({} if shown is None else {"answer": shown, "answer_media": media}),
                }
            )
        return shown

    async def _send(
        self, method: str, path: str, query: Mapping[str, Any], headers: Mapping[str, str], body: bytes
    ) -> tuple[int, str, bytes]:
        words = {name: _query_text(each) for name, each in query.items()}
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": urlencode(words).encode(),
            "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 9440),
        }
        status, media, chunks = 0, "", bytearray()
        sent = False
        enough = asyncio.Event()

        async def receive() -> dict[str, Any]:
            nonlocal sent
            if not sent:
                sent = True
                return {"type": "http.request", "body": body, "more_body": False}
            await enough.wait()
            return {"type": "http.disconnect"}

        async def send(message: Mapping[str, Any]) -> None:
            nonlocal status, media
            if message["type"] == "http.response.start":
                status = message["status"]
                named = {name.decode().lower(): value.decode() for name, value in message["headers"]}
                media = named.get("content-type", "").partition(";")[0]
            elif message["type"] == "http.response.body":
                chunks.extend(message.get("body", b""))
                if b"\n" in chunks or not message.get("more_body"):
                    enough.set()  # The first event of a stream is the example.

        serving = asyncio.ensure_future(self._app(scope, receive, send))
        waiting = asyncio.ensure_future(enough.wait())
        done, _ = await asyncio.wait({serving, waiting}, timeout=_SECONDS_MAX, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            sys.exit(f"tools/api_examples.py: {method} {path} did not answer in {_SECONDS_MAX} seconds.")
        enough.set()
        await asyncio.wait({serving}, timeout=_SECONDS_MAX)
        waiting.cancel()
        return status, media, bytes(chunks)


def _query_text(value: Any) -> str:
    """A value as a query has it: lists are separated by commas."""
    if isinstance(value, list):
        return ",".join(map(_query_text, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _shown(media: str, answer: bytes) -> Any:
    """The value of an answer as an example: JSON, the first line of many, an event, or text."""
    if not answer:
        return None
    if media in (_JSON, "application/problem+json"):
        return json.loads(answer)
    if media == "application/x-ndjson":
        return json.loads(answer.partition(b"\n")[0])
    if media == "text/event-stream":
        return dict(line.split(": ", 1) for line in answer.decode().split("\n\n")[0].splitlines() if ": " in line)
    text = answer[:200].decode(errors="replace").strip()
    return text if text.isprintable() else "(bytes)"


if __name__ == "__main__":
    main()
