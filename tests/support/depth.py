"""How often tests repeat what has random faults: some in every run, more in `make test-all`, and most by option."""

from typing import Final, NamedTuple

import pytest


class Depth(NamedTuple):
    """Each kind of fault occurs in every run; only the numbers differ."""

    seeds: int  # Of each simulated scenario.
    faulty_seeds: int  # Of a scenario with more faults, or with smaller batches.
    rocksdb_seeds: int  # Of each simulated scenario on RocksDB.
    fleet_seeds: int  # Of simulated hosts.
    examples: float  # Of the examples of a state machine, or of another property, in memory.
    stored_examples: float  # Of those that open a directory or PostgreSQL for each example.
    kills: int  # Of the child of a crash test. Tests with slower children kill them less often.
    histories: int  # Of several servers.
    flips: float  # Of the number of bits that each kind of file has.
    contents: int  # Of files that are replaced.
    images: float  # Of the number of images of a power loss that each trace has.
    server_kills: int  # Of a server under load.
    load: float  # Of the number of messages, mails and frames that are sent while there are faults.


QUICK: Final = Depth(
    seeds=30,
    faulty_seeds=15,
    rocksdb_seeds=2,
    fleet_seeds=40,
    examples=0.4,
    stored_examples=0.25,
    kills=6,
    histories=6,
    flips=0.15,
    contents=1,
    images=0.2,
    server_kills=2,
    load=0.3,
)
FULL: Final = Depth(
    seeds=100,
    faulty_seeds=60,
    rocksdb_seeds=6,
    fleet_seeds=200,
    examples=1.0,
    stored_examples=1.0,
    kills=20,
    histories=30,
    flips=1.0,
    contents=3,
    images=1.0,
    server_kills=4,
    load=1.0,
)


def depth_of(config: pytest.Config) -> Depth:
    """The depth of this run; options replace single numbers."""
    depth = FULL if config.getoption("--part") is None else QUICK
    given = {name: config.getoption(f"--{name}") for name in ("kills", "histories", "flips")}
    return depth._replace(**{name: number for name, number in given.items() if number is not None})


def first_seed_of(config: pytest.Config) -> int:
    """The commit chooses it in `make test`, so that the runs of many commits try many seeds."""
    return int(config.getoption("--part") or 0)
