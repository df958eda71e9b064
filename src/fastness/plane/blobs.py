"""Handlers of blob requests. Small blobs are one transaction; large ones go through the object store."""

from collections.abc import AsyncIterable, Iterable
from typing import cast

from fastness.kv import Transaction
from fastness.layers import blobs
from fastness.plane.handlers import service, transaction
from fastness.plane.stores import AnyStores, AsyncStores, Served, Streamed
from fastness.wire.blobs import Body, FindBlob, GetBlob, Known, OpenBlob, PinBlob, PutBlob, Stored, WriteBlob
from fastness.wire.requests import Committed


@transaction
def find(tx: Transaction, request: FindBlob) -> Known:
    blob = blobs.find(tx, request.universe, blobs.digest_of(request.hash))
    return Known(None if blob is None else blob.size)


@transaction
def pin(tx: Transaction, request: PinBlob) -> Committed:
    blobs.set_pinned(tx, request.universe, request.hash, pinned=request.pinned)
    return Committed(request.tier)


@service
def put(stores: AnyStores, request: PutBlob) -> Served[Stored]:
    return stores.blobs.put(request.universe, request.data, pinned=request.pinned)


@service
def get(stores: AnyStores, request: GetBlob) -> Served[Body]:
    return stores.blobs.get(request.universe, request.hash)


@service
def write(stores: AnyStores, request: WriteBlob, chunks: Iterable[bytes] | AsyncIterable[bytes]) -> Served[Stored]:
    universe = request.universe
    if isinstance(stores, AsyncStores):
        return stores.blobs.write(universe, cast("AsyncIterable[bytes]", chunks), pinned=request.pinned)
    return stores.blobs.write(universe, cast("Iterable[bytes]", chunks), pinned=request.pinned)


@service
def open(stores: AnyStores, request: OpenBlob) -> Streamed:
    return stores.blobs.open(request.universe, request.hash, request.start, request.length)
