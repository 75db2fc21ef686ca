"""The export command: a training checkpoint's model, as a directory that plain diffusers loads."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cpgen.diagnostics import CpgenError, fail
from cpgen.disk import swap

if TYPE_CHECKING:
    from cpgen.runtime.checkpoint_content import ModelDescription

DTYPES = ("float32", "float16", "bfloat16")
_WEIGHTS = re.compile(r"config\.json|diffusion_pytorch_model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
_ADAPTER = re.compile(r"pytorch_lora_weights\.safetensors")


def export_command(
    checkpoint: Path,
    directory: Path,
    *,
    step: int | None,
    dtype: str | None,
    max_shard_size: str,
    config: Path | None,
    force: bool,
) -> list[Path]:
    """Write the model of `checkpoint`, or its adapter, into `directory`, all of it or nothing; returns the paths.

    Files are staged beside `directory` and swapped in at the end. With `force` other files in `directory` stay. Raises
    CpgenError for input that cannot be used, and if the checkpoint is damaged or the disk full.
    """
    if importlib.util.find_spec("torch") is None:
        raise fail("CP304", "export reads the checkpoint with torch, which is not installed", help="pip install torch")
    import torch

    from cpgen.runtime.checkpoint_weights import CheckpointWeights, find_checkpoint
    from cpgen.runtime.export import export_adapter, export_weights

    _check_place(directory, force)
    if directory.resolve() in (checkpoint.resolve(), *checkpoint.resolve().parents):
        raise fail(
            "CP204",
            f"{directory} holds the checkpoint",
            note="the directory is replaced as a whole, and a run may be writing to it",
            help="export to a directory of its own",
        )
    try:
        source = find_checkpoint(checkpoint, -1 if step is None else step)
        description = _description(source, config, dtype)
        weights = CheckpointWeights(source)
    except ValueError as error:
        raise _failure(error) from None
    staged: Path | None = None
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        staged = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
        staged.chmod(0o755)
        with click.progressbar(
            length=sum(map(weights.saved_bytes, weights.tensors)),
            label="exporting",
            file=sys.stderr,
            hidden=not sys.stderr.isatty(),
        ) as progress:
            options: dict[str, Any] = {
                "dtype": None if dtype is None else getattr(torch, dtype),
                "on_tensor": progress.update,
            }
            if description.adapters:
                names = export_adapter(weights, staged, description, **options)
            else:
                names = export_weights(weights, staged, description, max_shard_size=max_shard_size, **options)
        _keep_others(directory, staged, _ADAPTER if description.adapters else _WEIGHTS)
        swap(staged, directory)
    except ValueError as error:
        raise _failure(error) from None
    except OSError as error:
        raise fail("CP204", f"cannot write {directory}: {error.strerror or error}") from None
    finally:
        if staged is not None:
            shutil.rmtree(staged, ignore_errors=True)
    click.echo(f"wrote {directory.as_posix()} from {source.as_posix()}", err=True)
    return [directory / name for name in names]


def _failure(error: ValueError) -> CpgenError:
    return fail("CP409", str(error))


def _check_place(directory: Path, force: bool) -> None:
    if directory.is_symlink() or (directory.exists() and not directory.is_dir()):
        raise fail("CP204", f"{directory} is not a directory", note="it is a link or a file")
    if directory.is_dir() and any(directory.iterdir()) and not force:
        raise fail(
            "CP204",
            f"{directory} is not empty",
            help="choose another directory, or replace the weights in it with --force: its other files stay",
        )


def _description(source: Path, config: Path | None, dtype: str | None) -> ModelDescription:
    """What is to know of the model: from the checkpoint, its config from `config` if that is given."""
    from dataclasses import replace

    from cpgen.runtime.checkpoint_content import ModelDescription, read_description

    saved = read_description(source)
    if config is None:
        if saved is None:
            raise fail(
                "CP409",
                f"{source} does not say which model it holds",
                note="it was saved by an older cpgen, or the model is not one of diffusers",
                help="give the model's config.json with --config FILE",
            )
        return saved
    text, class_name = _read_config(config / "config.json" if config.is_dir() else config)
    if saved is not None:
        return replace(saved, config=text)
    return ModelDescription(text, _kept_in_fp32(class_name) if dtype else (), ())


def _read_config(file: Path) -> tuple[str, str]:
    try:
        content = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise fail("CP409", f"{file} can't be read: {error}") from None
    if not isinstance(content, dict) or not isinstance(content.get("_class_name"), str):
        raise fail("CP409", f"{file} is not a model's config.json: it has no _class_name")
    return json.dumps(content, indent=2, sort_keys=True) + "\n", content["_class_name"]


def _kept_in_fp32(class_name: str) -> tuple[str, ...]:
    """What diffusers' class of that name keeps in fp32: an old checkpoint does not say."""
    import diffusers

    model_class = getattr(diffusers, class_name, None)
    if model_class is None:
        raise fail(
            "CP409",
            f"diffusers has no {class_name}, so it is not known which of its tensors stay in fp32",
            help="leave out --dtype",
        )
    kept = getattr(model_class, "_keep_in_fp32_modules", None) or ()
    return (kept,) if isinstance(kept, str) else tuple(kept)


def _keep_others(directory: Path, staged: Path, replaced: re.Pattern[str]) -> None:
    """Bring what is in the directory into the staged one, but for files that are replaced."""
    if not directory.is_dir():
        return
    for path in directory.iterdir():
        if replaced.fullmatch(path.name):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.copytree(path, staged / path.name, symlinks=True, copy_function=_link)
        else:
            _link(path, staged / path.name)


def _link(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # not on every file system
        shutil.copy2(source, target, follow_symlinks=False)
