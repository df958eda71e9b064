"""What a transaction asks about quotas. A key space without quotas has None instead, and asks nothing.

database.quotas ──► tx.quotas     admit_messages, admit_bytes, check_request, check_written: raise QuotaExceeded
                ──► the backend   begin and end around each transaction, add_writes before its commit
"""

from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias

AnyTransaction: TypeAlias = Any  # A `Transaction`, whose module imports this one.


class TransactionQuotas(Protocol):
    """The quotas of all universes, as one transaction sees them."""

    def admit_messages(self, tx: AnyTransaction, universe: str, count: int, *, unsaved: int = 0) -> None:
        """Count messages that the transaction will add to queues; raise QuotaExceeded if they are too many.

        `unsaved` is how many it was admitted before, and has not counted in the key space yet.
        """

    def admit_bytes(self, universe: str, size: int) -> None:
        """Count bytes that are stored outside the key space; raise QuotaExceeded if they are too many."""

    def check_size(self, universe: str, size: int) -> None:
        """Raise QuotaExceeded if so many bytes are more than what is left of a universe's."""

    def check_request(self, request: Any) -> None:
        """Raise QuotaExceeded if a request that adds data is larger than what is left of a universe's bytes."""

    def check_written(self, tx: AnyTransaction, request: Any) -> None:
        """Raise QuotaExceeded if the transaction has written more than what is left of the bytes of its universes."""

    def add_writes(self, writes: Mapping[bytes, bytes | None]) -> None:
        """Count the bytes of a transaction that is about to be committed."""


class DatabaseQuotas(TransactionQuotas, Protocol):
    """The quotas of all universes, as a backend sees them.

    What a transaction adds is counted before it is committed. A measurement must not drop it until the transaction has
    ended, so the backend reports when transactions begin and end.
    """

    def begin(self) -> int:
        """A transaction begins; the ticket that `end` takes."""

    def end(self, ticket: int) -> None:
        """The transaction was committed, or is given up."""

    def of_caller(self) -> TransactionQuotas:
        """The quotas for a transaction that its caller commits, some time after it has ended here."""
