"""Plans in files: reading one, and finding the plan of the class that its model wraps."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from cpgen import resources
from cpgen.diagnostics import fail
from cpgen.plan import Plan
from cpgen.plan_loader import load_plan


def read_plan(path: Path, label: str) -> Plan:
    """The plan in a file, which messages call `label`. Raises CpgenError.

    What a plan with `wraps` leaves out is taken from the wrapped class's plan: one beside it, or the shipped one.
    """

    def plans_of(model: str) -> list[tuple[str, str]]:
        beside = resources.plans_of(model, path.parent)
        names = {file: str(PurePosixPath(label).with_name(file.name)) for file in beside}
        if not beside:
            names = {file: f"plans/{file.name}" for file in resources.plans_of(model, resources.folder("plans"))}
        return [(read_text(file, f"the plan {name}"), name) for file, name in names.items()]

    return load_plan(read_text(path, f"the plan {label}"), label, plans_of)


def read_text(path: Path, what: str) -> str:
    """The text of a file that a user named; `what` it is called in errors. Raises CpgenError."""
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise fail("CP404", f"cannot read {what}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise fail("CP404", f"{what} is not UTF-8 text") from None
