"""An application with a table of its own, which it changes in one transaction with the messages that it puts.

    python within_child.py URL SEED FIRST COUNT

It runs the transactions FIRST, FIRST + 1, …, and prints the number of each before it begins. It stops before the number
that it has read from its input, until it reads a higher one. A row (id, part) of the table `shop.parts` is inserted
together with the message {"id", "part"}. Some transactions are rolled back, some roll back to a savepoint, and some
fail. What is in the table tells which messages have to be delivered.
"""

import random
import sys
import time
from contextlib import suppress
from typing import Any

import psycopg

import fastness
from fastness import Plane, Within
from fastness.errors import FastnessError

QUEUES = ("emails", "invoices")
_OPEN_SECONDS_MAX = 60.0
_RECONNECT_SECONDS = 0.1  # Between attempts while PostgreSQL restarts.


class _Undone(Exception):
    """The application has changed its mind."""


def main(url: str, seed: int, first: int, count: int) -> None:
    with _open(url) as plane:
        connection = _connect(url)
        allowed = 0
        for id in range(first, first + count):
            while id >= allowed:
                allowed = int(sys.stdin.readline())
            print(id, flush=True)
            choices = random.Random(f"{seed}-{id}")
            if connection.closed:
                connection = _connect(url)
            with suppress(_Undone, FastnessError, psycopg.Error), connection.transaction():
                _run(connection, plane.within(connection), choices, id)
        connection.close()


def _open(url: str) -> Plane:
    deadline = time.monotonic() + _OPEN_SECONDS_MAX
    while True:
        try:
            return fastness.open(url)
        except FastnessError:  # PostgreSQL is being killed.
            if time.monotonic() > deadline:
                raise
            time.sleep(_RECONNECT_SECONDS)


def _connect(url: str) -> "psycopg.Connection[Any]":
    while True:
        try:
            return psycopg.connect(url, application_name="shop", options="-c search_path=shop")
        except psycopg.OperationalError:
            time.sleep(_RECONNECT_SECONDS)


def _run(connection: "psycopg.Connection[Any]", within: Within, choices: random.Random, id: int) -> None:
    parts = choices.randint(1, 4)
    for part in range(parts):
        if choices.random() < 0.2:
            with suppress(_Undone), connection.transaction():
                _insert(connection, within, choices, id, 10 + part)
                if choices.random() < 0.5:
                    raise _Undone
        _insert(connection, within, choices, id, part)
    if choices.random() < 0.3:
        raise _Undone
    if choices.random() < 0.1:
        connection.execute("SELECT 1 / 0")


def _insert(connection: "psycopg.Connection[Any]", within: Within, choices: random.Random, id: int, part: int) -> None:
    queue = within.queue(choices.choice(QUEUES))
    kind = choices.random()
    connection.execute("INSERT INTO parts VALUES (%s, %s)", (id, part))
    body = {"id": id, "part": part}
    if kind < 0.7:
        queue.put(body)
    elif kind < 0.8:
        queue.put_many([body])
    elif kind < 0.9:
        queue.put(body, delay_seconds=0.05)
    else:
        queue.put(body, group=f"group-{id % 3}")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
