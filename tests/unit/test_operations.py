"""Every request has exactly one handler, declares what entry points need, and crosses the wire unchanged."""

import importlib
import pkgutil
import re
from collections.abc import Iterator
from functools import reduce
from operator import or_
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastness import Tier, plane, wire
from fastness.backends.memory import MemoryDatabase
from fastness.errors import InvalidArgument
from fastness.kv import Transaction
from fastness.plane.embedded import AsyncEmbeddedTransport, EmbeddedTransport
from fastness.plane.handlers import HANDLERS, transaction
from fastness.plane.operations import OPERATIONS, execute
from fastness.plane.services import Services
from fastness.wire import catalog
from fastness.wire.backups import ListBackup, OpenBackup
from fastness.wire.blobs import OpenBlob, PutBlob, WriteBlob
from fastness.wire.entities import WriteEntities
from fastness.wire.frames import AnyRequest
from fastness.wire.health_checks import RunCheckups
from fastness.wire.pairs import DeletePair, GetPair, PutPair, ScanPairs, Value
from fastness.wire.planes import MarkRestored, RaiseFormat
from fastness.wire.queues import ReceiveMessages
from fastness.wire.requests import Committed, Request, RequestWithoutTier
from fastness.wire.type_checks import bounds_of
from tests.support.depth import Depth
from tests.support.failures import Failures
from tests.support.request_values import right, unannotated


def requests() -> Iterator[type[Request[Any]]]:
    """Every request type that a module of fastness.wire defines."""
    for found in pkgutil.walk_packages(wire.__path__, "fastness.wire."):
        module = importlib.import_module(found.name)
        for thing in vars(module).values():
            if isinstance(thing, type) and issubclass(thing, Request) and thing.__module__ == found.name:
                yield thing


REQUESTS = [request for request in requests() if request not in (Request, RequestWithoutTier)]
ANY_REQUEST = reduce(or_, REQUESTS)


def instances(kind: Any) -> st.SearchStrategy[Any]:
    fields = {field.name: values_of(field.type) for field in msgspec.structs.fields(kind)}
    return st.fixed_dictionaries(fields).map(lambda values: kind(**values))


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a type, within the bounds that a decoder checks."""
    bounds = bounds_of(kind)
    plain = unannotated(kind)
    origin, args = get_origin(plain), get_args(plain)
    if origin in (UnionType, Union):
        return st.one_of([values_of(part) for part in args])
    if plain is int:
        most = (2**63 if bounds else 2**64) - 1  # What msgpack can carry.
        return st.integers(bounds.get("minimum", -(2**63)), bounds.get("maximum", most))
    if plain is float:  # NaN would not equal itself.
        return st.floats(bounds.get("minimum"), bounds.get("maximum"), allow_nan=False)
    if plain is str and bounds:
        return st.just(right(kind))
    if origin is list or (origin is tuple and args[-1] is ...):
        least = bounds.get("minItems", 0)
        return st.lists(
            values_of(args[0]), min_size=least, max_size=min(least + 2, bounds.get("maxItems", least + 2))
        ).map(origin)
    if origin is tuple:
        return st.tuples(*map(values_of, args))
    if isinstance(plain, type) and issubclass(plain, msgspec.Struct):
        return instances(plain)
    return st.from_type(plain)


def test_every_request_has_a_handler_and_is_in_the_catalog() -> None:
    assert set(OPERATIONS) == set(REQUESTS) == set(catalog.REQUESTS)


def test_every_module_that_defines_handlers_is_imported() -> None:
    for found in pkgutil.walk_packages(plane.__path__, "fastness.plane."):
        importlib.import_module(found.name)
    assert {handler.run or handler.serve or handler.immediate for handler in OPERATIONS.values()} == {
        handler.run or handler.serve or handler.immediate for handler in HANDLERS.values()
    }
    assert set(OPERATIONS) == set(REQUESTS)


def test_a_request_has_one_handler() -> None:
    def again(tx: Transaction, request: GetPair) -> Value:
        return Value(None)

    with pytest.raises(ValueError, match="GetPair has a handler already"):
        transaction(again)


def test_the_protocol_document_lists_the_operations_of_an_atomic_list() -> None:
    text = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
    [listed] = re.findall(r"^`POST /v1/atomic` takes a list of requests .*?: (.*?)\. ", text, re.DOTALL | re.MULTILINE)
    declared = [str(kind.__struct_config__.tag) for kind in REQUESTS if kind.operation.atomic]
    assert sorted(re.findall(r"`([\w.]+)`", listed)) == sorted(declared)


def test_no_two_http_routes_are_the_same() -> None:
    routes = [(route.method, route.path) for kind in REQUESTS for route in kind.operation.http]
    assert len(set(routes)) == len(routes)


def test_no_two_requests_share_a_handler() -> None:
    functions = [handler.run or handler.serve or handler.immediate for handler in OPERATIONS.values()]
    assert len(set(functions)) == len(functions)


def test_everything_may_be_asked_over_the_network_but_what_was_left_out_on_purpose() -> None:
    """Raw writes could break any layer, and bodies go by HTTP."""
    left_out = {
        PutPair,
        DeletePair,
        MarkRestored,
        RaiseFormat,
        WriteBlob,
        OpenBlob,
        ListBackup,
        OpenBackup,
        RunCheckups,
    }
    assert set(get_args(AnyRequest)) == OPERATIONS.keys() - left_out


def test_a_handler_is_a_transaction_or_a_service_or_immediate() -> None:
    for handler in OPERATIONS.values():
        assert [handler.run, handler.serve, handler.immediate].count(None) == 2


def test_what_needs_more_than_a_transaction_is_no_part_of_one() -> None:
    with MemoryDatabase() as database, pytest.raises(InvalidArgument, match="by itself"):
        database.transact(execute, PutBlob(b"data"))


def test_the_declarations_of_requests_have_their_form() -> None:
    failures = Failures()
    for kind in REQUESTS:
        with failures.of(kind.__name__):
            config = kind.__struct_config__
            assert config.tag_field == "op"
            tag = str(config.tag)
            assert tag == tag.lower()
            module = kind.__module__.rpartition(".")[2]
            area = {"health_checks": "checkups", "quotas": "universes"}.get(module, module)
            assert tag.partition(".")[0] == area
            assert config.frozen
            assert not kind.operation.atomic or OPERATIONS[kind].run is not None or kind is WriteEntities
            (tier,) = (field for field in msgspec.structs.fields(kind) if field.name == "tier")
            # A default receive waits for the puts, and an explicit tier for the leases too.
            assert tier.default is (None if kind is ReceiveMessages else Tier.CRITICAL)
    failures.check()


@given(data=st.data())
def check_encoding(kind: type[Request[Any]], data: st.DataObject) -> None:
    request = data.draw(instances(kind))
    body = msgspec.msgpack.encode(request)
    fields = msgspec.msgpack.decode(body)
    assert fields["op"] == kind.__struct_config__.tag
    arrived = msgspec.msgpack.decode(body, type=ANY_REQUEST)
    assert type(arrived) is kind
    assert arrived == request
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        msgspec.msgpack.decode(msgspec.msgpack.encode({**fields, "colour": 1}), type=ANY_REQUEST)


def test_a_request_crosses_the_wire_unchanged_and_an_unknown_field_is_refused(depth: Depth) -> None:
    failures = Failures()
    check = settings(max_examples=round(10 * depth.examples))(check_encoding)
    for kind in REQUESTS:
        with failures.of(kind.__name__):
            check(kind=kind)
    failures.check()


def test_a_request_that_is_none_is_refused() -> None:
    for fields in ({"op": "pairs.burn"}, {}, {"op": "pairs.get"}, {"op": "pairs.get", "key": 7}):
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=ANY_REQUEST)


class BurnPair(Request[Value], frozen=True, tag="pairs.burn"):
    key: bytes


async def test_an_unknown_request_is_refused_wherever_it_is_executed() -> None:
    failures = Failures()
    unknown: list[Any] = [BurnPair(b"a"), Request(), object(), None, "pairs.get", GetPair]
    for request in unknown:
        with MemoryDatabase() as database, failures.of(request):
            with pytest.raises(InvalidArgument, match="not a request of this plane"):
                database.transact(execute, request)
            with pytest.raises(InvalidArgument, match="not a request of this plane"):
                EmbeddedTransport(Services(database)).call(request)
            with pytest.raises(InvalidArgument, match="not a request of this plane"):
                await AsyncEmbeddedTransport(Services(database)).call(request)
    failures.check()


def test_requests_of_one_transaction_see_each_other() -> None:
    requests: list[Request[Any]] = [PutPair(b"a", b"1", tier=Tier.IMPORTANT), GetPair(b"a")]

    def work(tx: Transaction) -> list[Any]:
        return [execute(tx, request) for request in requests]

    with MemoryDatabase() as database:
        assert database.transact(work) == [Committed(Tier.IMPORTANT), Value(b"1")]


def test_an_operation_that_reads_only_runs_on_a_snapshot() -> None:
    requests: list[Request[Any]] = [GetPair(b"a"), ScanPairs(b"a", b"b")]
    with MemoryDatabase() as database:
        for request in requests:
            assert OPERATIONS[type(request)].reads_only
            database.read(execute, request)
