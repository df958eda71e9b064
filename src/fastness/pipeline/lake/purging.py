"""Deletes the history of a table: old files, old commits, and the names of watermarks that are no longer used.

    _delta_log/…0041.json             deleted: its statistics have the least and greatest values of removed rows
    _delta_log/…0042.checkpoint       the table as it is now
    _watermarks/….parquet             written again, without watermarks of forgotten sources

A reader of an older version of the table fails afterwards, and so does a run that has begun before: nothing else may
use the lake meanwhile.
"""

import re
from collections.abc import Callable
from typing import Final

from fastness.limits import OBJECT_LIST_MAX
from fastness.pipeline.journal_chunks import Stores
from fastness.pipeline.lake import compaction
from fastness.pipeline.lake.tables import LakeTable

_LOG: Final = "_delta_log"
_VERSION: Final = re.compile(r"_delta_log/(\d{20})\.")


def purge(table: LakeTable, is_dropped: Callable[[str], bool]) -> int:
    """Delete everything that the table no longer uses, and drop watermarks by name; returns the number of files.

    Raises:
        TransactionConflict: another run uses the table.
    """
    if not table.exists:
        return 0
    # A commit without files and names of sources: the newest commit stays, and must not have what is removed.
    table.rewrite_watermarks(is_dropped)
    deleted = len(compaction.vacuum(table, keep_hours=0))
    version = table.version
    table.delta().create_checkpoint()
    table.log_hashes.record_checkpoint(version)
    store, after = Stores(table.location.storage)(table.location.store_url), None
    while page := store.list(_LOG, after=after, limit=OBJECT_LIST_MAX):
        for meta in page:
            found = _VERSION.match(meta.path)
            if found is not None and int(found[1]) < version:
                store.delete(meta.path)
                deleted += 1
        after = page[-1].path
    table.log_hashes.delete_stale()
    return deleted
