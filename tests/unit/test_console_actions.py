"""Every button of the console is clicked by a test in a browser. This compares the sources: it starts no browser.

A button is found in the page modules by its accessible name: its `aria-label`, or its text. A click is found in the
tests as `…get_by_role("button", name=…).click()`, directly or through a variable. A name that several buttons have
needs as many clicks, in different tests or by different words.
"""

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from fastness.limits import CONSOLE_PUBLISH_BYTES_MAX
from fastness.server.console import files

STATIC = Path(files.__file__).with_name("static")
BROWSER = Path(__file__).parents[1] / "browser"
VALUE = "\N{REPLACEMENT CHARACTER}"  # Stands for a part of a name that is not known before the page is open.
STRING = r'"((?:[^"\\]|\\.)*)"|`([^`]*)`'
STEPS_MAX = 10  # From a click to its button.
HELPERS = {  # Buttons of helpers, whose names their callers give.
    ("dom.js", "words"),  # The helper itself.
    ("dom.js", "no"),  # It changes nothing.
}
COMPUTED = {  # Names that a module takes from a list: where the list is, and what precedes a name in it.
    ("message_list.js", "action.label"): ("message_actions.js", r"\blabel: "),
    ("messages.js", "LABELS[name]"): ("messages.js", r"(?:{|,) (?:redrive|cancel|move|delete): "),
    ("charts.js", "range.name"): ("series.js", r"\bname: "),
}


class Button(NamedTuple):
    """A button in the source of a module."""

    module: str
    name: str


class Click(NamedTuple):
    """A click in the source of a test."""

    function: str
    name: str  # With VALUE for unknown parts,
    pattern: bool = False  # or a regular expression.


def test_every_action_is_tested() -> None:
    found = buttons()
    assert len(found) > 50
    made_up = Button("queues.js", f"Explode {VALUE}")
    assert unclicked([*found, made_up], list(clicks())) == [made_up]


def test_the_form_of_messages_has_the_limit_of_the_server() -> None:
    found = re.findall(r"^const PAYLOAD_BYTES_MAX = ([\d_]+);", (STATIC / "publish.js").read_text(), re.MULTILINE)
    assert [int(each) for each in found] == [CONSOLE_PUBLISH_BYTES_MAX]


# The buttons of the modules.


def buttons() -> list[Button]:
    found = []
    for path in sorted(STATIC.glob("*.js")):
        if not path.name.startswith("uplot"):
            found += [Button(path.name, name) for name in names_in(path.name, path.read_text())]
    return sorted(found)


def names_in(module: str, text: str) -> Iterator[str]:
    for start in re.finditer(r"(?<!function )\bbutton\(", text):
        call = balanced(text, start.end())
        label = re.search(rf'"aria-label": (?:{STRING})', call)
        first = re.match(rf"(?:{STRING})(?=,)|([^,]+),", call)
        assert first is not None, (module, call)
        if label is not None:
            yield string_of(label)
        elif first[3] is None:
            yield string_of(first)
        elif (module, first[3]) not in HELPERS:
            where, before = COMPUTED[module, first[3]]
            names = re.findall(rf'{before}"([^"]+)"', (STATIC / where).read_text(), re.MULTILINE)
            assert names, (module, first[3])
            yield from names
    for start in re.finditer(r'\bh\("button", ', text):
        if named := re.search(rf"\btext: (?:{STRING})", balanced(text, start.end())):
            yield string_of(named)
    yield from map(string_of, re.finditer(rf"\byes: (?:{STRING})", text))


def balanced(text: str, start: int) -> str:
    """The arguments of a call, which begin at `start`."""
    depth, at = 1, start
    while depth:
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        at += 1
    return text[start : at - 1]


def string_of(match: re.Match[str]) -> str:
    return match[1] if match[1] is not None else re.sub(r"\${[^}]*}", VALUE, match[2])


# The clicks of the tests.


def clicks() -> Iterator[Click]:
    for path in sorted(BROWSER.glob("*.py")):
        for function in ast.parse(path.read_text()).body:
            if isinstance(function, ast.FunctionDef):
                yield from clicks_in(function, f"{path.name}::{function.name}")


def clicks_in(function: ast.FunctionDef, name: str) -> Iterator[Click]:
    known = dict(assignments(function))
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("click", "tap"):
            target: ast.expr | None = node.func.value
            for _ in range(STEPS_MAX):
                if target is not None and not is_button(target):
                    target = inner(target, known)
            for word in target.keywords if isinstance(target, ast.Call) else ():
                if word.arg == "name":
                    yield from (Click(name, *each) for each in names_of(word.value, known))


def assignments(function: ast.FunctionDef) -> Iterator[tuple[str, ast.expr]]:
    """What variables are assigned, and what they loop over."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    yield target.id, node.value
                elif isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = zip(target.elts, node.value.elts, strict=True)
                    yield from ((each.id, value) for each, value in pairs if isinstance(each, ast.Name))
        elif isinstance(node, ast.For):
            names = node.target.elts if isinstance(node.target, ast.Tuple) else [node.target]
            yield from ((each.id, node.iter) for each in names if isinstance(each, ast.Name))


def is_button(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "get_by_role"
        and isinstance(node.args[0], ast.Constant)
        and node.args[0].value == "button"
    )


def inner(node: ast.expr, known: dict[str, ast.expr]) -> ast.expr | None:
    """What a locator is derived from, such as `x` in `x.first` and in `x.nth(0)`."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.Call):
        return node.func.value if isinstance(node.func, ast.Attribute) else None
    return node.value if isinstance(node, ast.Attribute) else None


def names_of(node: ast.expr, known: dict[str, ast.expr]) -> Iterator[tuple[str, bool]]:
    if isinstance(node, ast.Constant):
        yield str(node.value), False
    elif isinstance(node, ast.JoinedStr):
        parts = (str(part.value) if isinstance(part, ast.Constant) else VALUE for part in node.values)
        yield "".join(parts), False
    elif isinstance(node, ast.Call) and ast.unparse(node.func) == "re.compile":
        yield from ((name, True) for name, _ in names_of(node.args[0], known))
    elif isinstance(node, ast.Name) and node.id in known:
        for each in ast.walk(known[node.id]):
            if isinstance(each, ast.Constant) and isinstance(each.value, str):
                yield each.value, False


# The comparison.


def unclicked(all_buttons: list[Button], all_clicks: list[Click]) -> list[Button]:
    wanted = Counter(button.name for button in all_buttons)
    known = defaultdict(set)
    for click in all_clicks:
        if name := clicked(click, list(wanted)):
            known[name].add(click)
    return [button for button in all_buttons if len(known[button.name]) < wanted[button.name]]


def clicked(click: Click, names: list[str]) -> str | None:
    """The name of the button that a click finds: this name, the shortest that has it, or one with these values."""
    if click.pattern:
        return min((name for name in names if re.search(click.name, name)), key=len, default=None)
    if same := [name for name in names if name.lower() == click.name.lower()]:
        return same[0]
    filled = [name for name in names if VALUE in name and re.fullmatch(pattern_of(name), click.name, re.IGNORECASE)]
    holding = [name for name in names if VALUE not in name and click.name.lower() in name.lower()]
    return min(holding, key=len, default=None) or max(filled, key=len, default=None)


def pattern_of(name: str) -> str:
    return ".+".join(map(re.escape, name.split(VALUE)))
