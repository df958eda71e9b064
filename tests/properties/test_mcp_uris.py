"""URIs of resources: every name has one, and no other text is taken for one."""

import asyncio
import string
from functools import cache
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

import fastness
from fastness.errors import NotFound
from fastness.mcp import Caller
from fastness.mcp.resources import Kind, ResourceUri, checked_uri, uri_of

names = st.text(f"{string.ascii_letters}{string.digits}._@:+=-", min_size=1, max_size=40).filter(
    lambda name: name not in (".", "..")
)
kinds: st.SearchStrategy[Kind] = st.sampled_from(("queue", "dead_letters", "world", "report"))
pieces = st.lists(
    st.sampled_from(
        ("fastness://", "main", "/", "queues", "worlds", "mail", "reports", "dead-letters", "a", "%2F", "%", "..")
    )
)


@cache
def caller_in(universe: str) -> Caller:
    async def connect() -> fastness.AsyncPlane:
        return await fastness.connect_async("http://127.0.0.1:1", universe=universe)  # It connects with the first call.

    return Caller(plane=asyncio.run(connect()), agent="ada")


@given(universe=names, other=names, kind=kinds, name=names)
def test_a_name_has_a_uri_in_its_own_universe_only(universe: str, other: str, kind: Kind, name: str) -> None:
    uri = uri_of(universe, kind, name)
    assert checked_uri(caller_in(universe), uri) == ResourceUri(kind, name)
    if other != universe:
        assert not found(caller_in(other), uri)


@given(thread=st.text(min_size=1, max_size=40))
def test_any_text_can_be_a_thread(thread: str) -> None:
    assert checked_uri(caller_in("main"), uri_of("main", "mail", thread)) == ResourceUri("mail", thread)


@given(uri=st.one_of(st.text(max_size=60), pieces.map("".join)))
def test_other_text_is_not_found_or_means_one_resource(uri: str) -> None:
    caller = caller_in("main")
    resource = found(caller, uri)
    if resource is not None:
        assert checked_uri(caller, uri_of("main", resource.kind, resource.name)) == resource


def found(caller: Caller, uri: str) -> Any:
    try:
        return checked_uri(caller, uri)
    except NotFound:
        return None
