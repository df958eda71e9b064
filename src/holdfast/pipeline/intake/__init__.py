"""What `ingest` does: rows from a view of a plane into the lake, each once.

    journals    records of worlds, and a verdict on each segment      executors read, decode and write
    logs        lines of session logs                                 the same
    changes     changes of entities                                   the driver itself: the key space has them
    quarantines what could not be read, as rows with a reason
    holes       what could not be read and now can

How far a world or a file is in the lake is a mark of the table that has its rows (`holdfast.pipeline.lake`). Rows and
marks are one commit. Whatever happens to a run, the next one begins where the last commit ended.

**A mark may pass damage, and nothing is lost silently.** The rows of `quarantine` are committed before the mark moves,
and rows that say otherwise are taken away only after it has moved, by the run that moved it. So between two runs that
read the same thing at once, and see different damage, the one whose marks count is the one whose damage is told.
"""
