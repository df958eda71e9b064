"""The rules of batches: their entries have valid and different ids, are at most ten, and succeed or fail one by one."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from fastness.limits import SQS_BATCH_ENTRIES_MAX, SQS_BATCH_ID_CHARACTERS_MAX
from fastness.server.sqs.errors import SqsError

Entry = Mapping[str, Any]

_ID: Final = re.compile(rf"[A-Za-z0-9_-]{{1,{SQS_BATCH_ID_CHARACTERS_MAX}}}\Z")


def checked_entries(action: str, parameters: Mapping[str, Any]) -> Sequence[Entry]:
    """The entries of a batch of this action.

    Raises:
        SqsError: there are none or too many, or an id is invalid or occurs twice. Nothing of the batch is executed.
    """
    entries: Sequence[Entry] = parameters.get("Entries") or ()
    if not entries:
        raise SqsError("EmptyBatchRequest", f"There should be at least one {action}RequestEntry in the request.")
    if len(entries) > SQS_BATCH_ENTRIES_MAX:
        raise SqsError(
            "TooManyEntriesInBatchRequest",
            f"Maximum number of entries per request are {SQS_BATCH_ENTRIES_MAX}. You have sent {len(entries)}.",
        )
    seen: set[str] = set()
    for entry in entries:
        id = entry["Id"]
        if not _ID.match(id):
            raise SqsError(
                "InvalidBatchEntryId",
                "A batch entry id can only contain alphanumeric characters, hyphens and underscores. "
                f"It can be at most {SQS_BATCH_ID_CHARACTERS_MAX} letters long.",
            )
        if id in seen:
            raise SqsError("BatchEntryIdsNotDistinct", f"Id {id} repeated.")
        seen.add(id)
    return entries


class BatchResults:
    """What became of each entry, in the order of the entries."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._results: dict[str, dict[str, Any] | SqsError] = {}
        self._entries = entries

    def succeed(self, entry: Entry, **result: Any) -> None:
        """Record an entry that was executed."""
        self._results[entry["Id"]] = {"Id": entry["Id"], **result}

    def fail(self, entry: Entry, error: SqsError) -> None:
        """Record an entry that was refused."""
        self._results[entry["Id"]] = error

    def output(self) -> dict[str, Any]:
        """The answer to the batch."""
        successful: list[dict[str, Any]] = []
        failed: list[dict[str, Any]] = []
        for entry in self._entries:
            result = self._results[entry["Id"]]
            if isinstance(result, SqsError):
                failed.append(
                    {
                        "Id": entry["Id"],
                        "SenderFault": result.sender_fault,
                        "Code": result.query_code,
                        "Message": result.message,
                    }
                )
            else:
                successful.append(result)
        return {"Successful": successful, "Failed": failed}
