"""Update the files of other projects that are in this repository, or check that they are unchanged.

python tools/vendor.py swagger-ui-dist 5.35.0   fetch that version by `npm pack`, and replace its files and hashes
python tools/vendor.py --check                  exit 1 if a file differs from its hash, or has no licence

Nothing of the package is run: `npm pack` downloads an archive, and only the files listed here are taken from it.
"""

import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parent.parent
RECORD: Final = ROOT / "tools" / "vendored.toml"
_SWAGGER: Final = "src/fastness/server/api_docs/static"
_UPLOT: Final = "src/fastness/server/console/static"
# Which files are taken from a package, and what they are called in the repository.
FILES: Final = {
    "swagger-ui-dist": {
        "swagger-ui-bundle.js": f"{_SWAGGER}/swagger-ui-bundle.js",
        "swagger-ui.css": f"{_SWAGGER}/swagger-ui.css",
        "swagger-ui-bundle.js.LICENSE.txt": f"{_SWAGGER}/swagger-ui-bundle.js.LICENSE.txt",
        "LICENSE": f"{_SWAGGER}/swagger-ui-license.txt",
        "NOTICE": f"{_SWAGGER}/swagger-ui-notice.txt",
    },
    "uplot": {
        "dist/uPlot.iife.min.js": f"{_UPLOT}/uplot.js",
        "dist/uPlot.min.css": f"{_UPLOT}/uplot.css",
        "LICENSE": f"{_UPLOT}/uplot-license.txt",
    },
    # Lets the search of the documentation site work when its files are opened from the disk.
    "iframe-worker": {
        "shim/index.js": "docs/assets/iframe-worker.js",
        "LICENSE": "docs/assets/iframe-worker-license.txt",
    },
}
_HEAD: Final = "# Files of other projects in this repository. `python tools/vendor.py NAME VERSION` replaces them.\n"


def main() -> None:
    if sys.argv[1:] == ["--check"]:
        problems = check(recorded(), ROOT)
        print(*problems, sep="\n", end="\n" if problems else "")
        sys.exit(1 if problems else 0)
    if len(sys.argv) != 3 or sys.argv[1] not in FILES:
        sys.exit(f"Give a name ({', '.join(FILES)}) and a version, or --check.")
    packages = recorded()
    packages[sys.argv[1]] = fetch(sys.argv[1], sys.argv[2])
    RECORD.write_text(as_toml(packages))


def recorded() -> dict[str, Any]:
    """The packages with their versions, licences and hashes."""
    return tomllib.loads(RECORD.read_text())


def check(packages: dict[str, Any], folder: Path) -> list[str]:
    """What is wrong with the vendored files in `folder`."""
    problems = []
    for name in FILES.keys() ^ packages.keys():
        problems.append(f"{name} is not both in tools/vendor.py and in vendored.toml.")
    for name, package in packages.items():
        if not any("license" in path.lower() for path in package["files"]):
            problems.append(f"{name} has no licence file.")
        for path, expected in package["files"].items():
            file = folder / path
            if not file.exists():
                problems.append(f"{path} of {name} is missing; run: python tools/vendor.py {name} {package['version']}")
            elif hashlib.sha256(file.read_bytes()).hexdigest() != expected:
                problems.append(f"{path} was changed; run: python tools/vendor.py {name} {package['version']}")
    return problems


def fetch(name: str, version: str) -> dict[str, Any]:
    """Download a version from npm and replace the files; returns its record."""
    with tempfile.TemporaryDirectory() as scratch:
        command = ["npm", "pack", f"{name}@{version}", "--ignore-scripts", "--pack-destination", scratch]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        [archive] = Path(scratch).glob("*.tgz")
        with tarfile.open(archive) as packed:
            contents = {
                member.name.removeprefix("package/"): member for member in packed.getmembers() if member.isfile()
            }

            def read(path: str) -> bytes:
                file = packed.extractfile(contents[path])
                assert file is not None
                return file.read()

            about = json.loads(read("package.json"))
            hashes = {}
            for source, target in FILES[name].items():
                content = read(source)
                (ROOT / target).write_bytes(content)
                hashes[target] = hashlib.sha256(content).hexdigest()
    return {
        "version": about["version"],
        "licence": about["license"],
        "source": f"npm package {name}",
        "files": hashes,
    }


def as_toml(packages: dict[str, Any]) -> str:
    lines = [_HEAD]
    for name, package in sorted(packages.items()):
        lines.append(f"[{name}]")
        lines += [f'{key} = "{package[key]}"' for key in ("version", "licence", "source")]
        lines.append(f"[{name}.files]")
        lines += [f'"{path}" = "{digest}"' for path, digest in package["files"].items()]
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
