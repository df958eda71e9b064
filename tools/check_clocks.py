"""Check that no test asserts a duration: on a busy machine it fails without a fault.

python tools/check_clocks.py    exit 1 and name each assertion that compares a clock

Reported is an `assert` that calls a clock, or that has a name which the same function took from one, also through
arithmetic: `took = time.monotonic() - started`.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent
_OF_TIME: Final = ("time", "monotonic", "perf_counter", "process_time", "thread_time")
_CLOCKS: Final = {
    *(f"time.{name}{unit}" for name in _OF_TIME for unit in ("", "_ns")),
    "datetime.now",
    "datetime.utcnow",
    "loop.time",
    "resource.getrusage",
    "os.times",
}
_OF_CLOCKS: Final = ROOT / "tests" / "unit" / "test_clock.py"  # Its subject is the clock.
_LOOPS: Final = ("asyncio.get_running_loop().time", "asyncio.get_event_loop().time")
_BARE: Final = {name.partition(".")[2] for name in _CLOCKS if name not in ("time.time", "loop.time", "os.times")}
_MENTIONED: Final = re.compile(rf"\b(?:{'|'.join(sorted({name.rpartition('.')[2] for name in _CLOCKS}))})\(")
_FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def main() -> None:
    problems = [
        f"{file.relative_to(ROOT)}:{line}: the assertion compares a clock; count operations instead"
        for file in sorted(set((ROOT / "tests").rglob("*.py")) - {_OF_CLOCKS})
        for line in lines_of(file.read_text())
    ]
    print(*problems, sep="\n", end="\n" if problems else "")
    sys.exit(1 if problems else 0)


def lines_of(source: str) -> list[int]:
    """The lines of the assertions that compare a clock."""
    if not _MENTIONED.search(source):
        return []
    tree = ast.parse(source)
    scopes = [tree, *(node for node in ast.walk(tree) if isinstance(node, _FUNCTIONS))]
    return sorted({line for scope in scopes for line in _lines_in(scope)})


def _lines_in(scope: ast.AST) -> Iterator[int]:
    nodes = list(_own(scope))
    if not any(isinstance(node, ast.Assert) for node in nodes):
        return
    measured: set[str] = set()
    while True:  # A name may come from another one that stands further down, in a loop.
        found = {name for node in nodes for name in _assigned(node, measured)}
        if found <= measured:
            break
        measured |= found
    for node in nodes:
        if isinstance(node, ast.Assert) and _is_measured(node.test, measured):
            yield node.lineno


def _own(scope: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function without those of the functions in it."""
    for child in ast.iter_child_nodes(scope):
        if not isinstance(child, _FUNCTIONS):
            yield child
            yield from _own(child)


def _assigned(node: ast.AST, measured: set[str]) -> Iterator[str]:
    match node:
        case ast.Assign(targets=targets, value=value):
            pairs: list[tuple[ast.expr, ast.expr]] = [(target, value) for target in targets]
        case ast.AnnAssign(target=target, value=ast.expr() as value) | ast.AugAssign(target=target, value=value):
            pairs = [(target, value)]
        case ast.NamedExpr(target=target, value=value):
            pairs = [(target, value)]
        case _:
            return
    for names, values in pairs:
        each = [(names, values)]
        if isinstance(names, ast.Tuple) and isinstance(values, ast.Tuple):
            each = list(zip(names.elts, values.elts, strict=False))
        for name, taken in each:
            if isinstance(name, ast.Name | ast.Attribute) and _is_measured(taken, measured):
                yield ast.unparse(name)


def _is_measured(value: ast.expr, measured: set[str]) -> bool:
    """Whether the value is a reading of a clock, or arithmetic with one; not what a call makes of it."""
    match value:
        case ast.Call(func=function, args=arguments):
            name = ast.unparse(function)
            short = ".".join(name.rsplit(".", 2)[-2:])
            clock = short in _CLOCKS or name in _BARE or name in _LOOPS
            number = name in ("abs", "float", "int", "max", "min", "round", "sum")
            return clock or (number and any(_is_measured(each, measured) for each in arguments))
        case ast.Name(id=name):
            return name in measured
        case ast.Attribute(value=inner):
            return _is_measured(inner, measured) or ast.unparse(value) in measured
        case ast.BinOp(left=left, right=right):
            return _is_measured(left, measured) or _is_measured(right, measured)
        case ast.BoolOp(values=values):
            return any(_is_measured(each, measured) for each in values)
        case ast.Compare(left=left, comparators=others):
            return any(_is_measured(each, measured) for each in (left, *others))
        case ast.UnaryOp(operand=inner) | ast.Subscript(value=inner) | ast.NamedExpr(value=inner):
            return _is_measured(inner, measured)
    return False


if __name__ == "__main__":
    main()
