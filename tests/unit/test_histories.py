"""Each checker accepts the answers of a correct system, and finds each kind of violation."""

import threading
from collections.abc import Hashable
from typing import Any

import pytest

from fastness.errors import Busy, CommitUnknown, InvalidArgument, Unreachable
from fastness.testing.histories import (
    History,
    Operation,
    Outcome,
    Undecided,
    Violation,
    check_all_fences,
    check_counter,
    check_fences,
    check_nothing_lost,
    check_register,
    check_registers,
)


@pytest.fixture
def history() -> History:
    return History()


def done(history: History, kind: str, argument: Any = None, result: Any = None, key: str = "k") -> Operation:
    """An operation that returned before anything else was invoked."""
    return history.ok(history.invoke("ada", kind, key, argument), result)


def lost(history: History, kind: str, argument: Any = None, key: Hashable = "k") -> Operation:
    return history.unknown(history.invoke("bob", kind, key, argument))


def failed(history: History, kind: str, argument: Any = None, key: str = "k") -> Operation:
    return history.failed(history.invoke("cem", kind, key, argument))


def fails(error: Exception) -> Any:
    def call() -> None:
        raise error

    return call


# Recording.


def test_positions_come_from_one_counter(history: History) -> None:
    first = history.invoke("ada", "write", "k", 1)
    second = history.invoke("bob", "read", "k")
    assert (first.invoked, second.invoked) == (1, 2)
    assert history.ok(second, 1).returned == 3
    assert history.ok(first).returned == 4


def test_an_operation_that_never_returned_is_unknown(history: History) -> None:
    history.invoke("ada", "write", "k", 1)
    assert [operation.outcome for operation in history.operations] == [Outcome.UNKNOWN]


@pytest.mark.parametrize(
    ("error", "outcome"),
    [(CommitUnknown("lost"), Outcome.UNKNOWN), (Busy("full"), Outcome.FAILED), (Unreachable("gone"), Outcome.FAILED)],
)
def test_an_error_determines_whether_the_outcome_is_unknown(
    history: History, error: Exception, outcome: Outcome
) -> None:
    assert history.record("ada", "write", "k", 1, fails(error)).outcome is outcome


def test_a_recorded_call_keeps_its_result(history: History) -> None:
    operation = history.record("ada", "read", "k", None, lambda: 7)
    assert (operation.outcome, operation.result) == (Outcome.OK, 7)
    assert history.operations == (operation,)


def test_another_exception_propagates_and_leaves_the_outcome_unknown(history: History) -> None:
    with pytest.raises(ZeroDivisionError):
        history.record("ada", "write", "k", 1, fails(ZeroDivisionError()))
    assert history.operations[0].outcome is Outcome.UNKNOWN


def test_an_operation_ends_once(history: History) -> None:
    operation = history.invoke("ada", "write", "k", 1)
    history.unknown(operation)
    with pytest.raises(InvalidArgument, match="already ended"):
        history.ok(operation)


def test_an_operation_ends_in_its_own_history(history: History) -> None:
    with pytest.raises(InvalidArgument, match="another history"):
        history.ok(History().invoke("ada", "write", "k", 1))


def test_many_threads_record_concurrently(history: History) -> None:
    def work() -> None:
        for _ in range(200):
            history.record("ada", "read", "k", None, lambda: None)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    positions = [position for each in history.operations for position in (each.invoked, each.returned)]
    assert sorted(positions) == list(range(1, 3_201))


def test_the_digest_is_stable_across_processes(history: History) -> None:
    done(history, "write", {"b": 1, "a": {3, 1, 2}})
    lost(history, "cas", (None, b"x"), key=("jobs", 4))
    assert history.digest() == "e8954fa66ad44c483ca7729a474f511c1cb1cb6272d1e719dab1bd71e308a304"


def test_the_digest_covers_every_answer(history: History) -> None:
    other = History()
    done(history, "read", result=1)
    done(other, "read", result=2)
    assert history.digest() != other.digest()


def test_a_history_renders_its_last_operations(history: History) -> None:
    done(history, "write", 1)
    done(history, "read", result=1)
    lost(history, "write", 2)
    assert history.render(2) == "(1 earlier operations)\n[3..4] ada: read 'k' -> 1\n[5..] bob: write 'k' 2 -> unknown"
    assert history.render().startswith("[1..2] ada: write 'k' 1 -> None\n")


def test_a_violation_prints_its_operations_in_order(history: History) -> None:
    first, second = done(history, "write", 1), done(history, "read", result=2)
    violation = Violation("Wrong", [second, first, second])
    assert str(violation) == "Wrong\n    [1..2] ada: write 'k' 1 -> None\n    [3..4] ada: read 'k' -> 2"
    assert violation.operations == (first, second)


def test_a_violation_prints_a_bounded_number_of_operations(history: History) -> None:
    operations = [done(history, "read") for _ in range(60)]
    assert str(Violation("Wrong", operations)).endswith("and 10 more, in `operations`")


# Registers.


def test_a_correct_register_passes(history: History) -> None:
    done(history, "read", result=None)
    done(history, "write", 1)
    done(history, "cas", (1, 2), True)
    done(history, "cas", (1, 3), False)
    done(history, "read", result=2)
    assert check_register(history, "k") >= 1


def test_a_register_may_start_with_a_value(history: History) -> None:
    done(history, "read", result=5)
    check_register(history, "k", initial=5)
    with pytest.raises(Violation):
        check_register(history, "k")


def test_concurrent_writes_may_take_effect_in_any_order(history: History) -> None:
    one, two = history.invoke("ada", "write", "k", 1), history.invoke("bob", "write", "k", 2)
    history.ok(one)
    history.ok(two)
    done(history, "read", result=1)
    check_register(history, "k")


def test_concurrent_writes_have_one_order_for_all_readers(history: History) -> None:
    one, two = history.invoke("ada", "write", "k", 1), history.invoke("bob", "write", "k", 2)
    history.ok(one)
    history.ok(two)
    reads = done(history, "read", result=1), done(history, "read", result=2)
    with pytest.raises(Violation) as caught:
        check_register(history, "k")
    assert set(reads) <= set(caught.value.operations)


def test_a_stale_read_is_reported_with_few_other_operations(history: History) -> None:
    done(history, "write", 1)
    for value in range(2, 100):
        done(history, "write", value)
        done(history, "read", result=value)
    stale = done(history, "read", result=1)
    done(history, "write", 100)
    with pytest.raises(Violation, match="no order") as caught:
        check_register(history, "k")
    assert stale in caught.value.operations
    assert len(caught.value.operations) <= 4


def test_a_lost_update_is_found(history: History) -> None:
    one, two = history.invoke("ada", "cas", "k", (None, 1)), history.invoke("bob", "cas", "k", (None, 2))
    both = {history.ok(one, True), history.ok(two, True)}
    with pytest.raises(Violation) as caught:
        check_register(history, "k")
    assert set(caught.value.operations) == both


def test_a_cas_refused_without_reason_is_found(history: History) -> None:
    done(history, "write", 1)
    done(history, "cas", (1, 2), False)
    with pytest.raises(Violation):
        check_register(history, "k")


def test_a_lost_write_may_explain_a_refused_cas(history: History) -> None:
    lost(history, "write", 3)
    done(history, "write", 1)
    done(history, "cas", (1, 2), False)
    check_register(history, "k")


def test_a_phantom_value_is_found(history: History) -> None:
    done(history, "write", 1)
    phantom = done(history, "read", result=9)
    with pytest.raises(Violation) as caught:
        check_register(history, "k")
    assert caught.value.operations == (phantom,)


def test_a_failed_write_that_is_read_is_found(history: History) -> None:
    write, read = failed(history, "write", 1), done(history, "read", result=1)
    with pytest.raises(Violation) as caught:
        check_register(history, "k")
    assert caught.value.operations == (write, read)


def test_a_read_before_its_write_is_found(history: History) -> None:
    read, write = done(history, "read", result=1), done(history, "write", 1)
    with pytest.raises(Violation) as caught:
        check_register(history, "k")
    assert caught.value.operations == (read, write)


def test_a_lost_write_may_never_happen(history: History) -> None:
    lost(history, "write", 1)
    done(history, "read", result=None)
    check_register(history, "k")


def test_a_lost_write_may_happen_much_later(history: History) -> None:
    lost(history, "write", 1)
    done(history, "write", 2)
    done(history, "read", result=2)
    done(history, "read", result=1)
    check_register(history, "k")


def test_a_lost_write_that_was_read_does_not_disappear(history: History) -> None:
    done(history, "write", 1)
    write = lost(history, "write", 2)
    reads = done(history, "read", result=2), done(history, "read", result=1)
    with pytest.raises(Violation) as caught:
        check_register(history, "k")
    assert {write, *reads} <= set(caught.value.operations)


def test_a_lost_write_happens_once(history: History) -> None:
    lost(history, "write", 2)
    for value in (2, 1, 2):
        if value == 1:
            done(history, "write", 1)
        done(history, "read", result=value)
    with pytest.raises(Violation):
        check_register(history, "k")


def test_lost_cas_operations_may_follow_each_other(history: History) -> None:
    lost(history, "cas", (None, 1))
    lost(history, "cas", (1, 2))
    done(history, "read", result=2)
    check_register(history, "k")


def test_lost_reads_are_ignored(history: History) -> None:
    lost(history, "read")
    failed(history, "read")
    check_register(history, "k", initial=1)


def test_registers_are_checked_one_by_one(history: History) -> None:
    done(history, "write", 1, key="a")
    done(history, "write", 2, key="b")
    done(history, "read", result=1, key="a")
    check_registers(history)
    done(history, "read", result=1, key="b")
    check_register(history, "a")
    with pytest.raises(Violation, match="Register 'b'"):
        check_registers(history)


def test_values_need_not_be_hashable(history: History) -> None:
    done(history, "write", {"a": [1]})
    done(history, "read", result={"a": [1]})
    check_register(history, "k")


def test_a_search_that_takes_too_long_is_undecided(history: History) -> None:
    writes = [history.invoke(f"client {value}", "write", "k", value) for value in range(6)]
    for write in writes:
        history.ok(write)
    for value in (5, 5):
        done(history, "cas", (value, value), True)
    with pytest.raises(Undecided, match="after 1 states"):
        check_register(history, "k", initial=5, states_max=1)


def test_a_simple_violation_is_found_even_when_the_search_reaches_its_bound(history: History) -> None:
    done(history, "write", 1)
    done(history, "write", 2)
    done(history, "read", result=1)
    with pytest.raises(Violation):
        check_register(history, "k", states_max=0)


def test_a_long_concurrent_history_takes_few_states(history: History) -> None:
    value = None
    for batch in range(60):
        running = [history.invoke(f"writer {client}", "write", "k", batch * 10 + client) for client in range(5)]
        running += [history.invoke(f"reader {client}", "read", "k") for client in range(5)]
        for operation in running:
            value = operation.argument if operation.kind == "write" else value
            history.ok(operation, None if operation.kind == "write" else value)
    assert check_register(history, "k") < 2_000


# Counters.


def test_a_correct_counter_passes(history: History) -> None:
    for value in (1, 2, 3):
        done(history, "increment", result=value)
    done(history, "increment", 5, 8)
    check_counter(history, "k", final=8)


def test_concurrent_increments_may_be_answered_in_any_order(history: History) -> None:
    one, two = history.invoke("ada", "increment", "k"), history.invoke("bob", "increment", "k")
    history.ok(one, 2)
    history.ok(two, 1)
    check_counter(history, "k")


def test_an_increment_that_overwrote_another_is_found(history: History) -> None:
    both = done(history, "increment", result=1), done(history, "increment", result=1)
    with pytest.raises(Violation, match="granted twice") as caught:
        check_counter(history, "k")
    assert caught.value.operations == both


def test_a_counter_that_runs_backwards_is_found(history: History) -> None:
    both = done(history, "increment", result=2), done(history, "increment", result=1)
    with pytest.raises(Violation, match="2 had returned before the call that got 1 was made") as caught:
        check_counter(history, "k")
    assert caught.value.operations == both


def test_a_counter_that_skips_is_found(history: History) -> None:
    one, three = done(history, "increment", result=1), done(history, "increment", result=3)
    with pytest.raises(Violation, match="skipped") as caught:
        check_counter(history, "k")
    assert caught.value.operations == (one, three)


def test_a_lost_increment_explains_one_skip_and_only_after_its_invocation(history: History) -> None:
    lost(history, "increment")
    done(history, "increment", result=2)
    check_counter(history, "k")

    late = History()
    done(late, "increment", result=2)
    lost(late, "increment")
    with pytest.raises(Violation, match="skipped"):
        check_counter(late, "k")


def test_a_lost_increment_cannot_come_before_a_higher_answer_that_returned_without_it(history: History) -> None:
    slow = history.invoke("ada", "increment", "k")
    done(history, "increment", result=3)
    lost(history, "increment")
    history.ok(slow, 2)
    with pytest.raises(Violation, match="skipped"):
        check_counter(history, "k")


def test_a_failed_increment_explains_nothing(history: History) -> None:
    failed(history, "increment")
    done(history, "increment", result=2)
    with pytest.raises(Violation, match="skipped"):
        check_counter(history, "k")


def test_a_partly_counted_amount_is_found(history: History) -> None:
    done(history, "increment", 5, 5)
    done(history, "increment", 5, 7)
    with pytest.raises(Violation, match="too low"):
        check_counter(history, "k")


@pytest.mark.parametrize(("final", "fits"), [(1, False), (2, True), (3, True), (4, False)])
def test_the_final_count_is_between_the_acknowledged_and_the_possible(history: History, final: int, fits: bool) -> None:
    done(history, "increment", result=1)
    done(history, "increment", result=2)
    lost(history, "increment")
    if fits:
        check_counter(history, "k", final=final)
    else:
        with pytest.raises(Violation, match="allow 2 to 3"):
            check_counter(history, "k", final=final)


def test_a_counter_may_start_at_any_value(history: History) -> None:
    done(history, "increment", result=11)
    check_counter(history, "k", initial=10)
    with pytest.raises(Violation, match="too low"):
        check_counter(history, "k", initial=20)


@pytest.mark.parametrize(("argument", "result"), [(0, 1), (-1, 1), (1.5, 1), (1, None), (1, "1")])
def test_invalid_increments_are_refused(history: History, argument: object, result: object) -> None:
    done(history, "increment", argument, result)
    with pytest.raises(InvalidArgument):
        check_counter(history, "k")


def test_an_empty_counter_passes(history: History) -> None:
    check_counter(history, "k", final=0)


# Fences.


def test_increasing_fences_pass_even_with_gaps(history: History) -> None:
    for fence in (1, 2, 7):
        done(history, "acquire", result=fence)
    lost(history, "acquire")
    failed(history, "acquire")
    check_fences(history, "k")


def test_a_fence_granted_twice_is_found(history: History) -> None:
    both = done(history, "acquire", result=4), done(history, "acquire", result=4)
    with pytest.raises(Violation, match="4 was granted twice") as caught:
        check_fences(history, "k")
    assert caught.value.operations == both


def test_a_later_grant_with_a_lower_fence_is_found(history: History) -> None:
    high = done(history, "acquire", result=9)
    low = done(history, "acquire", result=3)
    done(history, "acquire", result=10)
    with pytest.raises(Violation, match="9 had returned before") as caught:
        check_fences(history, "k")
    assert caught.value.operations == (high, low)


def test_fences_of_different_keys_do_not_compare(history: History) -> None:
    done(history, "acquire", result=2, key="a")
    done(history, "acquire", result=1, key="b")
    check_all_fences(history)
    done(history, "acquire", result=1, key="b")
    with pytest.raises(Violation, match="Fence 'b'"):
        check_all_fences(history)


# Stored values at the end.


def test_stored_acknowledged_writes_pass(history: History) -> None:
    done(history, "write", 1, key="a")
    done(history, "write", None, key="b")
    lost(history, "write", 3, key="c")
    lost(history, "write", 4, key="d")
    failed(history, "write", 5, key="e")
    done(history, "cas", (None, 6), True, key="f")
    done(history, "cas", (1, 7), False, key="g")
    check_nothing_lost(history, {"a": 1, "c": 3, "f": 6})


def test_a_lost_acknowledged_write_is_found(history: History) -> None:
    write = done(history, "write", 1)
    with pytest.raises(Violation, match="a write was acknowledged") as caught:
        check_nothing_lost(history, {})
    assert caught.value.operations == (write,)


def test_an_overwritten_value_does_not_return(history: History) -> None:
    both = done(history, "write", 1), done(history, "write", 2)
    with pytest.raises(Violation, match="a later write was acknowledged") as caught:
        check_nothing_lost(history, {"k": 1})
    assert caught.value.operations == both


def test_either_of_two_concurrent_writes_may_be_left(history: History) -> None:
    one, two = history.invoke("ada", "write", "k", 1), history.invoke("bob", "write", "k", 2)
    history.ok(one)
    history.ok(two)
    check_nothing_lost(history, {"k": 1})
    check_nothing_lost(history, {"k": 2})


def test_a_lost_write_may_overwrite_a_later_one(history: History) -> None:
    lost(history, "write", 1)
    done(history, "write", 2)
    check_nothing_lost(history, {"k": 1})
    check_nothing_lost(history, {"k": 2})


def test_a_stored_failed_write_is_found(history: History) -> None:
    write = failed(history, "write", 1)
    with pytest.raises(Violation, match="that write failed") as caught:
        check_nothing_lost(history, {"k": 1})
    assert caught.value.operations == (write,)


@pytest.mark.parametrize("found", [{"k": 1, "x": 1}, {"k": 9}])
def test_a_key_or_a_value_that_was_never_written_is_found(history: History, found: dict[str, int]) -> None:
    done(history, "write", 1)
    with pytest.raises(Violation, match="no write has this value"):
        check_nothing_lost(history, found)
