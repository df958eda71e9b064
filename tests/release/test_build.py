"""What `python -m build` makes installs and works in a clean environment of every supported Python."""

import json
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest

import smoke
from fastness.version import __version__

ROOT = Path(__file__).parents[2]
PYTHONS = ("3.11", "3.12", "3.13")


def run(*words: str | Path) -> str:
    done = subprocess.run([sys.executable, *map(str, words)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist of this checkout, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    run("-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    return dist / f"fastness-{__version__}-py3-none-any.whl"


@pytest.fixture(scope="module")
def sdist(dist: Path) -> Path:
    return dist / f"fastness-{__version__}.tar.gz"


BUILD = """
import sys
from hatchling.build import build_wheel
print(build_wheel(sys.argv[1]))
"""


def test_a_wheel_of_this_checkout_has_what_it_needs(tmp_path: Path) -> None:
    check_wheel(tmp_path / run("-c", BUILD, tmp_path).splitlines()[-1])


@pytest.mark.thorough
def test_the_wheel_and_the_sdist_have_what_they_need(wheel: Path, sdist: Path) -> None:
    run("-m", "twine", "check", "--strict", wheel, sdist)
    check_wheel(wheel)
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for needed in ("Makefile", "requirements.lock", "docs/index.md", "tests/conftest.py", "tools/smoke.py"):
        assert needed in names
    assert not [name for name in names if name.startswith((".git/", ".venv", "build/", "dist/"))]


def check_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
        metadata = Parser().parsestr(archive.read(f"fastness-{__version__}.dist-info/METADATA").decode())
    files = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src").rglob("*") if path.is_file()}
    expected = {name for name in files if "__pycache__" not in name and ".egg-info" not in name}
    data = {name for name in packed if name.startswith(f"fastness-{__version__}.")}
    assert packed - data == expected
    assert "fastness/server/console/static/app.js" in packed
    assert f"fastness-{__version__}.data/data/share/man/man1/fastness.1" in data

    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = set(project["project"]["optional-dependencies"])
    assert set(metadata.get_all("Provides-Extra", [])) == extras
    assert extras.isdisjoint(project["dependency-groups"])
    supported = [f"Programming Language :: Python :: {version}" for version in PYTHONS]
    assert set(supported) <= set(metadata.get_all("Classifier", []))
    assert (metadata["Author"], metadata["License-Expression"]) == ("Fastness maintainers", "Apache-2.0")
    required = [each for each in metadata.get_all("Requires-Dist", []) if "extra ==" not in each]
    assert len(required) == len(project["project"]["dependencies"])


def interpreter(version: str) -> str:
    found: str | None = smoke.interpreter(version)
    if found is None:
        pytest.skip(f"no Python {version} on the path or in pyenv; pyenv install {version}")
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("version", ["3.11", "3.13"])
def test_a_clone_installs_and_works(version: str) -> None:
    """`pip install .`, with the versions of the lock."""
    interpreter(version)
    seen = json.loads(smoke.install_and_use(ROOT, version, str(ROOT / "requirements.lock")))
    assert (seen["python"].rpartition(".")[0], seen["fastness"], seen["fence"]) == (version, __version__, 2)


@pytest.mark.thorough
def test_the_wheel_installs_and_works(wheel: Path) -> None:
    version = ".".join(map(str, sys.version_info[:2]))
    seen = json.loads(smoke.install_and_use(wheel, version, str(ROOT / "requirements.lock")))
    assert (seen["fastness"], seen["fence"]) == (__version__, 2)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
@pytest.mark.parametrize("version", PYTHONS)
def test_the_wheel_and_the_sdist_install_and_work(version: str, kind: str, wheel: Path, sdist: Path) -> None:
    """With the newest dependencies, as a user gets them."""
    interpreter(version)
    seen = json.loads(smoke.install_and_use(wheel if kind == "wheel" else sdist, version))
    assert seen["python"].startswith(version)


@pytest.mark.nightly
@pytest.mark.parametrize("version", PYTHONS)
def test_every_extra_resolves(version: str, wheel: Path, tmp_path: Path) -> None:
    python = interpreter(version)
    subprocess.run([python, "-m", "venv", tmp_path / "venv"], check=True)
    command = [str(tmp_path / "venv/bin/python"), "-m", "pip", "install", "--quiet", "--dry-run", f"{wheel}[all]"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
