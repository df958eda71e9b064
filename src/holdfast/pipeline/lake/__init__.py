"""The lake: Delta tables in a folder or an object store, written by executors and committed by the driver.

    <lake>/journal/_delta_log/…                      the table's files and watermarks
    <lake>/journal/universe=main/<random>.parquet    rows, sorted; not part of the table until they are committed
    <lake>/_staging/<run>/…                          hot records for executors to read

A file that no commit names is an orphan, left by a run that was killed or lost a conflict. `vacuum` removes it.
"""

from holdfast.pipeline.lake.files import AddedFile, Writer
from holdfast.pipeline.lake.tables import Lake, LakeFile, LakeTable, Move

__all__ = ["AddedFile", "Lake", "LakeFile", "LakeTable", "Move", "Writer"]
