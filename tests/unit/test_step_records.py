"""What is recorded of a step: large results in blobs, and the traceback and the inputs of one that failed."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cbor2
import pytest

from fastness import HostApp, Retry, WorkflowRun
from fastness.errors import BlobNotFound, RunFailed, StepFailed, Unreachable
from fastness.hosts.workflows import runner
from fastness.limits import (
    BLOB_TOUCH_SECONDS,
    FAILURES_BYTES_MAX,
    GC_GRACE_SECONDS,
    RUN_RESULT_BYTES_MAX,
    TRACEBACK_BYTES_MAX,
)
from fastness.runtime.blobs import AsyncBlobStore
from fastness.testing import HostTest
from fastness.wire.hosting import ClaimWorlds, CommitTurn
from fastness.wire.run_timeline import TimelineEvent

LARGE = "x" * RUN_RESULT_BYTES_MAX
app = HostApp()
made: list[str] = []


async def make_large(name: str) -> str:
    made.append(name)
    return name + LARGE


@app.workflow
async def keep(run: WorkflowRun, name: str) -> int:
    """Waits with a large result, which a restored run needs."""
    found = await run.step(make_large, name)
    assert found == name + LARGE
    while await run.wait_for("again"):
        await run.step(len, found)
    return len(found)


@pytest.fixture
def test(tmp_path: Path) -> Iterator[HostTest]:
    made.clear()
    with HostTest(app, url=f"dir:{tmp_path / 'data'}", snapshot_every=4) as test:
        yield test


def bodies(tmp_path: Path) -> list[str]:
    """The bodies of blobs in the object store."""
    return [path.name for path in (tmp_path / "data" / "objects" / "cas").rglob("*") if path.is_file()]


def collect(test: HostTest) -> None:
    """Collect as often as it takes to delete what nothing names, with its body."""
    for _ in range(4):
        test.plane.gc()
        test.clock.advance_ms(round(GC_GRACE_SECONDS + BLOB_TOUCH_SECONDS) * 1_000)


def events(test: HostTest, run: str, kind: str) -> list[TimelineEvent]:
    return [event for event in test.plane.workflows.history(run) if event.kind == kind]


def test_a_large_result_is_a_blob_that_a_restored_run_reads(test: HostTest, tmp_path: Path) -> None:
    run = test.plane.workflows.start(keep, "a", id="k")
    test.run_until_idle()
    assert len(bodies(tmp_path)) == 1
    assert max(len(record.value) for record in test.plane.world("run:k").read()) < 1_000
    [step] = events(test, "k", "step")
    assert cbor2.loads(test.plane.blobs.get(step.details["result_blob"])) == "a" + LARGE
    test.restart()
    run.signal("again", False)
    assert test.run_to_end(run) == len("a" + LARGE)
    assert made == ["a"]


def test_a_step_on_a_plane_without_an_object_store_says_that_its_result_needs_one(postgres_url: str) -> None:
    with HostTest(app, url=postgres_url) as test:
        run = test.plane.workflows.start(keep, "a", id="k")
        with pytest.raises(RunFailed, match=r"Unsupported.*object store"):
            test.run_to_end(run)


def test_a_collection_keeps_the_results_that_a_journal_names(test: HostTest, tmp_path: Path) -> None:
    run = test.plane.workflows.start(keep, "a", id="k")
    test.run_until_idle()
    collect(test)
    assert len(bodies(tmp_path)) == 1
    for _ in range(10):  # Snapshots are taken, and the journal is moved into segments.
        run.signal("again", True)
        test.run_until_idle()
    world = test.plane.world("run:k")
    assert world.snapshots.baseline().height > 0
    assert world.compact(entries=4, margin=0).segments > 0
    collect(test)
    test.restart()
    run.signal("again", False)
    assert test.run_to_end(run) == len("a" + LARGE)
    assert made == ["a"]


def test_a_result_is_collected_when_no_run_fork_or_archive_names_it(test: HostTest, tmp_path: Path) -> None:
    run = test.plane.workflows.start(keep, "a", id="k")
    run.signal("again", False)
    test.run_to_end(run)
    world = test.plane.world("run:k")
    fork = world.fork("copy", height=world.head())
    run.delete()
    collect(test)
    assert len(bodies(tmp_path)) == 1
    fork.archive()
    collect(test)
    assert len(bodies(tmp_path)) == 1
    fork.delete()
    collect(test)
    assert bodies(tmp_path) == []


def test_a_backup_has_the_results_that_a_journal_names(test: HostTest, tmp_path: Path) -> None:
    test.plane.workflows.start(keep, "a", id="k")
    test.run_until_idle()
    checkpoint = test.plane.backups.begin()
    paths = [file.path for file in test.plane.backups.files(checkpoint.id)]
    assert [path.rpartition("/")[2] for path in paths if path.startswith("objects/cas/")] == bodies(tmp_path)
    test.plane.backups.end(checkpoint.id)


def test_a_turn_that_names_a_blob_which_is_not_stored_is_refused(test: HostTest) -> None:
    test.plane.world("w").create(program="p")
    test.plane.world("w").send("go", {})
    [claimed] = test.plane._transport.call(ClaimWorlds(["p"], "h")).worlds
    turn = CommitTurn("w", "h", claimed.fence, claimed.head, entries=[b"\xf6"], blobs=["ab" * 32])
    with pytest.raises(BlobNotFound, match="abab"):
        test.plane._transport.call(turn)
    assert test.plane.world("w").head() == claimed.head


def test_a_result_that_cannot_be_stored_now_is_stored_later_and_its_step_is_not_run_again(
    test: HostTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_STORE_PAUSE_SECONDS", 0)
    put, refused = AsyncBlobStore.put, list[bytes]()

    async def put_later(store: AsyncBlobStore, universe: str, data: bytes, **options: Any) -> Any:
        if len(refused) < 3:
            refused.append(data)
            raise Unreachable("The object store does not answer")
        return await put(store, universe, data, **options)

    monkeypatch.setattr(AsyncBlobStore, "put", put_later)
    run = test.plane.workflows.start(keep, "a", id="k")
    run.signal("again", False)
    assert test.run_to_end(run) == len("a" + LARGE)
    assert (made, len(refused)) == (["a"], 3)


def test_a_failed_step_keeps_its_traceback_and_what_it_was_called_with() -> None:
    failing = HostApp()

    def charge(order: int, *, card: object) -> None:
        raise ValueError(f"card of order {order} is declined")

    @failing.workflow
    async def pay(run: WorkflowRun) -> str:
        try:
            await run.step(charge, 17, card=print)
        except StepFailed as error:
            return error.message
        return "paid"

    with HostTest(failing) as test:
        run = test.plane.workflows.start(pay, id="p")
        assert test.run_to_end(run) == "card of order 17 is declined"
        [failed] = events(test, "p", "failed")
    assert failed.details["error"] == "ValueError: card of order 17 is declined"
    assert 'raise ValueError(f"card of order {order} is declined")' in failed.details["traceback"]
    assert failed.details["inputs"] == {"args": [17], "kwargs": {"card": "<built-in function print>"}}


def test_large_inputs_of_a_failed_step_are_in_a_blob() -> None:
    failing = HostApp()

    @failing.workflow
    async def measure(run: WorkflowRun, text: str) -> None:
        await run.step(int, text)

    with HostTest(failing) as test:
        with pytest.raises(RunFailed, match="ValueError"):
            test.run_to_end(test.plane.workflows.start(measure, LARGE, id="m"))
        [failed] = events(test, "m", "failed")
        assert cbor2.loads(test.plane.blobs.get(failed.details["inputs_blob"])) == [[LARGE], {}]


def test_a_step_keeps_as_many_bytes_of_tracebacks_as_a_message_of_a_queue() -> None:
    failing = HostApp()

    def fail(depth: int) -> None:
        if depth:
            fail(depth - 1)
        raise KeyError("no" * TRACEBACK_BYTES_MAX)

    @failing.workflow
    async def insist(run: WorkflowRun) -> None:
        await run.step(fail, 3, retry=Retry(12, delay_seconds=0))

    with HostTest(failing) as test:
        with pytest.raises(RunFailed):
            test.run_to_end(test.plane.workflows.start(insist, id="i"))
        failed = [*events(test, "i", "retry"), *events(test, "i", "failed")]
    kept = [len(event.details.get("traceback", "").encode()) for event in failed]
    assert [size > 0 for size in kept] == [True] * 3 + [False] * 8 + [True]
    assert sum(kept) <= FAILURES_BYTES_MAX
    assert max(kept) == TRACEBACK_BYTES_MAX
    assert ["inputs" in event.details for event in failed] == [True] + [False] * 10 + [True]


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    "make", [lambda: OSError("caf\udce9.txt"), UnprintableError], ids=["half a surrogate", "no text"]
)
def test_an_error_that_cannot_be_written_down_fails_its_step_all_the_same(make: Callable[[], Exception]) -> None:
    failing = HostApp()

    def fail() -> None:
        raise make()

    @failing.workflow
    async def job(run: WorkflowRun) -> None:
        await run.step(fail)

    with HostTest(failing) as test, pytest.raises(RunFailed, match="Step fail failed"):
        test.run_to_end(test.plane.workflows.start(job, id="j"))
