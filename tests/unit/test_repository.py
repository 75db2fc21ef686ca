"""What this repository may hold: of emitted packages the glue alone, since the rest is mostly diffusers' source."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.unit.projects import REPOSITORY

GLUE = {"MANIFEST.json", "__init__.py", "checkpoint.py", "parallelize.py"}
OWN = "tiny_transformer_2d"  # emitted from tests/models
PACKAGES = sorted(path.parent for path in (REPOSITORY / "generated").glob("*/MANIFEST.json"))


@pytest.mark.skipif(not (REPOSITORY / ".git").exists(), reason="not a git checkout")
def test_no_emitted_model_file_is_tracked_or_would_be() -> None:
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "generated"]
    paths = subprocess.run(listed, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.split()
    inside = [path.split("/")[1:] for path in paths if path.count("/") == 2]
    assert inside and [path for path in inside if path[0] != OWN and path[1] not in GLUE] == []


@pytest.mark.skipif(not (REPOSITORY / ".git").exists(), reason="not a git checkout")
@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_git_ignores_every_model_file_of_a_package(package) -> None:  # type: ignore[no-untyped-def]
    outputs = json.loads((package / "MANIFEST.json").read_text())["outputs"]
    model_files = [name for name in outputs if name not in GLUE]
    assert model_files
    asked = ["git", "check-ignore", "--no-index", *(str(package / name) for name in model_files)]
    ignored = subprocess.run(asked, cwd=REPOSITORY, capture_output=True, text=True, check=False).stdout.split()
    assert len(ignored) == (0 if package.name == OWN else len(model_files))
