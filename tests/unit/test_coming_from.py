"""Every name of Fastness in docs/coming-from/others.md exists: endpoints, commands, names, settings, limits, codes."""

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import check_names
import fastness
from fastness import errors, limits
from fastness.server.http.routes import ENDPOINTS
from fastness.server.openapi import document
from fastness.server.settings import Settings
from fastness.wire import relay
from fastness.wire.ingress import NewPush, Pushed
from fastness.wire.rpc import RpcCode

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "coming-from" / "others.md").read_text()
SERVER = ROOT / "src" / "fastness" / "server"
API = document(ENDPOINTS)
ROUTES = {f"{method.upper()} {path}" for path, methods in API["paths"].items() for method in methods}
# Those outside of the API, which a test of that page checks.
ROUTES |= {
    f"GET {path}"
    for path in re.findall(r"^\| `(/\S+)`", (ROOT / "docs" / "reference" / "endpoints.md").read_text(), re.MULTILINE)
}


def names() -> Iterator[str]:
    """The code spans in the column of Fastness."""
    for line in PAGE.splitlines():
        columns = [each.strip() for each in line.strip("|").split("|")]
        if line.startswith("| ") and columns[1] not in ("Fastness", "none"):
            yield from re.findall(r"`([^`]+)`", columns[1])


def fields_of(value: Any) -> Iterator[str]:
    """The names of all fields and query parameters in the OpenAPI document."""
    if isinstance(value, dict):
        yield from value.get("properties", ())
        if "in" in value and isinstance(value.get("name"), str):
            yield value["name"]
        for each in value.values():
            yield from fields_of(each)
    elif isinstance(value, list):
        for each in value:
            yield from fields_of(each)


def frames() -> set[str]:
    """The types and fields of relay frames."""
    kinds = [each for each in vars(relay).values() if isinstance(each, type) and issubclass(each, relay.Frame)]
    tags = {str(each.__struct_config__.tag) for each in kinds}
    return tags | {"type"} | {each.encode_name for kind in kinds for each in msgspec.structs.fields(kind)}


METHODS = set(re.findall(r'"(agent\.[a-z.]+)": self\.', (SERVER / "rpc.py").read_text()))
SERVER_CODES = set(  # Of errors that only the HTTP API has.
    re.findall(r'"((?:missing|invalid)_[a-z_]+)"', "".join(each.read_text() for each in SERVER.rglob("*.py")))
)
PLAIN_NAMES = {
    *SERVER_CODES,
    *METHODS,
    *(each.symbol for each in RpcCode),
    *fields_of(API),
    *frames(),
    *(each.name for each in msgspec.structs.fields(Settings)),
    *(each.encode_name for kind in (NewPush, Pushed) for each in msgspec.structs.fields(kind)),
    *errors.CLASSES,
}


def python_exists(text: str, objects: dict[str, Any]) -> bool:
    """Whether `queue.receive(wait_seconds=)` is a member of a handle, with these parameters."""
    path, _, arguments = text.partition("(")
    first, *members = path.split(".")
    found: Any = objects.get(first)
    for member in members:
        if not hasattr(found, member):
            return False
        found = getattr(found, member)
    parameters = inspect.signature(found).parameters if arguments else {}
    return all(each in parameters for each in re.findall(r"(\w+)=", arguments))


def exists(name: str, objects: dict[str, Any]) -> bool:
    if re.match(r"[A-Z]+ /", name):
        return name in ROUTES
    if name.startswith("fastness "):
        return not check_names.command_problem(name.split()[1:])
    if name.startswith("FASTNESS_"):
        return name.removeprefix("FASTNESS_").lower() in PLAIN_NAMES or name == "FASTNESS_QUEUE_PAYLOAD_PATH"
    if name in PLAIN_NAMES:
        return True
    if re.fullmatch(r"[A-Z][A-Z_]+", name):
        return hasattr(limits, name)
    if re.fullmatch(r"[A-Z]\w+", name):
        return hasattr(fastness, name) or hasattr(errors, name)
    return "." in name and python_exists(name, objects)


@pytest.fixture(scope="module")
def objects() -> Iterator[dict[str, Any]]:
    """A handle of each kind, by the name that the page uses."""
    importlib.import_module("fastness.testing")
    with fastness.open("memory:") as plane:
        queue = plane.queue("jobs")
        queue.put({})
        yield {
            "fastness": fastness,
            "plane": plane,
            "queue": queue,
            "message": queue.receive(),
            "mailbox": plane.mailbox("ada"),
            "world": plane.world("city"),
        }


def test_every_name_on_the_page_exists(objects: dict[str, Any]) -> None:
    found = list(names())
    assert len(found) > 300  # The tables were found.
    missing = [each for each in found if not exists(each, objects)]
    assert not missing, f"docs/coming-from/others.md names what does not exist: {', '.join(missing)}"


@pytest.mark.parametrize(
    "wrong",
    [
        "POST /v1/enqueue",
        "fastness queue fetch",
        "fastness queue get --forever",
        "FASTNESS_HOURS",
        "queue_poll_hours",
        "DEDUPE_HOURS",
        "QueueOverflow",
        "missing_everything",
        "plane.locks.take",
        "queue.receive(wait_hours=)",
    ],
)
def test_a_name_that_does_not_exist_is_found(wrong: str, objects: dict[str, Any]) -> None:
    assert not exists(wrong, objects)
