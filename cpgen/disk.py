"""Packages on disk: what is there, whether a hand touched it, and how a new one takes its place."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpgen.diagnostics import CpgenError, Finding, fail
from cpgen.package import MANIFEST, Package, seal, sha256

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@dataclass(frozen=True)
class OnDisk:
    """A package directory: its manifest, and the text of each file that the manifest lists or that is asked for."""

    folder: Path
    manifest: dict[str, Any] | None
    files: dict[str, str]


def read_package(folder: Path, names: set[str] | None = None) -> OnDisk:
    """Read a package directory, which may not exist. Raises CpgenError (exit 1) for a broken manifest."""
    manifest = None
    path = folder / MANIFEST
    if path.is_file():
        try:
            manifest = json.loads(path.read_text("utf-8"))
            listed = set(manifest["outputs"])
            if not all(isinstance(hash_, str) for hash_ in manifest["outputs"].values()):
                raise ValueError
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise fail(
                "CP203",
                f"{folder.name}/{MANIFEST} is not a manifest of cpgen",
                exit_code=1,
                help="restore it from version control, or emit again with --force",
            ) from None
    else:
        listed = set()
    files = {}
    for name in sorted(listed | (names or set())):
        file = folder / name
        if file.is_file() and not _leaves(name):
            files[name] = file.read_bytes().decode("utf-8", errors="surrogateescape")
    return OnDisk(folder, manifest, files)


def hand_edits(disk: OnDisk) -> list[str]:
    """The files that are there but are not what the manifest says was written."""
    if disk.manifest is None:
        return []
    outputs = disk.manifest["outputs"]
    edited = [name for name, text in disk.files.items() if name in outputs and _hash(text) != outputs[name]]
    written = disk.files.get(MANIFEST)
    return edited if written is None or written == seal(disk.manifest) else [*edited, MANIFEST]


def write_package(package: Package, out: Path, *, force: bool) -> list[str]:
    """Put `package` into `out/<name>`, all of it or nothing; return the names of the files that changed.

    Unchanged files keep their modification time, and other files in the directory stay. Raises CpgenError (exit 1)
    if a file was edited by hand or the directory is not cpgen's, unless `force`.
    """
    folder = out / package.name
    _check_place(folder, out)
    disk = _read_for_write(folder, package, force)
    changed = [name for name, text in package.files.items() if disk.files.get(name) != text]
    stale = sorted(set((disk.manifest or {}).get("outputs", {})) - set(package.files))
    stale = [name for name in stale if name in disk.files]
    if not changed and not stale:
        return []
    try:
        out.mkdir(parents=True, exist_ok=True)
        staged = Path(tempfile.mkdtemp(prefix=f".{package.name}.", dir=out))
    except OSError as error:
        raise fail("CP204", f"cannot write into {out}: {error.strerror}") from None
    try:
        staged.chmod(0o755)
        _keep_others(folder, staged, without={*changed, *stale})
        for name in changed:
            file = staged / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(package.files[name].encode())
        swap(staged, folder)
    except OSError as error:
        raise fail("CP204", f"cannot write {folder}: {error.strerror}") from None
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return [*changed, *stale]


def edited_finding(name: str, file: str, regenerate: str) -> Finding:
    return Finding(
        "CP201",
        f"{name}/{file} was edited by hand",
        help=f"move the change into the plan, or discard it: {regenerate} --force",
    )


def _read_for_write(folder: Path, package: Package, force: bool) -> OnDisk:
    names = set(package.files)
    if force and folder.is_dir():
        try:
            return read_package(folder, names)
        except CpgenError:
            return OnDisk(folder, None, {})
    disk = read_package(folder, names)
    edited = hand_edits(disk)
    if edited:
        regenerate = f"cpgen emit --model {package.request.model}"
        raise CpgenError([edited_finding(package.name, file, regenerate) for file in edited], exit_code=1)
    if disk.manifest is None and folder.is_dir() and any(folder.iterdir()):
        raise fail(
            "CP202",
            f"{folder} is not empty, and cpgen did not write it",
            exit_code=1,
            help="choose another --package, or overwrite files of the same names with --force",
        )
    return disk


def _check_place(folder: Path, out: Path) -> None:
    if folder.is_symlink() or (out.exists() and not out.is_dir()) or (folder.exists() and not folder.is_dir()):
        raise fail("CP204", f"{folder} is not a directory inside {out}", note="it is a link or a file")


def _keep_others(folder: Path, staged: Path, without: set[str]) -> None:
    """Bring what is in the directory and does not change into the staged one, with its times."""
    if not folder.is_dir():
        return
    for root, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__"]
        place = staged / Path(root).relative_to(folder)
        place.mkdir(exist_ok=True)
        for name in files:
            source = Path(root) / name
            if source.relative_to(folder).as_posix() not in without:
                shutil.copy2(source, place / name, follow_symlinks=False)


def swap(staged: Path, folder: Path) -> None:
    """Put `staged` where `folder` is. A kill at any point leaves one of the two whole in its place."""
    if not folder.exists():
        staged.rename(folder)
        return
    if _exchange(staged, folder):
        return  # `staged` is now the old one, and removed by the caller
    # No atomic exchange on this system: a moment between the two renames has neither in place.
    old = Path(tempfile.mkdtemp(prefix=f".{folder.name}.old.", dir=folder.parent))
    folder.rename(old / folder.name)
    try:
        staged.rename(folder)
    except OSError:
        (old / folder.name).rename(folder)
        raise
    finally:
        shutil.rmtree(old, ignore_errors=True)


def _exchange(left: Path, right: Path) -> bool:
    """Linux's renameat2(RENAME_EXCHANGE), which Python does not offer. False where it isn't supported."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError, TypeError):
        return False
    if renameat2(_AT_FDCWD, os.fsencode(left), _AT_FDCWD, os.fsencode(right), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL):
        return False
    raise OSError(code, os.strerror(code))


def _leaves(name: str) -> bool:
    return name.startswith("/") or ".." in name.split("/")


def _hash(text: str) -> str:
    try:
        return sha256(text)
    except UnicodeEncodeError:  # not UTF-8: certainly not what cpgen wrote
        return ""
