"""Every error code has a cause and a remedy, and errors lead to them: in Python, on the command line, and over HTTP."""

import ast
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from click.testing import Result

import fastness
from fastness.errors import CLASSES, MailboxFull
from fastness.remedies import OTHER_CODES, REMEDIES
from fastness.server import http_protocol, problems
from tests.support.failures import Failures

Cli = Callable[..., Result]

SOURCE = Path(fastness.__file__).parent
DOCS = Path(__file__).parents[2] / "docs"


def http_codes() -> Iterator[tuple[str, int]]:
    """The codes and statuses in every `HttpError(status, code, …)` and `Problem(code=…, status=…)` of the source."""
    texts = [file.read_text() for file in SOURCE.rglob("*.py")]
    for text in texts:
        for node in ast.walk(ast.parse(text)) if "HttpError(" in text or "Problem(" in text else ():
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            named = {keyword.arg: keyword.value for keyword in node.keywords}
            given = node.args[:2] if node.func.id == "HttpError" else [named.get("status"), named.get("code")]
            values: list[Any] = [each.value for each in given if isinstance(each, ast.Constant)]
            if node.func.id in ("HttpError", "Problem") and len(values) == 2:
                yield values[1], values[0]
    yield from ((code, status) for status, code in problems._CODES.items())
    yield from ((code, status) for status, (code, _) in http_protocol._TITLES.items())


def test_every_code_has_a_cause_and_a_remedy() -> None:
    http = [(code, status) for code, status in http_codes() if code not in CLASSES]
    assert len(http) > 40
    computed = {"http_error", "missing_owner", "missing_queue"}
    commands = {code for code, found in OTHER_CODES.items() if found.status is None}
    assert {code for code, _ in http} | computed | commands == set(OTHER_CODES)
    assert {code for code, status in http if OTHER_CODES[code].status == status} == {code for code, _ in http}
    assert [each.__name__ for each in CLASSES.values() if not {"cause", "remedy"} <= vars(each).keys()] == []


def test_remedies_are_sentences_and_name_pages_that_exist() -> None:
    failures = Failures()
    for code, found in REMEDIES.items():
        with failures.of(code):
            for text in (found.cause, found.remedy):
                assert re.fullmatch(r"[A-Z`].{15,}[.]", text), text
                assert text.count("`") % 2 == 0, text
            assert [page for page in found.see if not (DOCS / page).is_file()] == []
    failures.check()


def test_errors_link_to_their_section() -> None:
    sections = re.findall(r"^### `(\w+)`$", (DOCS / "reference" / "errors.md").read_text(), re.MULTILINE)
    assert sections == list(REMEDIES)
    assert MailboxFull("full").help == "fastness explain queue_full"


def test_an_error_is_explained_by_the_command_that_it_names(cli: Cli) -> None:
    cli("queue", "put", "jobs", "x")
    error = cli("message", "show", "jobs", "0" * 32, code=4).stderr
    help = error.splitlines()[-1].removeprefix("help: fastness ")
    assert help == "explain message_not_found"
    text = cli(*help.split()).stdout
    assert REMEDIES["message_not_found"].cause in text
    assert REMEDIES["message_not_found"].remedy in text
    assert "See:     /docs/errors/message_not_found of a running server" in text


def test_every_code_is_explained(cli: Cli) -> None:
    listed = json.loads(cli("explain", "--json").stdout)
    assert [each["code"] for each in listed] == list(REMEDIES)
    assert all(each["status"] or each["code"] in ("usage", "interrupted") for each in listed)
    one = json.loads(cli("explain", "urn:fastness:error:lease_held", "--json").stdout)
    assert (one["class"], one["status"], one["retry"]) == ("LeaseHeld", 409, "later")
    assert one["see"] == "/docs/errors/lease_held"
    assert one["pages"] == list(REMEDIES["lease_held"].see)


def test_a_misspelt_code_gets_the_nearest_one(cli: Cli) -> None:
    assert "fastness explain queue_full" in cli("explain", "queue_ful", code=4).stderr
    assert "list all codes" in cli("explain", "zzz", code=4).stderr
