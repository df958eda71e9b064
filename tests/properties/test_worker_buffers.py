"""The buffer of a worker with batches, against what its handlers are promised."""

from typing import Any, NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from fastness.handles.workers.consumers import Buffer, HeldMessages, Window


class FakeMessage(NamedTuple):
    """The part of a message that a buffer reads."""

    number: int
    attempts: int
    settled: bool = False
    lost: bool = False


Step = tuple[str, int, list[int]]
steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 3), st.lists(st.sampled_from([1, 1, 1, 2, 5]), max_size=8)),
        st.tuples(st.just("take"), st.integers(0, 3), st.just([])),
    ),
    max_size=40,
)


@given(st.integers(1, 5), st.integers(0, 6), steps)
def test_a_buffer_hands_out_every_message_once_in_batches_that_are_ready(
    batch: int, wait_seconds: int, steps: list[Step]
) -> None:
    buffer: Buffer[Any] = Buffer(batch, wait_seconds)
    new: list[tuple[int, FakeMessage]] = []  # The model: messages with the times of their arrival.
    alone: list[tuple[int, FakeMessage]] = []
    now = count = 0
    for kind, seconds, attempts in steps:
        now += seconds
        if kind == "add":
            messages = [FakeMessage(count + index, attempt) for index, attempt in enumerate(attempts)]
            count += len(messages)
            buffer.add(messages, now)
            for message in messages:
                (alone if batch > 1 and message.attempts > 1 else new).append((now, message))
        else:
            is_full = len(new) >= batch
            is_ready = bool(alone) or is_full or bool(new and now >= new[0][0] + wait_seconds)
            assert (buffer.ready_in(now) == 0) == is_ready
            taken = buffer.take(now)
            assert bool(taken) == is_ready
            if taken and alone and taken[0] == alone[0][1]:
                assert taken == [alone.pop(0)[1]]
            elif taken:
                assert taken == [message for _, message in new[:batch]]
                assert not alone or new[0][0] < alone[0][0]  # The one that has waited longer comes first.
                del new[:batch]
        assert (len(buffer), buffer.repeated) == (len(new) + len(alone), len(alone))
        assert buffer.oldest == min([arrived for arrived, _ in new + alone], default=None)
        assert set(buffer.arrived_before(now - 2)) == {each for arrived, each in new + alone if arrived <= now - 2}
    ready_in = buffer.ready_in(now)
    if ready_in:
        assert not buffer.take(now + ready_in - 0.5)
        assert buffer.take(now + ready_in)
    else:
        assert (ready_in is None) == (not new and not alone)
    rest = buffer.clear()
    assert (len(buffer), buffer.ready_in(now)) == (0, None)
    assert len({message.number for message in rest}) == len(rest)


@given(st.integers(1, 4), st.integers(2, 9), st.lists(st.lists(st.sampled_from([1, 1, 2]), min_size=1), max_size=12))
def test_a_worker_with_batches_holds_a_message_that_was_delivered_before_only_in_a_slot(
    concurrency: int, batch: int, deliveries: list[list[int]]
) -> None:
    """Whatever the receives return: they ask for at most the free slots, and what has no slot is returned."""
    held: HeldMessages[Any, Any] = HeldMessages("jobs", print, Window(concurrency, None, batch), batch_wait_seconds=1.0)
    number = 0
    for delivery in deliveries:
        room = held.room()
        assert 0 <= room <= concurrency * batch
        messages = [FakeMessage(number + index, attempts) for index, attempts in enumerate(delivery[:room])]
        number += len(messages)
        if not messages:
            break
        held.window.received(message.attempts for message in messages)
        unwanted = set(held.unwanted(messages))
        assert all(message.attempts > 1 for message in unwanted)
        held.add_buffered([message for message in messages if message not in unwanted], 0.0)
        assert held.buffered.repeated <= concurrency
        assert len(held.buffered) <= concurrency * batch
        if any(message.attempts > 1 for message in messages):
            assert held.room() <= concurrency - held.buffered.repeated
