"""tools/check_documents.py finds wrong Python in code blocks and code spans."""

from pathlib import Path

import pytest

import check_documents

PAGE = """# A page

`plane.queue("jobs").put(…, priority=7)` is right, `plane.queue("jobs").put(…, urgency=7)` has a wrong argument.
`plane.lock` is no member, nor is `with plane.queues.all() as all:`, and there is no `fastness.opne`.
`fastness.testing.clock.ManualClock`, `Worker.run` and `worker.py` exist; `message.fail` does not.

```python title=shop.py
def price(cents: int) -> str:
    return f"{cents / 100:.2f}"
```

```python
import fastness
from shop import price

print(price("7"))
with fastness.open("memory:") as plane:
    with plane.queue("jobs").receive() as message:
        print(message.json())
```
"""


@pytest.mark.rotating
def test_wrong_python_is_found_with_its_line(tmp_path: Path) -> None:
    page = tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    page.write_text(PAGE)
    problems = check_documents.problems_of([page], tmp_path, tmp_path / "documents")
    expected = [
        (3, 'Unexpected keyword argument "urgency"'),
        (4, '"Plane" has no attribute "lock"'),
        (4, 'has no attribute "all"'),
        (4, 'no attribute "opne"'),
        (5, '"Message" has no attribute "fail"'),
        (16, 'incompatible type "str"'),
        (18, 'has no attribute "__enter__"'),
        (18, 'has no attribute "__exit__"'),
    ]
    found = sorted(problems, key=lambda problem: int(problem.split(":")[1]))
    for problem, (line, words) in zip(found, expected, strict=True):
        assert problem.startswith(f"docs/page.md:{line}: ")
        assert words in problem
