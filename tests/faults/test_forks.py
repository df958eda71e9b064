"""A forked child cannot use its parent's databases, nor damage them when it exits."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from fastness.errors import Closed
from fastness.kv import Database
from tests.support.forked import run_python

FORKING = """
import os, sys, threading
import fastness
from fastness.errors import Closed

def put(tx, number):
    tx.put(b"%06d" % number, b"v" * 100)

plane = fastness.open(sys.argv[1])
for number in range(500):
    plane.transact(put, number)
stop = threading.Event()
def write():
    number = 1_000
    while not stop.is_set():
        plane.transact(put, number)
        number += 1
writer = threading.Thread(target=write)
writer.start()
children = []
for _ in range(10):
    child = os.fork()
    if child == 0:
        try:
            plane.transact(put, 999_999)
        except Closed:
            plane.close()
            sys.exit(0)  # Runs every destructor, unlike os._exit.
        os._exit(3)
    children.append(child)
codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
stop.set()
writer.join()
plane.transact(put, 2)
plane.close()
print(codes)
"""


def test_forked_children_are_refused_and_do_not_damage_the_files(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FORKING, f"dir:{tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == str([0] * 10), done.stderr
    again = "import sys, fastness; p = fastness.open(sys.argv[1]); print(len(p.pairs.scan(b'0', b'000500')))"
    found = run_python(["-c", again, f"dir:{tmp_path}"], check=True)
    assert found.stdout.strip() == "500"


def test_a_forked_child_cannot_use_any_backend(open_database: Callable[..., Database]) -> None:
    with open_database() as database:
        database.transact(lambda tx: tx.put(b"a", b"1"))
        child = os.fork()
        if child == 0:
            code = 1
            try:
                database.transact(lambda tx: tx.put(b"a", b"2"))
            except Closed:
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert database.transact(lambda tx: tx.get(b"a")) == b"1"
