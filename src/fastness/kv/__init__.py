"""The ordered, transactional key space: its contract, keys, transactions and watches."""

from fastness.kv.contract import Database, ReplayedPosition, Result, Work
from fastness.kv.events import Event
from fastness.kv.keys import Subspace, pack, pages, prefix_range, unpack
from fastness.kv.transactions import Pair, Transaction
from fastness.kv.watches import OnCommit, Watch, Watches

__all__ = [
    "Database",
    "Event",
    "Pair",
    "ReplayedPosition",
    "Result",
    "Subspace",
    "OnCommit",
    "Transaction",
    "Watch",
    "Watches",
    "Work",
    "pack",
    "pages",
    "prefix_range",
    "unpack",
]
