"""`check` and `diff`: a package on disk against the one that its manifest's request gives today."""

from __future__ import annotations

import ast
import difflib
from dataclasses import dataclass
from pathlib import Path

from cpgen.diagnostics import CpgenError, Finding, fail
from cpgen.disk import OnDisk, edited_finding, hand_edits, read_package
from cpgen.package import MANIFEST, Package, generate, request_from_manifest
from cpgen.source import SourceTree

UNCOMMITTED = ".upstream-not-committed"


@dataclass(frozen=True)
class FileState:
    """One file of a package: "same", "changed", "missing", "stale" (no longer emitted) or "edited" by hand."""

    package: str
    file: str
    state: str
    added: int = 0
    removed: int = 0


def find_packages(out: Path) -> list[str]:
    """The packages under `out`, by their manifests."""
    if not out.is_dir():
        return []
    return sorted(path.parent.name for path in out.glob(f"*/{MANIFEST}") if not path.parent.name.startswith("."))


def regenerate(name: str, out: Path, tree: SourceTree) -> tuple[OnDisk, Package]:
    """The package on disk, and what its request gives today. Raises CpgenError."""
    folder = out / name
    if not name.isidentifier() or not (folder / MANIFEST).is_file():
        near = ", ".join(find_packages(out)) or "none"
        raise fail("CP205", f"no package '{name}' in {out}", note=f"packages there: {near}")
    disk = read_package(folder)
    assert disk.manifest is not None
    package = generate(request_from_manifest(disk.manifest, folder), out, tree)
    return read_package(folder, set(package.files)), package


def check_package(name: str, out: Path, tree: SourceTree) -> list[FileState]:
    """The state of each file of a package.

    Where `out` holds a file `.upstream-not-committed`, files made from upstream's source may be absent: then their
    hash in the manifest is compared. A repository that must not hold upstream's code checks its packages so.
    """
    disk, package = regenerate(name, out, tree)
    edited = set(hand_edits(disk))
    ignored = set(package.upstream) if (out / UNCOMMITTED).exists() else set()
    states = []
    for file, text in sorted(package.files.items()):
        old = disk.files.get(file)
        if old is None and file in ignored:
            recorded = (disk.manifest or {})["outputs"].get(file)
            same = recorded == _outputs(package).get(file)
            states.append(FileState(name, file, "same" if same else "changed"))
        elif old is None:
            states.append(FileState(name, file, "missing"))
        elif file in edited:
            states.append(FileState(name, file, "edited", *_counts(text, old)))
        elif old != text:
            states.append(FileState(name, file, "changed", *_counts(old, text)))
        else:
            states.append(FileState(name, file, "same"))
    for file in sorted(set(disk.files) - set(package.files)):
        states.append(FileState(name, file, "stale"))
    return states


def diff_package(name: str, out: Path, tree: SourceTree, *, upstream: bool) -> str:
    """A unified diff: the package on disk to today's, or upstream's files to today's.

    Of upstream's files it shows only the classes and functions that the package has; a line says how many others there
    are.
    """
    disk, package = regenerate(name, out, tree)
    texts = []
    for file, text in sorted(package.files.items()):
        if not upstream:
            before = disk.files.get(file, "")
        elif file in package.upstream:
            before, left_out = _in_common(package.upstream[file], text)
            if left_out:
                texts.append(
                    f"{left_out} definitions of upstream's {file} that the package does not use are left out\n"
                )
        else:
            continue
        label = "upstream" if upstream else "committed"
        texts.append(unified_diff(before, text, f"{label}/{name}/{file}", f"generated/{name}/{file}"))
    return "".join(texts)


def _in_common(upstream: str, emitted: str) -> tuple[str, int]:
    """Upstream's text without the classes and functions that the emitted one lacks, and their number."""
    kept = {node.name for node in ast.parse(emitted).body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    lines = upstream.splitlines(keepends=True)
    left_out = 0
    for node in reversed(ast.parse(upstream).body):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name not in kept:
            start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]) - 1
            end = node.end_lineno
            while end is not None and lines[end : end + 1] == ["\n"]:
                end += 1
            del lines[start:end]
            left_out += 1
    return "".join(lines), left_out


def unified_diff(before: str, after: str, before_name: str, after_name: str) -> str:
    lines = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), before_name, after_name
    )
    return "".join(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n" for line in lines)


def edited_error(states: list[FileState], out: Path) -> CpgenError | None:
    """A finding for each file that was edited by hand, or None."""
    findings: list[Finding] = []
    for state in states:
        if state.state == "edited":
            folder = out / state.package
            request = request_from_manifest(read_package(folder).manifest or {}, folder)
            findings.append(edited_finding(folder.as_posix(), state.file, f"cpgen emit --model {request.model}"))
    return CpgenError(findings, exit_code=1) if findings else None


def _outputs(package: Package) -> dict[str, str]:
    import json

    outputs: dict[str, str] = json.loads(package.files[MANIFEST])["outputs"]
    return outputs


def _counts(old: str, new: str) -> tuple[int, int]:
    lines = list(difflib.unified_diff(old.splitlines(), new.splitlines(), n=0, lineterm=""))[2:]
    return sum(line.startswith("+") for line in lines), sum(line.startswith("-") for line in lines)
