"""PostgreSQL reuses the space of acknowledged messages: the table of a plane does not grow with what went through it.

`make nightly` sends ten million messages; `--table-messages N` sends others.
"""

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

import fastness
from fastness import Plane
from fastness.testing.clock import ManualClock

BATCH = 200
PAYLOADS = [b"s" * 200] * (BATCH - 2) + [b"l" * 4_000] * 2  # PostgreSQL stores the large ones apart.


@pytest.fixture
def frequent_autovacuum(postgres_server: str) -> Iterator[None]:
    """Autovacuum looks at the tables every second, as the messages of an hour are sent in minutes."""
    with psycopg.connect(postgres_server, autocommit=True) as connection:
        connection.execute("ALTER SYSTEM SET autovacuum_naptime = 1")
        connection.execute("SELECT pg_reload_conf()")
        yield
        connection.execute("ALTER SYSTEM RESET autovacuum_naptime")
        connection.execute("SELECT pg_reload_conf()")


def process(plane: Plane, clock: ManualClock, batches: range, batches_per_minute: int) -> None:
    """Put, receive and acknowledge a batch of messages for each number, while the time is moved."""
    jobs = plane.queue("jobs")
    for number in batches:
        if number % batches_per_minute == 0:
            clock.advance_ms(60_000)
        jobs.put_many(PAYLOADS)
        received = jobs.receive_many(BATCH, extend_for_seconds=0)
        assert len(received) == BATCH
        jobs.ack_many(received)


def measure(url: str) -> dict[str, int]:
    """The bytes of the table, of its index, and of its large values."""
    with psycopg.connect(url) as connection:
        row = connection.execute(
            """SELECT pg_relation_size('fastness_kv'), pg_indexes_size('fastness_kv'),
                pg_table_size('fastness_kv') - pg_relation_size('fastness_kv')"""
        ).fetchone()
    assert row is not None
    return dict(zip(("table", "index", "large"), row, strict=True))


@pytest.mark.nightly
@pytest.mark.usefixtures("frequent_autovacuum")
def test_ten_million_messages_leave_no_bloat(
    postgres_url: str,
    tmp_path: Path,
    clock: ManualClock,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
) -> None:
    batches = request.config.getoption("--table-messages") // BATCH
    # An ack is remembered for five minutes. Ten have passed after a tenth of the messages, so from then on as many acks
    # are forgotten as are added.
    per_minute = batches // 100
    with fastness.open(postgres_url, activity=str(tmp_path / "logs"), clock=clock) as plane:
        process(plane, clock, range(batches // 10), per_minute)
        tenth = measure(postgres_url)
        process(plane, clock, range(batches // 10, batches), per_minute)
        whole = measure(postgres_url)
        assert plane.queue("jobs").stats().ready == 0
    with capsys.disabled():
        print(f"\n{batches * BATCH // 10:,} messages: {tenth}; {batches * BATCH:,} messages: {whole}")
    # Without vacuum each of them would be ten times as large. A vacuum may be a few thousand messages late.
    for part, size in whole.items():
        assert size < 2 * tenth[part] + 4_000_000, part
