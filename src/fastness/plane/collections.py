"""Handlers of requests on collections."""

from fastness.kv import Transaction
from fastness.layers import collections
from fastness.layers.quotas import quotas_of
from fastness.plane.handlers import low_space_error, service, transaction
from fastness.plane.stores import AnyStores, Served
from fastness.wire.collections import (
    ChangedRows,
    CollectionNames,
    CommitRows,
    FoundRows,
    GetRows,
    ListCollections,
    ListPartitions,
    PartitionPage,
    PutRow,
    RowPage,
    RowVersions,
    ScanRows,
    WaitForRows,
)


@transaction
def commit(tx: Transaction, request: CommitRows) -> RowVersions:
    adds = (tx.low_space or tx.usage is not None) and any(isinstance(change, PutRow) for change in request.changes)
    if adds and tx.low_space:
        raise low_space_error()
    if adds and tx.usage is not None:
        quotas_of(tx).check_request(request)
    versions = RowVersions(collections.commit(tx, *_collection(request), request.changes))
    if adds and tx.usage is not None:
        quotas_of(tx).check_written(tx, request)
    return versions


@transaction
def get(tx: Transaction, request: GetRows) -> FoundRows:
    return FoundRows(collections.get(tx, *_collection(request), request.partition, request.keys))


@transaction
def scan(tx: Transaction, request: ScanRows) -> RowPage:
    _collection(request)
    return collections.scan(tx, request)


@service
def wait(stores: AnyStores, request: WaitForRows) -> Served[ChangedRows]:
    wait_ms = round(request.wait_seconds * 1_000)
    return stores.rows.wait(*_collection(request), request.rows, wait_ms=wait_ms, tier=request.tier)


@transaction
def list_partitions(tx: Transaction, request: ListPartitions) -> PartitionPage:
    return collections.partitions(
        tx, *_collection(request), prefix=request.prefix, after=request.after, limit=request.limit
    )


@transaction
def list_collections(tx: Transaction, request: ListCollections) -> CollectionNames:
    return CollectionNames(collections.names(tx, request.universe, after=request.after, limit=request.limit))


def _collection(request: CommitRows | GetRows | ScanRows | WaitForRows | ListPartitions) -> tuple[str, str]:
    return request.universe, request.collection
