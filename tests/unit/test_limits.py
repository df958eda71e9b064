"""A limit stands once, in `fastness.limits`: checks, declared bounds and the ranges of options name it there."""

import ast
from collections.abc import Iterator
from pathlib import Path

import fastness
from fastness import limits

SOURCE = Path(fastness.__file__).parent
SMALLEST = 255  # Smaller numbers are often something else: a count of bytes, or of characters that are shown.
LIMITS = {
    value: name
    for name, value in vars(limits).items()
    if name.isupper() and isinstance(value, int | float) and value >= SMALLEST
}
BOUNDS = {"ge", "le", "gt", "lt", "min_length", "max_length"}  # Arguments of Meta.
RANGES = {"IntRange", "FloatRange"}  # Of click: all of their arguments.


def repeated(tree: ast.AST) -> Iterator[ast.expr]:
    """The literals that have the value of a limit, where limits are used."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield from filter(is_limit, bounds_of(node))
        elif isinstance(node, ast.If) and any(isinstance(each, ast.Raise) for each in node.body):
            compared = [each for each in ast.walk(node.test) if isinstance(each, ast.Compare)]
            yield from (part for each in compared for part in (each.left, *each.comparators) if is_limit(part))


def bounds_of(call: ast.Call) -> list[ast.expr]:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name in RANGES:
        return [*call.args, *(each.value for each in call.keywords)]
    return [each.value for each in call.keywords if each.arg in BOUNDS]


def is_limit(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float) and node.value in LIMITS


def test_no_check_repeats_the_value_of_a_limit() -> None:
    found = [
        f"{path.relative_to(SOURCE)}:{each.lineno}: {ast.unparse(each)}"
        for path in sorted(SOURCE.rglob("*.py"))
        if path.name != "limits.py"
        for each in repeated(ast.parse(path.read_text()))
    ]
    assert found == [], "name the limit, or declare one for this"


def test_a_repeated_limit_is_found() -> None:
    code = """
size: Annotated[int, Meta(ge=1, le=10_000)]
click.option("--limit", type=click.IntRange(1, 1_000))
if not 0 < limit <= 10_000:
    raise InvalidArgument("limit is too large")
if status == 1_000 or len(items) > limits.READ_ENTRIES_MAX:
    return 10_000
"""
    assert sorted(ast.unparse(each) for each in repeated(ast.parse(code))) == ["1000", "10000", "10000"]
