"""Run the demo and take screenshots of its output and its report: docs/images/demo*.png.

python tools/make_demo_pictures.py [--folder docs/images]

Needs Chromium on the path. Takes as long as the demo.
"""

import argparse
import html
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from playwright.sync_api import Browser, sync_playwright

IMAGES: Final = Path(__file__).parent.parent / "docs" / "images"
IMAGE_BYTES_MAX: Final = 200_000
COLUMNS: Final = 100
LINES: Final = 42  # The part of the output that is shown.
STYLE: Final = (
    "body { margin: 0; background: #0d1117; } "
    "pre { margin: 24px; color: #d6deeb; font: 14px/1.35 'DejaVu Sans Mono', monospace; } "
    "b { color: #3fb950; } i { color: #56d4dd; font-style: normal; font-weight: bold; }"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=IMAGES)
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("Chromium is not installed; apt-get install chromium")
    with tempfile.TemporaryDirectory(prefix="fastness-pictures-") as folder_name, sync_playwright() as playwright:
        demo_folder = Path(folder_name) / "demo"
        output = subprocess.run(
            [sys.executable, "-m", "fastness.cli", "demo", "--keep", str(demo_folder)],
            env={**os.environ, "COLUMNS": str(COLUMNS)},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout
        page = Path(folder_name) / "output.html"
        page.write_text(terminal(output))
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        take_screenshot(browser, page, folder / "demo.png", height=None)
        take_screenshot(
            browser, demo_folder / "lake" / "reports" / "latest.html", folder / "demo-report.png", height=900
        )
        browser.close()


def terminal(output: str) -> str:
    """An HTML page that shows a program's output as a terminal would."""
    text = html.escape("\n".join(output.strip().splitlines()[:LINES]))
    text = re.sub("^(  )(✓)", r"\1<b>\2</b>", text, flags=re.MULTILINE)
    text = re.sub(r"^(\d  .*|Fastness demo)$", r"<i>\1</i>", text, flags=re.MULTILINE)
    return f"<!doctype html><meta charset='utf-8'><style>{STYLE}</style><pre>{text}</pre>"


def take_screenshot(browser: Browser, page: Path, path: Path, *, height: int | None) -> None:
    """Save a screenshot of a page: its first `height` pixels, or all of it."""
    tab = browser.new_page(viewport={"width": 960, "height": height or 400}, color_scheme="light")
    tab.goto(page.as_uri())
    tab.screenshot(path=str(path), full_page=height is None)
    size = path.stat().st_size
    assert size <= IMAGE_BYTES_MAX, f"{path} has {size:,} bytes"
    print(f"{path} {size // 1_024} KiB")


if __name__ == "__main__":
    main()
