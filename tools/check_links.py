"""Check the links of the documents: files, headings, images. No address is contacted.

python tools/check_links.py    exit 1 and name each link that leads nowhere

Headings have the anchors that GitHub and the documentation site give them. An address of another host is checked by its
form only.
"""

import re
import sys
import unicodedata
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

ROOT: Final = Path(__file__).parent.parent
IMAGE_BYTES_MAX: Final = 400_000  # A page with ten pictures still loads quickly.
_FENCE: Final = re.compile(r"^ {0,3}(```+|~~~+)")
_CODE_SPAN: Final = re.compile(r"(`+)(?:.+?)\1(?!`)")
_LABEL: Final = r"\[(?:[^\[\]]|\[[^\]]*\])*\]"
_TARGET: Final = r"(<[^>]*>|[^()\s]*(?:\([^()\s]*\)[^()\s]*)*)"
_LINK: Final = re.compile(rf"(!?){_LABEL}\({_TARGET}(?: \"[^\"]*\")?\)")
_HTML_LINK: Final = re.compile(r"<(img|a)\b[^>]*?\b(?:src|href)=\"([^\"]*)\"")
_HEADING: Final = re.compile(r"^ {0,3}#{1,6} +(.*?)(?: +#+)?$")
_IMAGES: Final = (".png", ".jpg", ".jpeg", ".gif", ".svg", ".webp")


def main() -> None:
    problems = [problem for page in documents(ROOT) for problem in problems_of(page, ROOT)]
    print(*problems, sep="\n", end="\n" if problems else "")
    sys.exit(1 if problems else 0)


def documents(root: Path) -> list[Path]:
    """All Markdown files that people read."""
    folders = (root / name for name in ("docs", "examples", "deploy"))
    return sorted([*root.glob("*.md"), *(page for folder in folders for page in folder.rglob("*.md"))])


def problems_of(page: Path, root: Path) -> Iterator[str]:
    """The links of a page that lead nowhere, as `docs/page.md:12: ...`."""
    for number, target in links(page.read_text()):
        reason = _problem(page, target, root)
        if reason:
            yield f"{page.relative_to(root)}:{number}: {target}: {reason}"


def links(text: str) -> Iterator[tuple[int, str]]:
    """The targets of all links and images outside of code, with their lines."""
    for number, line in prose_lines(text):
        plain = _CODE_SPAN.sub(lambda code: "x" * len(code[0]), line)
        for found in _LINK.finditer(plain):
            yield number, found[2].strip("<>")
        for found in _HTML_LINK.finditer(plain):
            yield number, found[2]


def prose_lines(text: str) -> Iterator[tuple[int, str]]:
    """The lines outside of fenced code blocks, with their numbers."""
    fence = ""
    for number, line in enumerate(text.splitlines(), 1):
        mark = _FENCE.match(line)
        if fence:
            fence = "" if mark and mark[1].startswith(fence) else fence
        elif mark:
            fence = mark[1]
        else:
            yield number, line


def map_links(text: str, change: Callable[[str], str]) -> str:
    """The text with the target of each link outside of code replaced by `change(target)`."""
    lines = text.splitlines(keepends=True)
    for number, line in prose_lines(text):
        plain = _CODE_SPAN.sub(lambda code: "x" * len(code[0]), line)
        changed, at = "", 0
        for found in sorted([*_LINK.finditer(plain), *_HTML_LINK.finditer(plain)], key=lambda each: each.start(2)):
            changed += line[at : found.start(2)] + change(line[found.start(2) : found.end(2)])
            at = found.end(2)
        ending = lines[number - 1][len(line) :]
        lines[number - 1] = changed + line[at:] + ending
    return "".join(lines)


def _problem(page: Path, target: str, root: Path) -> str:
    address = urlsplit(target)
    if address.scheme:
        known = address.scheme in ("http", "https") and bool(address.hostname) and " " not in target
        return "" if known or address.scheme == "mailto" else "is not an address"
    if address.path.startswith("/"):
        return "is absolute; use a path relative to the page"
    file = (page.parent / unquote(address.path)).resolve() if address.path else page
    if not file.is_relative_to(root):
        return "is outside of the repository"
    if not file.exists():
        return "no such file"
    if file.suffix in _IMAGES and file.stat().st_size > IMAGE_BYTES_MAX:
        return f"the image has {file.stat().st_size:,} bytes; at most {IMAGE_BYTES_MAX:,} are allowed"
    if address.fragment and file.suffix == ".md" and unquote(address.fragment) not in anchors(file):
        return f"{file.name} has no such heading"
    return ""


@cache
def anchors(page: Path) -> frozenset[str]:
    """The anchors of a page's headings."""
    found: set[str] = set()
    text = page.read_text()
    for _, line in prose_lines(text):
        heading = _HEADING.match(line)
        if heading:
            slug = slug_of(heading[1])
            numbered = (f"{slug}{suffix}" for suffix in ("", *(f"-{number}" for number in range(1, 1_000))))
            found.add(next(each for each in numbered if each not in found))
        found.update(re.findall(r"<a (?:id|name)=\"([^\"]+)\"", line))
    return frozenset(found)


def slug_of(heading: str) -> str:
    """The anchor of a heading: lower case, without punctuation, with hyphens for spaces."""
    plain = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("*", "")
    plain = unicodedata.normalize("NFC", re.sub(r"<[^>]+>", "", plain)).strip().lower()
    return re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")


if __name__ == "__main__":
    main()
