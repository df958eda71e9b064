"""A test run ends with what was skipped, and how to get it."""

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]
CONFTEST = Path(__file__).parents[1] / "conftest.py"
TESTS = """
import pytest

NO_BROWSER = "no browser on the path; apt-get install browser"


@pytest.fixture
def browser():
    pytest.skip(NO_BROWSER)


@pytest.mark.parametrize("page", range(3))
def test_page(browser, page):
    pass


@pytest.mark.skipif(True, reason=NO_BROWSER)
def test_marked():
    pass


def test_compiled():
    pytest.skip("no compiler on the path; apt-get install compiler")


def test_that_passes():
    pass


def test_that_fails():
    raise AssertionError
"""


@pytest.mark.parametrize("processes", [0, 2])
def test_a_run_ends_with_one_line_for_each_thing_that_is_missing(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # To load them all takes seconds of each process.
    pytester.makeconftest(CONFTEST.read_text())
    pytester.makepyfile(TESTS)
    done = pytester.runpytest_subprocess("-p", "xdist.plugin", "-n", str(processes))
    done.assert_outcomes(passed=1, skipped=5, failed=1)
    *_, failure, browser, compiler, _ = done.outlines
    assert failure.startswith("FAILED ")
    assert browser == "skipped: 4 tests: no browser on the path; apt-get install browser"
    assert compiler == "skipped: 1 test: no compiler on the path; apt-get install compiler"
