"""Programs for Node.js, with their packages from the npm registry."""

import hashlib
import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

_UNREACHABLE = ("ENOTFOUND", "ECONNREFUSED", "ETIMEDOUT", "EAI_AGAIN", "ECONNRESET", "ENETUNREACH", "network")


def installed_program(source: Path, name: str) -> Path:
    """The program `name` of the folder `source`, beside its packages.

    The packages are kept for the next run: to install them takes a minute, most of which npm waits for the registry.
    """
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("no Node.js with npm on the path; apt-get install nodejs npm")
    files = {each: (source / each).read_bytes() for each in ("package.json", "package-lock.json", ".npmrc")}
    digest = hashlib.sha256(b"".join(files.values())).hexdigest()[:16]
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fastness-tests"
    folder = caches / f"{source.name}-{digest}"
    if not folder.exists():
        making = caches / f"making-{os.getpid()}"
        shutil.rmtree(making, ignore_errors=True)
        making.mkdir(parents=True)
        for each, content in files.items():
            (making / each).write_bytes(content)
        done = subprocess.run(
            ["npm", "ci", "--prefer-offline", "--no-audit", "--no-fund"],
            cwd=making,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        if done.returncode and any(word in done.stderr for word in _UNREACHABLE):
            shutil.rmtree(making)
            pytest.skip("no registry of npm reached; connect this machine to a network")
        assert done.returncode == 0, done.stderr
        with suppress(OSError):  # Another process was first.
            making.rename(folder)
        shutil.rmtree(making, ignore_errors=True)
    # A program finds its packages beside it.
    original = source / name
    program = folder / f"{original.stem}-{hashlib.sha256(original.read_bytes()).hexdigest()[:16]}{original.suffix}"
    if not program.exists():
        part = program.with_suffix(f".{os.getpid()}")
        shutil.copy(original, part)
        part.replace(program)
    return program
