"""Blobs: the ones that fit the key space are a transaction, the others go through the object store."""

from typing import Any

from holdfast.kv import Transaction
from holdfast.layers import blobs
from holdfast.names import checked_name
from holdfast.wire.blobs import FindBlob, GetBlob, Known, OpenBlob, PutBlob, WriteBlob


def find(tx: Transaction, request: FindBlob) -> Known:
    blob = blobs.find(tx, checked_name("universe", request.universe), blobs.digest_of(request.hash))
    return Known(None if blob is None else blob.size)


def put(services: Any, request: PutBlob) -> Any:
    return services.blobs.put(checked_name("universe", request.universe), request.data)


def get(services: Any, request: GetBlob) -> Any:
    return services.blobs.get(checked_name("universe", request.universe), request.hash)


def write(services: Any, request: WriteBlob, chunks: Any) -> Any:
    return services.blobs.write(checked_name("universe", request.universe), chunks)


def open(services: Any, request: OpenBlob) -> Any:
    universe = checked_name("universe", request.universe)
    return services.blobs.open(universe, request.hash, request.start, request.length)
