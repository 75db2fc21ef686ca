"""What comes with cpgen: shipped plans and templates, from the wheel or from a checkout."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

_PACKAGE = Path(__file__).parent
_MODEL = re.compile(r"^model:[ \t]*[\"']?([A-Za-z0-9_]+)[\"']?[ \t\r]*(#.*)?$", re.MULTILINE)


def folder(name: str) -> Path:
    """The folder `plans` or `templates`: beside this file in a wheel, beside the package in a checkout."""
    inside = _PACKAGE / name
    return inside if inside.is_dir() else _PACKAGE.parent / name


def shipped_plans() -> dict[str, Path]:
    """Model class -> plan file."""
    models = {path: _model_of(path) for path in sorted(folder("plans").glob("*.yaml"))}
    return {model: path for path, model in models.items() if model is not None}


def plans_of(model: str, place: Path) -> list[Path]:
    """The plans in a folder for a model class."""
    files = (path for path in sorted(place.glob("*.y*ml")) if path.suffix in (".yaml", ".yml"))
    return [path for path in files if _model_of(path) == model]


def _model_of(path: Path) -> str | None:
    """The class that a plan is for, by one line of it: `list` should not parse every plan. None if it is no plan."""
    try:
        match = _MODEL.search(path.read_text("utf-8", errors="replace"))
    except OSError:
        return None
    return match[1] if match else None


def runtime_files() -> dict[str, str]:
    """The runtime library's source, by file name."""
    return {path.name: path.read_text("utf-8") for path in sorted((_PACKAGE / "runtime").glob("*.py"))}


def template_hashes() -> dict[str, str]:
    paths = sorted(folder("templates").glob("*.j2"))
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
