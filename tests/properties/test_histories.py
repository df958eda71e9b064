"""The checkers against systems that are correct by construction, and against an oracle that tries every order."""

from itertools import permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from holdfast.testing.histories import (
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

CLIENTS = ["ada", "bob", "cem", "dee", "eve"]
VALUES = st.integers(0, 3)
CALLS = st.one_of(
    st.tuples(st.just("read"), st.none()),
    st.tuples(st.just("write"), VALUES),
    st.tuples(st.just("cas"), st.tuples(VALUES, VALUES)),
)


def call(register: dict[str, Any], kind: str, argument: Any) -> Any:
    """A correct system: every kind of operation, each in one indivisible step."""
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

    A lost call may take effect after its client has given up and gone on, or never.
    """
    history, register = History(), {}
    todo = list(reversed(calls))
    idle, asked, answered, late = list(CLIENTS), [], [], []
    while todo or asked or answered:
        moves = ["invoke"] * bool(todo and idle) + ["apply", "fail", "lose"] * bool(asked)
        moves += ["return"] * bool(answered) + ["apply late"] * bool(late)
        move = data.draw(st.sampled_from(moves))
        if move == "invoke":
            asked.append(history.invoke(idle.pop(), todo[-1][0], "k", todo.pop()[1]))
        elif move == "apply late":
            operation = late.pop(data.draw(st.integers(0, len(late) - 1)))
            call(register, operation.kind, operation.argument)
        elif move == "return":
            operation, result = answered.pop(data.draw(st.integers(0, len(answered) - 1)))
            if data.draw(st.integers(0, 4)):
                history.ok(operation, result)
            else:
                history.unknown(operation)
            idle.append(operation.client)
        else:
            operation = asked.pop(data.draw(st.integers(0, len(asked) - 1)))
            if move == "apply":
                answered.append((operation, call(register, operation.kind, operation.argument)))
                continue
            if move == "fail":
                history.failed(operation)
            else:
                history.unknown(operation)
                late.append(operation)
            idle.append(operation.client)
    return history, register


@given(st.data(), st.lists(CALLS, max_size=30))
def test_what_an_atomic_register_answers_always_passes(data, calls):
    history, _ = run(data, calls)
    check_register(history, "k", initial=0)


@given(st.data(), st.lists(CALLS, max_size=30))
def test_what_an_atomic_register_holds_at_the_end_always_passes(data, calls):
    history, register = run(data, calls)
    check_nothing_lost(history, register)


@given(st.data(), st.lists(st.sampled_from([None, 1, 2, 5]), max_size=30))
def test_what_an_atomic_counter_answers_always_passes(data, amounts):
    history, register = run(data, [("increment", amount) for amount in amounts])
    check_counter(history, "k", final=register.get("k", 0))


@given(st.data(), st.integers(0, 30))
def test_what_an_atomic_fence_answers_always_passes(data, count):
    history, _ = run(data, [("acquire", None)] * count)
    check_fences(history, "k")


def history_of(operations: list[tuple[str, Any, Any, Outcome]], positions: list[int]) -> History:
    """Operations that begin and end in the order in which their index comes up, first and second, in `positions`."""
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
def wild_histories(draw, calls, count_max):
    """Any answers to any operations in any interleaving: most of them wrong."""
    operations = draw(st.lists(calls, min_size=1, max_size=count_max))
    positions = draw(st.permutations([index for index in range(len(operations)) for _ in range(2)]))
    return history_of(operations, positions)


OUTCOMES = st.sampled_from([Outcome.OK, Outcome.OK, Outcome.OK, Outcome.UNKNOWN, Outcome.FAILED])
SMALL = st.integers(0, 2)
WILD_REGISTER_CALLS = st.one_of(
    st.tuples(st.just("read"), st.none(), SMALL, OUTCOMES),
    st.tuples(st.just("write"), SMALL, st.none(), OUTCOMES),
    st.tuples(st.just("cas"), st.tuples(SMALL, SMALL), st.booleans(), OUTCOMES),
)
WILD_INCREMENTS = st.tuples(st.just("increment"), st.none(), st.integers(0, 6), OUTCOMES)


def explained(history: History, final: int | None = None) -> bool:
    """The oracle: try every subset of the unknown operations in every order that real time allows."""
    operations = [operation for operation in history.operations if operation.outcome is not Outcome.FAILED]

    def fits(order: tuple[Operation, ...]) -> bool:
        register: dict[str, Any] = {"k": 0}
        for operation in order:
            result = call(register, operation.kind, operation.argument)
            if operation.outcome is Outcome.OK and result != operation.result:
                return False
        return final in (None, register["k"])

    def timely(order: tuple[Operation, ...]) -> bool:
        return all(two.returned > one.invoked for at, one in enumerate(order) for two in order[at + 1 :])

    certain = sum(operation.outcome is Outcome.OK for operation in operations)
    return any(
        sum(operation.outcome is Outcome.OK for operation in order) == certain and timely(order) and fits(order)
        for size in range(certain, len(operations) + 1)
        for order in permutations(operations, size)
    )


def passes(check, *args, **kwargs) -> bool:
    try:
        check(*args, **kwargs)
    except Violation:
        return False
    return True


@settings(max_examples=600, deadline=None)
@given(wild_histories(WILD_REGISTER_CALLS, 6))
def test_the_register_checker_and_the_oracle_agree_on_any_history(history):
    assert passes(check_register, history, "k", 0) == explained(history)


@settings(max_examples=400, deadline=None)
@given(wild_histories(WILD_INCREMENTS, 5), st.none() | st.integers(0, 6))
def test_the_counter_checker_and_the_oracle_agree_on_any_history(history, final):
    assert passes(check_counter, history, "k", final=final) == explained(history, final)


@settings(max_examples=300, deadline=None)
@given(wild_histories(WILD_REGISTER_CALLS, 6))
def test_the_operations_a_violation_names_are_a_contradiction_of_their_own(history):
    try:
        check_register(history, "k", 0)
    except Violation as violation:
        named = {operation.invoked for operation in violation.operations}
        alone = History()
        # Positions are what a checker judges by, so the others' places stay empty.
        alone._operations = {each.invoked: each for each in history.operations if each.invoked in named}
        assert not explained(alone)


def count_without_loss(data: st.DataObject, count: int) -> History:
    """`count` increments of which none is lost: their answers are exactly 1 to `count`, in a timely order."""
    history, value = History(), 0
    asked, answered, idle = [], [], list(CLIENTS)
    while count or asked or answered:
        moves = ["invoke"] * bool(count and idle) + ["apply"] * bool(asked) + ["return"] * bool(answered)
        move = data.draw(st.sampled_from(moves))
        if move == "invoke":
            asked.append(history.invoke(idle.pop(), "increment", "k"))
            count -= 1
        elif move == "apply":
            value += 1
            answered.append((asked.pop(data.draw(st.integers(0, len(asked) - 1))), value))
        else:
            operation, result = answered.pop(data.draw(st.integers(0, len(answered) - 1)))
            history.ok(operation, result)
            idle.append(operation.client)
    return history


@given(st.data(), st.integers(1, 25), st.integers(-30, 30).filter(bool))
def test_one_corrupted_answer_of_a_counter_is_always_found(data, count, error):
    history = count_without_loss(data, count)
    answers = [operation for operation in history.operations if operation.outcome is Outcome.OK]
    corrupted = data.draw(st.sampled_from(answers))
    history._operations[corrupted.invoked] = structs.replace(corrupted, result=corrupted.result + error)
    with pytest.raises(Violation):
        check_counter(history, "k")


@given(st.data(), st.lists(CALLS, max_size=10))
def test_equal_histories_have_equal_digests(data, calls):
    history, _ = run(data, calls)
    copy = History()
    copy._operations = {operation.invoked: operation for operation in history.operations}
    assert copy.digest() == history.digest()
    copy._operations[NEVER] = Operation("ada", "read", "k", None, NEVER)
    assert copy.digest() != history.digest()
