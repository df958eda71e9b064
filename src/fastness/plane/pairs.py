"""Handlers of raw reads and writes of the key space."""

from fastness.kv import Transaction
from fastness.plane.handlers import transaction
from fastness.wire.pairs import DeletePair, GetPair, Pairs, PutPair, ScanPairs, Value
from fastness.wire.requests import Committed


@transaction
def get(tx: Transaction, request: GetPair) -> Value:
    return Value(tx.get(request.key))


@transaction
def scan(tx: Transaction, request: ScanPairs) -> Pairs:
    return Pairs(tx.scan(request.begin, request.end, limit=request.limit, reverse=request.reverse))


@transaction
def put(tx: Transaction, request: PutPair) -> Committed:
    tx.put(request.key, request.value)
    return Committed(request.tier)


@transaction
def delete(tx: Transaction, request: DeletePair) -> Committed:
    tx.delete(request.key)
    return Committed(request.tier)
