"""The state that the parts of one ingest run share, and its retries when another run commits first."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final, TypeVar

from fastness.errors import TransactionConflict, Unreachable
from fastness.limits import INGEST_TASK_BYTES, LAKE_ATTEMPTS
from fastness.pipeline import redactions, tasks
from fastness.pipeline.config import Config
from fastness.pipeline.intake.quarantine import Quarantine
from fastness.pipeline.intake.task_payloads import PayloadPacker
from fastness.pipeline.journal_chunks import Stores
from fastness.pipeline.lake import Lake, LakeTable, staging
from fastness.pipeline.lake.locations import Location
from fastness.pipeline.lake.retries import pause
from fastness.pipeline.progress import ProgressCallback
from fastness.pipeline.schemas import ACTIVITY, ENTITY_CHANGES, JOURNAL, QUEUE_EVENTS, SEGMENTS, Table
from fastness.pipeline.views import View

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


T = TypeVar("T")
_STAGING_LOSSES_MAX: Final = 3  # Beyond this, missing staged objects are not an accident.


class ReplanRequired(Exception):
    """Nothing was committed, and nothing is wrong: plan again."""


class StagedDataLost(ReplanRequired):
    """A staged object is missing: it was deleted, or executors cannot reach the store."""


def check_staged(staging_error: Iterable[str]) -> None:
    """Raise Lost if a task reported a missing staged object."""
    if said := next(filter(None, staging_error), None):
        raise StagedDataLost(said)


def _prefetch(planner: ThreadPoolExecutor, batches: Iterator[T]) -> Iterator[T]:
    coming = planner.submit(next, batches, None)
    while (batch := coming.result()) is not None:
        coming = planner.submit(next, batches, None)
        yield batch


class Run:
    """One run: a view, the tables it fills, and a staging location for hot records."""

    def __init__(
        self,
        spark: "SparkSession | None",
        config: Config,
        view: View,
        staged: Location,
        progress: ProgressCallback | None,
        *,
        packer: PayloadPacker | None = None,
        inline_bytes: int = 0,
    ) -> None:
        """Batches smaller than `inline_bytes` run in this process, which is faster than starting executors."""
        self.spark = spark
        self.config = config
        self.view = view
        self.lake = Lake(config.lake, config.storage)
        self.quarantine = Quarantine(self.lake)
        self.redaction = redactions.load(config)
        self.staging = staged.store_url
        self.rows = dict.fromkeys(
            (table.name for table in (JOURNAL, SEGMENTS, ACTIVITY, ENTITY_CHANGES, QUEUE_EVENTS)), 0
        )
        self.batch_bytes = INGEST_TASK_BYTES * tasks.parallelism(spark)
        self.packer = packer
        self._inline_bytes = inline_bytes
        self._commits = 0
        self._staged = staged
        self._progress = progress

    @property
    def stores(self) -> Stores:
        return Stores(self.config.storage)

    def table(self, table: Table) -> LakeTable:
        return self.lake.table(table)

    @contextmanager
    def prefetch(self, batches: Iterator[T]) -> Iterator[Iterator[T]]:
        """The same batches, each planned and staged while executors work on the one before."""
        if self.spark is None:
            yield batches
            return
        with ThreadPoolExecutor(1, "fastness-plan") as planner:
            yield _prefetch(planner, batches)

    def execute(self, work: Callable[[bytes], bytes], given: Sequence[bytes], size: int) -> Iterator[bytes]:
        """Run tasks that read `size` bytes in total, on executors unless that is too little."""
        return tasks.execute(self.spark if size >= self._inline_bytes else None, work, given)

    def clear(self, url: str) -> None:
        """Remove what was staged for a finished batch."""
        name = url.removeprefix(f"{self.staging}/")
        with suppress(Unreachable):  # It is removed with the rest at the end of the run.
            staging.clear(self._staged.child(name))

    def record_commit(self, table: Table, rows: int) -> None:
        """Count a commit, and report progress."""
        self._commits += 1
        self.rows[table.name] += rows
        if self._progress is not None and rows:
            self._progress(f"{table.name} rows", self.rows[table.name], self.rows[table.name])

    def retry_until_done(self, subject: str, work: Callable[[], None]) -> None:
        """Do the work, and again whenever another run committed first.

        Raises:
            TransactionConflict: that happened too often without progress of this run.
            Unreachable: staged objects were missing several times.
        """
        attempt = staging_losses = 0
        while attempt < LAKE_ATTEMPTS:
            before = self._commits
            try:
                work()
                return
            except (ReplanRequired, TransactionConflict) as error:
                attempt = 0 if self._commits > before else attempt + 1
                staging_losses += isinstance(error, StagedDataLost)
                if staging_losses > _STAGING_LOSSES_MAX:
                    raise Unreachable(str(error)) from error
                pause(attempt)
                self.quarantine.refresh()
        raise TransactionConflict(
            f"Other runs committed {subject} first, {LAKE_ATTEMPTS} times in a row; try again later"
        )
