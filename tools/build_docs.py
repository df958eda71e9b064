"""Build the documentation site of this version and of each released one, without a network.

python tools/build_docs.py            build/docs/<version>/index.html, build/docs/versions.json, build/docs/index.html
python tools/build_docs.py --serve    build it, and serve it at http://127.0.0.1:8000

The site has a menu of versions, search, and no file of another host. The version menu needs a web server; all else also
works when the files are opened from the disk. Versions are the tags `v*` that have a mkdocs.yml.
"""

import argparse
import functools
import http.server
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from io import BytesIO
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent
PORT: Final = 8000
_REDIRECT: Final = (
    '<!doctype html><html lang="en"><meta charset="utf-8"><title>Fastness</title>'
    '<meta http-equiv="refresh" content="0; url={version}/index.html">'
    '<a href="{version}/index.html">Documentation of Fastness {version}</a></html>\n'
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", action="store_true", help="Serve the site at the loopback address.")
    parser.add_argument("--target", type=Path, default=ROOT / "build" / "docs", help="The folder of the site.")
    options = parser.parse_args()
    build_all(options.target)
    if options.serve:
        serve(options.target)


def build_all(target: Path) -> list[str]:
    """Build this version and each released one; returns the versions, the newest first."""
    shutil.rmtree(target, ignore_errors=True)
    version = _version()
    versions = [version, *build_released(target, without=version)]
    build(ROOT, target / version)
    write_versions(target, versions)
    print(f"The documentation is in {target / version / 'index.html'}.")
    return versions


def build(source: Path, target: Path) -> None:
    """Build the site of the working tree at `source`; a warning is an error."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]  # With --quiet no warning would be counted.
    command += ["--config-file", str(source / "mkdocs.yml"), "--site-dir", str(target)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=source, env=environment, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"{done.stderr.strip()}\nThe documentation of {source} was not built.")


def build_released(target: Path, *, without: str) -> list[str]:
    """Build the site of each tag; returns their versions, the newest first."""
    listed = subprocess.run(
        ["git", "tag", "--list", "v*", "--sort=-version:refname"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    built = []
    for tag in listed.stdout.split():
        version = tag.removeprefix("v")
        archive = subprocess.run(["git", "archive", tag], cwd=ROOT, capture_output=True, check=True).stdout
        with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=BytesIO(archive)) as packed:
            packed.extractall(folder, filter="data")
            if version != without and (Path(folder) / "mkdocs.yml").exists():
                build(Path(folder), target / version)
                built.append(version)
    return built


def write_versions(target: Path, versions: list[str]) -> None:
    """Write the list that the version menu reads, and a page that leads to the newest version."""
    rows = [
        {"version": version, "title": version, "aliases": ["latest"] if number == 0 else []}
        for number, version in enumerate(versions)
    ]
    (target / "versions.json").write_text(json.dumps(rows))
    (target / "index.html").write_text(_REDIRECT.format(version=versions[0]))


def serve(folder: Path) -> None:
    """Serve the site until the process is interrupted."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", PORT), handler) as server:
        print(f"The documentation is at http://127.0.0.1:{PORT}/; press Ctrl+C to stop.")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()


def _version() -> str:
    text = (ROOT / "src" / "fastness" / "version.py").read_text()
    namespace: dict[str, str] = {}
    exec(compile(text, "version.py", "exec"), namespace)  # Importing the package would read the installed one.
    return namespace["__version__"]


if __name__ == "__main__":
    main()
