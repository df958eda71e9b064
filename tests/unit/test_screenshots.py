"""The pictures of the console in the documentation: every page has one for a desktop and one for a phone."""

import re
import struct
from pathlib import Path

import make_screenshots

ROOT = Path(__file__).parents[2]
IMAGES = make_screenshots.IMAGES
BYTES_MAX = 5_000_000


def names() -> set[str]:
    wide_and_phone = {f"{name}-{width}.png" for name in make_screenshots.shots() for width in make_screenshots.WIDTHS}
    return wide_and_phone | {f"{name}-dark.png" for name in make_screenshots.DARK}


def test_every_page_of_the_console_has_its_pictures() -> None:
    shown = {shot.where.partition("/")[0] for shot in make_screenshots.SHOTS.values()}
    assert set(make_screenshots.console_pages()) <= shown, "add the page to SHOTS, then run: make screenshots"
    assert {path.name for path in IMAGES.iterdir()} == names()


def test_the_pictures_have_their_sizes() -> None:
    total = 0
    for path in IMAGES.iterdir():
        content = path.read_bytes()
        assert content[:8] == b"\x89PNG\r\n\x1a\n"
        width, height = struct.unpack(">II", content[16:24])
        wanted = 390 if path.stem.endswith("-390") else 1440
        assert (width, height) == (wanted, make_screenshots.WIDTHS[wanted]), path
        assert len(content) <= make_screenshots.IMAGE_BYTES_MAX
        total += len(content)
    assert total <= BYTES_MAX


def test_the_page_about_the_console_shows_all_of_them() -> None:
    text = (ROOT / "docs" / "console.md").read_text()
    assert set(re.findall(r"\]\(images/console/([\w-]+\.png)\)", text)) == names()
    assert make_screenshots.with_pictures(text) == text, "run: make screenshots"
