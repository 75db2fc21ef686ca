"""What comes with cpgen: shipped plans and templates, from the wheel or from a checkout."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

_PACKAGE = Path(__file__).parent
_MODEL = re.compile(r"^model:[ \t]*([A-Za-z0-9_]+)[ \t]*(#.*)?$", re.MULTILINE)


def folder(name: str) -> Path:
    """The folder `plans` or `templates`: beside this file in a wheel, beside the package in a checkout."""
    inside = _PACKAGE / name
    return inside if inside.is_dir() else _PACKAGE.parent / name


def shipped_plans() -> dict[str, Path]:
    """Model class -> plan file. Reads one line of each: `list` should not parse every plan."""
    plans = {}
    for path in sorted(folder("plans").glob("*.yaml")):
        match = _MODEL.search(path.read_text("utf-8"))
        if match:
            plans[match[1]] = path
    return plans


def runtime_files() -> dict[str, str]:
    """The runtime library's source, by file name."""
    return {path.name: path.read_text("utf-8") for path in sorted((_PACKAGE / "runtime").glob("*.py"))}


def template_hashes() -> dict[str, str]:
    paths = sorted(folder("templates").glob("*.j2"))
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
