"""The checkers, compared with systems that are correct by construction and with a brute-force oracle."""

from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from fastness.testing.histories import (
    NEVER,
    History,
    Operation,
    Outcome,
    Violation,
    check_counter,
    check_fences,
    check_nothing_lost,
    check_register,
)

Call = tuple[str, Any, Any, Outcome]  # Its kind, argument, result and outcome.
CLIENTS = ["ada", "bob", "cem", "dee", "eve"]
VALUES = st.integers(0, 3)
CALLS = st.one_of(
    st.tuples(st.just("read"), st.none()),
    st.tuples(st.just("write"), VALUES),
    st.tuples(st.just("cas"), st.tuples(VALUES, VALUES)),
)


def call(register: dict[str, Any], kind: str, argument: Any) -> Any:
    """A correct system: each operation is one atomic step."""
    if kind in ("increment", "acquire"):
        register["k"] = register.get("k", 0) + (argument or 1)
    elif kind == "write":
        register["k"] = argument
        return None
    elif kind == "cas":
        expected, new = argument
        fits = register.get("k", 0) == expected
        if fits:
            register["k"] = new
        return fits
    return register.get("k", 0)


def run(data: st.DataObject, calls: list[tuple[str, Any]]) -> tuple[History, dict[str, Any]]:
    """Run `calls` on a correct register, with clients that are invoked, take effect and return in any interleaving.

    A lost call may take effect after its client has continued, or never.
    """
    history, todo, idle = History(), list(reversed(calls)), list(CLIENTS)
    register: dict[str, Any] = {}
    invoked: list[Operation] = []
    applied: list[tuple[Operation, Any]] = []
    delayed: list[Operation] = []
    while todo or invoked or applied:
        steps = ["invoke"] * bool(todo and idle) + ["apply", "fail", "lose"] * bool(invoked)
        steps += ["return"] * bool(applied) + ["apply late"] * bool(delayed)
        step = data.draw(st.sampled_from(steps))
        if step == "invoke":
            invoked.append(history.invoke(idle.pop(), todo[-1][0], "k", todo.pop()[1]))
        elif step == "apply late":
            operation = delayed.pop(data.draw(st.integers(0, len(delayed) - 1)))
            call(register, operation.kind, operation.argument)
        elif step == "return":
            operation, result = applied.pop(data.draw(st.integers(0, len(applied) - 1)))
            if data.draw(st.integers(0, 4)):
                history.ok(operation, result)
            else:
                history.unknown(operation)
            idle.append(operation.client)
        else:
            operation = invoked.pop(data.draw(st.integers(0, len(invoked) - 1)))
            if step == "apply":
                applied.append((operation, call(register, operation.kind, operation.argument)))
                continue
            if step == "fail":
                history.failed(operation)
            else:
                history.unknown(operation)
                delayed.append(operation)
            idle.append(operation.client)
    return history, register


@given(st.data(), st.lists(CALLS, max_size=30))
def test_answers_of_an_atomic_register_pass(data: st.DataObject, calls: list[tuple[str, Any]]) -> None:
    history, _ = run(data, calls)
    check_register(history, "k", initial=0)


@given(st.data(), st.lists(CALLS, max_size=30))
def test_the_final_value_of_an_atomic_register_passes(data: st.DataObject, calls: list[tuple[str, Any]]) -> None:
    history, register = run(data, calls)
    check_nothing_lost(history, register)


@given(st.data(), st.lists(st.sampled_from([None, 1, 2, 5]), max_size=30))
def test_answers_of_an_atomic_counter_pass(data: st.DataObject, amounts: list[int | None]) -> None:
    history, register = run(data, [("increment", amount) for amount in amounts])
    check_counter(history, "k", final=register.get("k", 0))


@given(st.data(), st.integers(0, 30))
def test_answers_of_an_atomic_fence_pass(data: st.DataObject, count: int) -> None:
    history, _ = run(data, [("acquire", None)] * count)
    check_fences(history, "k")


def history_of(operations: list[Call], positions: list[int]) -> History:
    """A history in which `positions` has the index of each operation twice: where it begins and where it ends."""
    history, running = History(), {}
    for index in positions:
        kind, argument, result, outcome = operations[index]
        if index not in running:
            running[index] = history.invoke(f"client {index}", kind, "k", argument)
        elif outcome is Outcome.OK:
            history.ok(running[index], result)
        elif outcome is Outcome.FAILED:
            history.failed(running[index])
        else:
            history.unknown(running[index])
    return history


@st.composite
def arbitrary_histories(draw: st.DrawFn, calls: st.SearchStrategy[Call], count_max: int) -> History:
    """Any answers to any operations in any interleaving; most are invalid."""
    operations = draw(st.lists(calls, min_size=1, max_size=count_max))
    positions = draw(st.permutations([index for index in range(len(operations)) for _ in range(2)]))
    return history_of(operations, positions)


OUTCOMES = st.sampled_from([Outcome.OK, Outcome.OK, Outcome.OK, Outcome.UNKNOWN, Outcome.FAILED])
SMALL_VALUES = st.integers(0, 2)
ARBITRARY_REGISTER_CALLS = st.one_of(
    st.tuples(st.just("read"), st.none(), SMALL_VALUES, OUTCOMES),
    st.tuples(st.just("write"), SMALL_VALUES, st.none(), OUTCOMES),
    st.tuples(st.just("cas"), st.tuples(SMALL_VALUES, SMALL_VALUES), st.booleans(), OUTCOMES),
)
ARBITRARY_INCREMENTS = st.tuples(st.just("increment"), st.none(), st.integers(0, 6), OUTCOMES)


def has_valid_order(history: History, final: int | None = None) -> bool:
    """The oracle: try every subset of the unknown operations in every order that real time allows."""
    operations = [operation for operation in history.operations if operation.outcome is not Outcome.FAILED]

    def fits(order: tuple[Operation, ...]) -> bool:
        register: dict[str, Any] = {"k": 0}
        for operation in order:
            result = call(register, operation.kind, operation.argument)
            if operation.outcome is Outcome.OK and result != operation.result:
                return False
        return final in (None, register["k"])

    def respects_real_time(order: tuple[Operation, ...]) -> bool:
        return all(two.returned > one.invoked for at, one in enumerate(order) for two in order[at + 1 :])

    certain = sum(operation.outcome is Outcome.OK for operation in operations)
    return any(
        sum(operation.outcome is Outcome.OK for operation in order) == certain
        and respects_real_time(order)
        and fits(order)
        for size in range(certain, len(operations) + 1)
        for order in permutations(operations, size)
    )


def passes(check: Callable[..., object], *args: Any, **kwargs: Any) -> bool:
    try:
        check(*args, **kwargs)
    except Violation:
        return False
    return True


@settings(max_examples=600, deadline=None)
@given(arbitrary_histories(ARBITRARY_REGISTER_CALLS, 6))
def test_the_register_checker_and_the_oracle_agree_on_any_history(history: History) -> None:
    assert passes(check_register, history, "k", 0) == has_valid_order(history)


@settings(max_examples=400, deadline=None)
@given(arbitrary_histories(ARBITRARY_INCREMENTS, 5), st.none() | st.integers(0, 6))
def test_the_counter_checker_and_the_oracle_agree_on_any_history(history: History, final: int | None) -> None:
    assert passes(check_counter, history, "k", final=final) == has_valid_order(history, final)


@settings(max_examples=300, deadline=None)
@given(arbitrary_histories(ARBITRARY_REGISTER_CALLS, 6))
def test_the_operations_of_a_violation_are_contradictory_by_themselves(history: History) -> None:
    try:
        check_register(history, "k", 0)
    except Violation as violation:
        named = {operation.invoked for operation in violation.operations}
        reported = History()
        # Checkers compare positions, so the positions of the other operations stay unused.
        reported._operations = {each.invoked: each for each in history.operations if each.invoked in named}
        assert not has_valid_order(reported)


def count_without_loss(data: st.DataObject, count: int) -> History:
    """A history of `count` increments with the answers 1 to `count`, in an order that real time allows."""
    history, value = History(), 0
    idle = list(CLIENTS)
    invoked: list[Operation] = []
    applied: list[tuple[Operation, int]] = []
    while count or invoked or applied:
        steps = ["invoke"] * bool(count and idle) + ["apply"] * bool(invoked) + ["return"] * bool(applied)
        step = data.draw(st.sampled_from(steps))
        if step == "invoke":
            invoked.append(history.invoke(idle.pop(), "increment", "k"))
            count -= 1
        elif step == "apply":
            value += 1
            applied.append((invoked.pop(data.draw(st.integers(0, len(invoked) - 1))), value))
        else:
            operation, result = applied.pop(data.draw(st.integers(0, len(applied) - 1)))
            history.ok(operation, result)
            idle.append(operation.client)
    return history


@given(st.data(), st.integers(1, 25), st.integers(-30, 30).filter(bool))
def test_one_corrupted_answer_of_a_counter_is_always_found(data: st.DataObject, count: int, error: int) -> None:
    history = count_without_loss(data, count)
    answers = [operation for operation in history.operations if operation.outcome is Outcome.OK]
    corrupted = data.draw(st.sampled_from(answers))
    history._operations[corrupted.invoked] = structs.replace(corrupted, result=corrupted.result + error)
    with pytest.raises(Violation):
        check_counter(history, "k")


@given(st.data(), st.lists(CALLS, max_size=10))
def test_equal_histories_have_equal_digests(data: st.DataObject, calls: list[tuple[str, Any]]) -> None:
    history, _ = run(data, calls)
    copy = History()
    copy._operations = {operation.invoked: operation for operation in history.operations}
    assert copy.digest() == history.digest()
    copy._operations[NEVER] = Operation("ada", "read", "k", None, NEVER)
    assert copy.digest() != history.digest()
