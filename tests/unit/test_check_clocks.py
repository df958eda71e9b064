"""tools/check_clocks.py finds the assertions that compare a clock."""

import runpy
from pathlib import Path

LINES_OF = runpy.run_path(str(Path(__file__).parents[2] / "tools" / "check_clocks.py"))["lines_of"]


def test_assertions_that_compare_a_clock_are_found() -> None:
    for source in (
        "assert time.monotonic() < deadline",
        "assert loop.time() - begun < 5, 'slow'",
        "assert asyncio.get_running_loop().time() < 5",
        "assert datetime.datetime.now(UTC) > then",
        "assert seen and perf_counter_ns() < 5",
        "started = time.monotonic()\nassert started",
        "took = time.perf_counter() - begun\nassert round(took, 1) < 2",
        "begun, cpu = time.time(), time.process_time()\nassert cpu < 2",
        "self.begun = time.time()\nassert now - self.begun < 5",
        "used = resource.getrusage(resource.RUSAGE_SELF)\nassert used.ru_utime < 1",
        "while True:\n    took = late - 5\n    late = time.time()\n    assert took < 1",
    ):
        body = "\n".join(f"    {line}" for line in source.splitlines())
        assert LINES_OF(f"def test() -> None:\n{body}\n") == [source.count("\n") + 2], source


def test_other_assertions_and_other_uses_of_a_clock_are_not_reported() -> None:
    for source in (
        "while time.monotonic() < deadline: pass",
        "deadline = time.monotonic() + 5\nwhile time.monotonic() < deadline:\n    assert find(deadline)",
        "def f():\n    took = time.monotonic() - 5\ndef g(took):\n    assert took < 5",
        "now = clock.now_ms()\nassert now == 5",
        "a, b = time.monotonic(), 7\nassert b == 7",
        "message = put(due=time.time() + 5)\nassert message.id == 7",
    ):
        assert LINES_OF(source) == [], source
