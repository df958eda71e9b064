"""Two and three real servers on one PostgreSQL, with kills, pauses and partitions: no client sees a contradiction."""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from fastness.testing.histories import History, Outcome, Violation
from tests.faults import server_fleet, server_histories
from tests.support.depth import Depth

HERE = Path(__file__).parent
HISTORIES_MIN = 3  # Fewer cannot have every kind of fault.
HISTORIES_OF_EVERYTHING = 10  # Fewer may be too short for every kind of call.


def run_history(fleet: Any, plan: Any, **options: Any) -> Any:
    """Run and check one history; a violation names the seed."""
    found = server_histories.ServerHistory(fleet, plan, **options)
    try:
        found.run(server_fleet.FAULTS)
        found.check()
    except Violation as violation:
        raise Violation(f"{plan}\n{violation.message}", violation.operations) from None
    except BaseException as error:
        error.add_note(str(plan))
        raise
    return found


def chosen_seeds(first: int, servers: int, count: int) -> list[int]:
    """The seeds of that many histories, from `first` on, which together have every kind of fault."""
    missing = set(server_histories.FAULT_WEIGHTS)
    found = []
    for left in range(count, 0, -1):
        seed = first
        while missing:  # Each of the histories that are left has its share of what is missing.
            faults = {name for some in server_histories.Plan(seed, servers).faults for _, name, _ in some}
            if len(faults & missing) * left >= len(missing):
                missing -= faults
                break
            seed += 1
        found.append(seed)
        first = seed + 1
    return found


@pytest.mark.parametrize("servers", [2, pytest.param(3, marks=pytest.mark.rotating)])
def test_servers_that_share_a_database_behave_like_one(
    servers: int, postgres_url: str, tmp_path: Path, depth: Depth, request: pytest.FixtureRequest
) -> None:
    """Every client calls random servers. `--histories` is the number of histories, half of them for each size."""
    given = request.config.getoption("--history-seed")
    first = random.SystemRandom().randrange(1 << 32) if given is None else given
    seeds = chosen_seeds(first, servers, max(depth.histories // 2, HISTORIES_MIN)) if given is None else [first]
    seen: Counter[tuple[str, str]] = Counter()
    errors: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    with server_fleet.Fleet(postgres_url, tmp_path, servers) as fleet:
        for seed in seeds:
            plan = server_histories.Plan(seed, servers)
            print(plan)
            found = run_history(fleet, plan)
            seen.update((each.kind, each.outcome.value) for each in found.history.operations)
            errors += found.errors
            faults.update(name for some in plan.faults for _, name, _ in some)
    print(f"{len(seeds)} histories; faults: {dict(faults)}; errors: {dict(errors)}")
    print({f"{kind} {outcome}": number for (kind, outcome), number in sorted(seen.items())})
    if given is None:
        assert set(faults) == set(server_histories.FAULT_WEIGHTS)
        if len(seeds) >= HISTORIES_OF_EVERYTHING:
            for kind in ("read", "cas", "put", "lease", "ack", "grant", "guarded", "append", "journal", "send"):
                assert seen[kind, Outcome.OK], f"no {kind} was answered"


# By flaw: the faults that it needs to show, and what is found. The first and the last show in many ways.
FLAWS: dict[str, tuple[dict[str, int], str | None]] = {
    "isolate_nothing": ({}, None),
    "accept_old_fences": ({}, "was accepted after fence|was delivered again after its ack|still there after its ack"),
    "grant_held_leases": ({}, "had two holders"),
    "miss_notifications": ({}, "a waiting consumer got nothing"),
    "forget_keys": ({"mute clients": 1}, "was stored 2 times|messages have no put"),
    "lose_commits": ({}, None),
}


SLOW = ("miss_notifications", "forget_keys", "lose_commits")


@pytest.mark.parametrize(
    "flaw", [pytest.param(flaw, marks=[pytest.mark.nightly] if flaw in SLOW else []) for flaw in FLAWS]
)
def test_a_flaw_of_the_servers_is_found(flaw: str, postgres_url: str, tmp_path: Path) -> None:
    """Histories of servers that break one guarantee; each flaw shows in one of a few."""
    faults, message = FLAWS[flaw]
    command = [str(HERE / "flawed_server_child.py"), flaw]
    with (
        server_fleet.Fleet(postgres_url, tmp_path, 2, command=command) as fleet,
        pytest.raises(Violation, match=message),
    ):
        for seed in range(60):
            run_history(fleet, server_histories.Plan(seed, 2, faults), stuck_seconds=5.0)


def test_a_body_that_was_stored_twice_is_found() -> None:
    history = History()
    history.ok(history.invoke("ada", "put", "jobs", "body"), "a")
    history.ok(history.invoke("bob", "lease", "jobs"), [["a", 1, 0, 100, "body"], ["c", 1, 0, 100, "other"]])
    history.ok(history.invoke("bob", "lease", "jobs"), [["a", 2, 100, 200, "body"]])
    server_histories.check_bodies(history, "jobs")
    history.ok(history.invoke("bob", "lease", "jobs"), [["b", 1, 0, 100, "body"]])
    with pytest.raises(Violation, match="body was stored 2 times"):
        server_histories.check_bodies(history, "jobs")
