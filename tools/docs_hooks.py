"""Hooks of the documentation site: its navigation, and the files outside of docs/ that pages link to.

docs/index.md         its headings are the sections, and its links are the pages in their order
docs/for-*.md         a page for a role: what it links to follows it in its section
docs/reference/       the pages that no other page names are at the end of the last section
examples/, *.md       files outside of docs/ that a page links to are shown below `repository/`, sources as code

A link is resolved in the repository, as GitHub does it, and then written for the site. mkdocs reports links that lead
nowhere and pages that are in no section; the build is strict, so that each of them fails it.
"""

import posixpath
import re
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, Final
from urllib.parse import urlsplit

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from check_links import links, map_links

ROOT: Final = Path(__file__).parent.parent
OUTSIDE: Final = "repository"  # The folder of the site that has files from outside of docs/.
HOME: Final = "index.md"
ROLE: Final = "for-"
WIDE: Final = "glossary.md"  # Its tables need the place of the table of contents.
# What is at the end of the last section, by folder; no other page has to name it.
_AT_THE_END: Final = {"Python": "reference/python/", "Examples": f"{OUTSIDE}/examples/", "Project": f"{OUTSIDE}/"}
_PROJECT: Final = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "ARCHITECTURE.md")  # Shown even if nothing links.
_LANGUAGES: Final = {".py": "python", ".sh": "sh", ".toml": "toml", ".yml": "yaml", ".yaml": "yaml", ".json": "json"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files outside of docs/, then compute the navigation."""
    titles = {each.src_uri: _title(each.content_string) for each in files.documentation_pages()}
    pending = [_repository_path(each.src_uri) for each in files.documentation_pages()]
    pending += [name for name in _PROJECT if (ROOT / name).exists()]
    pending += [str(each.relative_to(ROOT)) for each in sorted((ROOT / "examples").rglob("*.py"))]
    seen = set(pending)
    while pending:
        path = pending.pop()
        uri = _site_uri(path)
        if files.get_file_from_path(uri) is None:
            content = _content(path)
            files.append(File.generated(config, uri, content=content))
            if isinstance(content, str):
                titles[uri] = _title(content)
        if uri.endswith(".md"):
            found = _linked_files(path)
            pending += [each for each in found if each not in seen]
            seen.update(found)
    config.nav = navigation(titles)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Write links for the site, and titles of code blocks as its Markdown needs them."""
    del config, files
    path = _repository_path(page.file.src_uri)
    folder = posixpath.dirname(page.file.src_uri)

    def changed(target: str) -> str:
        linked = _linked_file(path, target)
        if linked is None:
            return target
        fragment = urlsplit(target).fragment
        return posixpath.relpath(_site_uri(linked), folder or ".") + (f"#{fragment}" if fragment else "")

    if page.file.src_uri == WIDE:
        page.meta["hide"] = ["toc"]
    markdown = map_links(markdown, changed)
    return re.sub(r"^(```\w+) title=([^\s\"]+)$", r'\1 title="\2"', markdown, flags=re.MULTILINE)


def navigation(titles: dict[str, str]) -> list[dict[str, Any]]:
    """The sections of the site, with their pages. A page is in the first section that names it."""
    sections: list[dict[str, Any]] = [{"Home": HOME}]
    placed = {HOME}

    def place(pages: Iterable[str]) -> list[dict[str, Any]]:
        new = [uri for uri in dict.fromkeys(pages) if uri in titles and uri not in placed]
        placed.update(new)
        return [{"Overview" if uri.startswith(ROLE) else titles[uri]: uri} for uri in new]

    for part in _text_of(HOME).split("\n## ")[1:]:
        pages: list[str] = []
        for uri in _pages_named(HOME, part):
            pages.append(uri)
            if uri.startswith(ROLE):
                pages += [each for each in _pages_named(uri, _text_of(uri)) if not each.startswith(ROLE)]
        sections.append({part.partition("\n")[0].strip(): place(pages)})
    for name, folder in _AT_THE_END.items():
        rest = place(uri for uri in sorted(titles) if uri.startswith(folder))
        next(iter(sections[-1].values())).append({name: rest})
    return sections


def _text_of(uri: str) -> str:
    return (ROOT / "docs" / uri).read_text()


def _pages_named(page: str, text: str) -> Iterator[str]:
    """The pages of the site that a text links to."""
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        linked = _linked_file(f"docs/{page}", target)
        if linked is not None:
            yield _site_uri(linked)


def _title(text: str) -> str:
    heading = re.search(r"^# +(.+)$", text, re.MULTILINE)
    return heading[1].replace("`", "") if heading else "Untitled"


def _repository_path(uri: str) -> str:
    """Where a page of the site is in the repository."""
    if not uri.startswith(f"{OUTSIDE}/"):
        return f"docs/{uri}"
    path = uri.removeprefix(f"{OUTSIDE}/")
    if (ROOT / path).exists():
        return path
    return path.removesuffix(".md").removesuffix("/index")


def _site_uri(path: str) -> str:
    """Where a file of the repository is in the site."""
    if path == "README.md":
        return HOME  # It leads to the same pages.
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if (ROOT / path).is_dir():
        return f"{OUTSIDE}/{path}/index.md"
    return f"{OUTSIDE}/{path}" if path.endswith((".md", ".png", ".svg")) else f"{OUTSIDE}/{path}.md"


def _linked_files(path: str) -> list[str]:
    """The files and folders of the repository that a file links to."""
    file = ROOT / path
    if file.is_dir():
        return [str(each.relative_to(ROOT)) for each in sorted(file.iterdir()) if each.is_file()]
    if file.suffix != ".md":
        return []
    found = (_linked_file(path, target) for _, target in links(file.read_text()))
    return list(dict.fromkeys(each for each in found if each is not None))


def _linked_file(path: str, target: str) -> str | None:
    """The path in the repository that a link leads to; None if it does not lead to a file there."""
    address = urlsplit(target)
    if address.scheme or address.netloc or not address.path or address.path.startswith("/"):
        return None
    folder = path if (ROOT / path).is_dir() else posixpath.dirname(path)
    joined = posixpath.normpath(posixpath.join(folder, address.path))
    return joined if not joined.startswith("..") and (ROOT / joined).exists() else None


def _content(path: str) -> str | bytes:
    """A file from outside of docs/ as a page."""
    file = ROOT / path
    if file.is_dir():
        rows = [f"- [{each.name}]({each.name})" for each in sorted(file.iterdir()) if each.is_file()]
        return "\n".join([f"# `{path}`", "", *rows, ""])
    if file.suffix in (".png", ".svg"):
        return file.read_bytes()
    text = file.read_text()
    if file.suffix == ".md":
        return text
    language = _LANGUAGES.get(PurePosixPath(path).suffix, "text")
    return f"# `{path}`\n\n````{language}\n{text.rstrip()}\n````\n"
