"""What the parts of one run share, and how often it begins again when another run is faster."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final, TypeVar

from holdfast.errors import TransactionConflict, Unreachable
from holdfast.limits import INGEST_TASK_BYTES, LAKE_ATTEMPTS
from holdfast.pipeline import tasks
from holdfast.pipeline.config import Config
from holdfast.pipeline.intake.quarantines import Quarantine
from holdfast.pipeline.intake.task_payloads import Courier
from holdfast.pipeline.journal_chunks import Stores
from holdfast.pipeline.lake import Lake, LakeTable, staging
from holdfast.pipeline.lake.attempts import pause
from holdfast.pipeline.lake.locations import Place
from holdfast.pipeline.progress import Tell
from holdfast.pipeline.schemas import ACTIVITY, ENTITY_CHANGES, JOURNAL, SEGMENTS, Table
from holdfast.pipeline.views import View

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


T = TypeVar("T")
_LOSSES_MAX: Final = 3  # Times that what was staged is gone before that is more than somebody's cleaning.


class Again(Exception):
    """Nothing is wrong, and nothing was committed: plan anew."""


class Lost(Again):
    """What was staged is not there: somebody has cleared the place, or executors do not reach it."""


def require_staged(lost: Iterable[str]) -> None:
    """Raise Lost if some task did not find what was staged for it."""
    if said := next(filter(None, lost), None):
        raise Lost(said)


def _ahead(planner: ThreadPoolExecutor, batches: Iterator[T]) -> Iterator[T]:
    coming = planner.submit(next, batches, None)
    while (batch := coming.result()) is not None:
        coming = planner.submit(next, batches, None)
        yield batch


class Run:
    """One run: a view, the tables that it fills, and a place where hot records wait for executors."""

    def __init__(
        self,
        spark: "SparkSession | None",
        config: Config,
        view: View,
        staged: Place,
        tell: Tell | None,
        *,
        courier: Courier | None = None,
        alone_bytes: int = 0,
    ) -> None:
        """What is smaller than `alone_bytes` is done here: that is over before executors would begin."""
        self.spark = spark
        self.config = config
        self.view = view
        self.lake = Lake(config.lake, config.storage)
        self.quarantine = Quarantine(self.lake)
        self.staging = staged.store_url
        self.rows = dict.fromkeys((table.name for table in (JOURNAL, SEGMENTS, ACTIVITY, ENTITY_CHANGES)), 0)
        self.batch_bytes = INGEST_TASK_BYTES * tasks.parallelism(spark)
        self.courier = courier
        self._alone_bytes = alone_bytes
        self._commits = 0
        self._staged = staged
        self._tell = tell

    @property
    def stores(self) -> Stores:
        return Stores(self.config.storage)

    def table(self, table: Table) -> LakeTable:
        return self.lake.table(table)

    @contextmanager
    def ahead(self, batches: Iterator[T]) -> Iterator[Iterator[T]]:
        """The same batches, each planned and staged while executors work on the one before it."""
        if self.spark is None:
            yield batches
            return
        with ThreadPoolExecutor(1, "holdfast-plan") as planner:
            yield _ahead(planner, batches)

    def answers(self, work: Callable[[bytes], bytes], given: Sequence[bytes], size: int) -> Iterator[bytes]:
        """Have executors do tasks that need so many bytes to be read."""
        return tasks.answers(self.spark if size >= self._alone_bytes else None, work, given)

    def clear(self, url: str) -> None:
        """Remove what was staged for a batch that is over."""
        name = url.removeprefix(f"{self.staging}/")
        with suppress(Unreachable):  # It goes with the rest in the end.
            staging.clear(self._staged.below(name))

    def committed(self, table: Table, rows: int) -> None:
        """Rows were committed: the run came further."""
        self._commits += 1
        self.rows[table.name] += rows
        if self._tell is not None and rows:
            self._tell(f"{table.name} rows", self.rows[table.name], self.rows[table.name])

    def until_done(self, what: str, work: Callable[[], None]) -> None:
        """Do the work, and again whenever another run was faster.

        Raises:
            TransactionConflict: that was so time and again, and this run came no further meanwhile.
            Unreachable: what was staged was not there, several times.
        """
        attempt = losses = 0
        while attempt < LAKE_ATTEMPTS:
            before = self._commits
            try:
                work()
                return
            except (Again, TransactionConflict) as error:
                attempt = 0 if self._commits > before else attempt + 1
                losses += isinstance(error, Lost)
                if losses > _LOSSES_MAX:
                    raise Unreachable(str(error)) from error
                pause(attempt)
                self.quarantine.refresh()
        raise TransactionConflict(f"Other runs were faster {LAKE_ATTEMPTS} times in a row at {what}; try again later")
