"""Write the options of a put into `handles/queues.py`, from the fields of `NewMessage`; or check that they are current.

python tools/make_options.py           write them
python tools/make_options.py --check   exit 1 if the file differs from what would be written

A user types these options, so they are a real signature in the source, for editors and mypy. The lines between a
marker and its end are generated; run `make twins` to write them and the synchronous modules.
"""

import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin

import msgspec

from fastness.wire.fields import bare, default_of, described_fields, description_of
from fastness.wire.queues import NewMessage

TARGET: Final = Path(__file__).parent.parent / "src" / "fastness" / "handles" / "queues.py"
# What a user gives instead of the field's own type.
SHORTCUTS: Final = {
    "content_type": ("str | None = None", "content_type or kind"),
    "tags": ("Sequence[str] = ()", '[*checked_items(tags, "write tags=[tag]")] if tags else []'),
    "attributes": (
        "Mapping[str, str] | None = None",
        'checked_map("attributes", attributes) if attributes else {}',
    ),
}
BLOCK: Final = re.compile(r"( *)# Generated: (\w+)\.\n(?:.*?\n)? *# End of the generated \2\.", re.DOTALL)
ARGUMENTS: Final = re.compile(
    r"(# End of the generated signature\..*?\n        Args:\n).*?(?=        \"\"\"\n)", re.DOTALL
)


def main() -> int:
    source = TARGET.read_text()
    written = BLOCK.sub(_block, source)
    written = ARGUMENTS.sub(lambda found: found[1] + "".join(f"{' ' * 12}{line}\n" for line in _arguments()), written)
    ruff = [str(Path(sys.executable).with_name("ruff")), "format", "--stdin-filename", str(TARGET), "-"]
    written = subprocess.run(ruff, input=written, capture_output=True, text=True, check=True).stdout
    if "--check" not in sys.argv:
        TARGET.write_text(written)
        return 0
    if written != source:
        print(f"{TARGET} is not current; run: make twins")
    return int(written != source)


def _block(found: re.Match[str]) -> str:
    indent, name = found[1], found[2]
    lines = {"options": _typed, "signature": _signature, "fields": _values}[name]()
    marked = [f"# Generated: {name}.", *lines, f"# End of the generated {name}."]
    return "\n".join(f"{indent}{line}" for line in marked)


def _type(field: msgspec.structs.FieldInfo) -> str:
    return _named(bare(field.type))


def _named(kind: Any) -> str:
    if get_origin(kind) in (Union, UnionType):
        return " | ".join(map(_named, get_args(kind)))
    if kind is NoneType:
        return "None"
    if get_origin(kind) is Literal:
        return f"Literal[{', '.join(map(json.dumps, get_args(kind)))}]"
    return kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind).replace("typing.", "")


def _typed() -> list[str]:
    return [f"{field.name}: {_type(field)}" for field in described_fields(NewMessage)]


def _signature() -> list[str]:
    return [
        f"{field.name}: {SHORTCUTS.get(field.name, (f'{_type(field)} = {default_of(field)!r}',))[0]},"
        for field in described_fields(NewMessage)
    ]


def _values() -> list[str]:
    return [f"{SHORTCUTS.get(field.name, ('', field.name))[1]}," for field in described_fields(NewMessage)]


def _arguments() -> list[str]:
    lines = []
    for field in described_fields(NewMessage):
        text = f"{field.name}: {description_of(field.type)}"
        lines += textwrap.wrap(text, 108, subsequent_indent="    ")
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
