"""What users install: an sdist from the source, a wheel from that sdist, and the package from that wheel, in a clean folder."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "nestpipe"
NOT_CODE = ("*.cpp", "*.h", "*.css", "*.html", "py.typed")  # files that are read when the package runs
_BUILD = """
import os, sys
from setuptools import build_meta
os.chdir(sys.argv[1])
print(getattr(build_meta, sys.argv[2])(sys.argv[3]))
"""
_USE = """
import sys
from pathlib import Path
import nestpipe
from nestpipe.cli import main
from nestpipe.ops import native_library
print(Path(nestpipe.__file__).parent)
print(len(list(native_library.CSRC.glob("*.cpp"))))
sys.exit(main(["--help"]))
"""


def run(*command: str | Path, path: Path | None = None) -> str:
    environment = {"PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"} | (
        {"PYTHONPATH": str(path)} if path else {}
    )
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, env=environment, cwd="/", check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist of a clean copy of the source, and the wheel that is made of nothing but the sdist."""
    folder = tmp_path_factory.mktemp("package")
    source, out = folder / "source", folder / "out"
    shutil.copytree(PACKAGE, source / "nestpipe", ignore=shutil.ignore_patterns("__pycache__", "build", "*.so"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    out.mkdir()
    sdist = out / run(sys.executable, "-c", _BUILD, source, "build_sdist", out).splitlines()[-1]
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    return sdist, out / run(sys.executable, "-c", _BUILD, unpacked, "build_wheel", out).splitlines()[-1]


def test_sdist_and_wheel_hold_every_file_that_the_package_reads(built: tuple[Path, Path]) -> None:
    sdist, wheel = built
    wanted = {str(path.relative_to(ROOT)) for path in PACKAGE.rglob("*.py")}
    wanted |= {str(path.relative_to(ROOT)) for pattern in NOT_CODE for path in PACKAGE.rglob(pattern)}
    assert {"nestpipe/py.typed", "nestpipe/ops/csrc/rows.cpp", "nestpipe/cli/__init__.py"} < wanted
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
        entry = next(name for name in inside if name.endswith("entry_points.txt"))
        assert "nestpipe = nestpipe.cli:main" in archive.read(entry).decode()
    assert not wanted - inside
    assert not {name for name in inside if not name.startswith("nestpipe") or name.endswith((".so", ".pyc"))}
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert not (wanted | {"LICENSE", "README.md", "pyproject.toml"}) - names


def test_the_installed_wheel_runs_alone(built: tuple[Path, Path], tmp_path: Path) -> None:
    target = tmp_path / "clean"
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-index", "--no-deps")
    run(*pip, "--no-compile", "--target", target, built[1])
    where, num_native, *usage = run(sys.executable, "-P", "-c", _USE, path=target).splitlines()
    assert Path(where) == target / "nestpipe"
    assert int(num_native) == len(list((PACKAGE / "ops" / "csrc").glob("*.cpp")))
    assert usage[0] == "usage: nestpipe COMMAND ..."
    assert (target / "bin" / "nestpipe").stat().st_mode & 0o111
