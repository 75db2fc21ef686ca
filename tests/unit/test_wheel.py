"""The built wheel, installed elsewhere: plans, templates and the runtime come with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from cpgen.package import Request, generate
from tests.unit.projects import REPOSITORY


def python(*arguments: str | Path, cwd: Path, path: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if path is not None:
        environment["PYTHONPATH"] = path
    return subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=cwd, env=environment, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the wheel is installed, and nothing else."""
    folder = tmp_path_factory.mktemp("wheel")
    built = python("-m", "build", "--wheel", "--no-isolation", "--outdir", folder, REPOSITORY, cwd=folder)
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = folder.glob("*.whl")
    place = folder / "site"
    install = ("-m", "pip", "install", "--no-deps", "--no-index", "--quiet", "--target", place, wheel)
    installed = python(*install, cwd=folder)
    assert installed.returncode == 0, installed.stderr
    return place


def run_installed(site: Path, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # -S leaves out the environment's own path files, and with them the checkout that it may point to.
    path = os.pathsep.join([str(site), sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"]])
    return python("-S", "-m", "cpgen", *arguments, cwd=cwd, path=path)


def test_wheel_holds_what_it_needs(site: Path) -> None:
    (wheel,) = site.parent.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder, pattern in (("plans", "*.*"), ("templates", "*.j2")):
        shipped = {f"cpgen/{folder}/{path.name}" for path in (REPOSITORY / folder).glob(pattern)}
        assert shipped and shipped == {name for name in names if name.startswith(f"cpgen/{folder}/")}
    sources = {path.relative_to(REPOSITORY).as_posix() for path in (REPOSITORY / "cpgen").rglob("*.py")}
    assert sources <= names and "cpgen/py.typed" in names
    assert {name.partition("/")[0] for name in names} == {"cpgen", f"cpgen-{site_version(names)}.dist-info"}


def site_version(names: set[str]) -> str:
    return next(name for name in names if name.endswith("/METADATA")).partition("-")[2].partition(".dist-info")[0]


def test_installed_cpgen_emits_the_same_bytes(site: Path, tmp_path: Path) -> None:
    ran = run_installed(site, tmp_path, "emit", "--model", "WanTransformer3DModel", "--cp", "4", "--vendor-runtime")
    assert ran.returncode == 0, ran.stderr
    folder = tmp_path / "generated/wan_transformer_3d"
    expected = generate(Request("WanTransformer3DModel", 4, vendor_runtime=True), tmp_path / "generated").files
    assert {name: (folder / name).read_text("utf-8") for name in expected} == expected
    checked = run_installed(site, tmp_path, "check", "--all", "--json")
    assert checked.returncode == 0 and {row["state"] for row in json.loads(checked.stdout)} == {"same"}


def test_it_is_the_wheel_that_ran(site: Path, tmp_path: Path) -> None:
    plan = site / "cpgen/plans/wan.yaml"
    text = plan.read_text()
    plan.write_text(text.replace("diffusers:", "difusers:"))
    try:
        ran = run_installed(site, tmp_path, "emit", "--model", "WanTransformer3DModel", "--cp", "4")
    finally:
        plan.write_text(text)
    assert ran.returncode == 2 and "unknown key 'difusers'" in ran.stderr and "--> plans/wan.yaml:" in ran.stderr
