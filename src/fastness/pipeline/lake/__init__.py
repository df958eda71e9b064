"""The lake: Delta tables in a folder or an object store, written by executors and committed by the driver.

    <lake>/journal/_delta_log/…                      the table's files, and the newest file with watermarks
    <lake>/journal/_watermarks/<fingerprint>.parquet watermarks that commits have moved
    <lake>/journal/universe=main/<random>-<sha256>.parquet    rows, sorted; not part of the table until committed
    <lake>/_hashes/journal/…                         hashes of the table's Delta log
    <lake>/_staging/<run>/…                          hot records for executors to read

A file that no commit names is an orphan, left by a run that was killed or lost a conflict. `vacuum` removes it.
"""

from fastness.pipeline.lake.files import AddedFile, Writer
from fastness.pipeline.lake.tables import Lake, LakeFile, LakeTable, Move

__all__ = ["AddedFile", "Lake", "LakeFile", "LakeTable", "Move", "Writer"]
