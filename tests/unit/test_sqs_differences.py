"""The tables of docs/sqs.md say of every part of Amazon's service model whether Fastness does the same."""

import re
from pathlib import Path
from typing import Any, Final

import pytest
from botocore.loaders import Loader

from fastness.server.sqs.errors import COMMON_ERRORS
from fastness.server.sqs.message_actions import SYSTEM_ATTRIBUTES
from fastness.wire.sqs import ATTRIBUTES, COMPUTED_ATTRIBUTES

PAGE: Final = Path(__file__).parents[2] / "docs" / "sqs.md"
HEAD: Final = re.compile(r"^\| ([a-zA-Z ]+) \| compared with Amazon SQS \|\n\|---\|---\|\n((?:\|.*\|\n)+)", re.M)
ROW: Final = re.compile(r"\| `([A-Za-z]+)` \| (same|different: .+) \|\n")


def tables() -> dict[str, list[tuple[str, str]]]:
    """The rows of each table, by what it is about."""
    found = {}
    for about, rows in HEAD.findall(PAGE.read_text()):
        found[about] = ROW.findall(rows)
        assert len(found[about]) == rows.count("\n"), f"a row of the table of each {about} has another form"
    return found


def model() -> dict[str, set[str]]:
    """What the service model has, by the tables that have to have it."""
    loaded: dict[str, Any] = Loader().load_service_model("sqs", "service-2")
    shapes = loaded["shapes"]
    sent = set(shapes["MessageSystemAttributeNameForSends"]["enum"])
    return {
        "action": set(loaded["operations"]),
        "queue attribute": set(shapes["QueueAttributeName"]["enum"]),
        "message system attribute": set(shapes["MessageSystemAttributeName"]["enum"]) | sent,
        "error code": {name for name, shape in shapes.items() if shape.get("exception")},
        "error code of all AWS services": {error.query_code for error in COMMON_ERRORS},
    }


@pytest.mark.parametrize("about", sorted(model()))
def test_every_part_of_the_service_model_has_one_row(about: str) -> None:
    names = [name for name, _ in tables()[about]]
    assert sorted(set(names)) == sorted(model()[about])
    assert len(set(names)) == len(names)


def test_there_is_no_other_table() -> None:
    assert set(tables()) == set(model())


def test_attributes_of_the_service_model_are_known() -> None:
    wanted = model()
    assert wanted["queue attribute"] - {"All"} == ATTRIBUTES | COMPUTED_ATTRIBUTES
    assert wanted["message system attribute"] - {"All"} == SYSTEM_ATTRIBUTES
