"""The lake: Delta tables in a folder or an object store, written by executors and committed by the driver.

    <lake>/journal/_delta_log/…                      what belongs to the table, and how far everybody came
    <lake>/journal/universe=main/<random>.parquet    rows, sorted; no table has them before they are committed
    <lake>/_staging/<run>/…                          hot records on their way to executors

A file that no commit names is an orphan: a run that was killed or came second left it, and `vacuum` removes it.
"""

from holdfast.pipeline.lake.files import AddedFile, Writer
from holdfast.pipeline.lake.tables import Lake, LakeFile, LakeTable, Move

__all__ = ["AddedFile", "Lake", "LakeFile", "LakeTable", "Move", "Writer"]
