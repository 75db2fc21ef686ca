"""Writing one checkpoint directory: in place or in a thread, to the last byte, and older ones deleted after it."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from io import IOBase
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import save

from .agreement import control_group, is_first_rank, on_first_rank
from .step_directory import abandon, prune, sync_directory, sync_file


class AsyncSave:
    """A checkpoint being written in the background. Keep the process group until `wait` has returned."""

    def __init__(self, written: Future[None]) -> None:
        self._written = written

    def done(self) -> bool:
        """Whether the writing has ended."""
        return self._written.done()

    def wait(self) -> None:
        """Return once the checkpoint is complete and older ones are pruned. Raises ValueError if it failed."""
        self._written.result()

    def result(self) -> None:
        """The same as `wait`."""
        self.wait()


def write(state: dict[str, Any], path: Path, keep: int | None, *, background: bool = False) -> None:
    """Write `state` to the directory `path`, and prune when it is complete. Collective.

    A save that fails leaves nothing behind, so that a full disk has its room back. Raises ValueError on every rank, or
    KeyboardInterrupt if one of them was interrupted.
    """
    writer = FileSystemWriter(path, sync_files=False)  # _Files does
    writer.fs = _Files()
    try:
        with quiet():
            save(state, storage_writer=writer, process_group=control_group(background=background))
    except (Exception, CheckpointException) as error:
        # DCP's exception comes to all ranks after the last of them has written; another one may be this rank's only.
        if isinstance(error, CheckpointException) and is_first_rank():
            with contextlib.suppress(OSError):
                abandon(path)
        if isinstance(error, CheckpointException):  # DCP takes an interrupt for a failure like any other
            for cause, _ in error.failures.values():
                if isinstance(cause, KeyboardInterrupt):
                    raise cause from error
        raise ValueError(f"the checkpoint {path} is incomplete and will not be loaded: {reason(error)}") from error
    failed = f"{path} is complete, but older checkpoints can't be deleted"
    on_first_rank(lambda: prune(path, keep), failed, background=background)


def write_in_background(state: dict[str, Any], path: Path, keep: int | None) -> AsyncSave:
    """Copy `state` to host memory and write the copy in a thread. Collective."""
    control_group(background=True)  # made here: making it is collective, and the thread may be late
    stager = DefaultStager(StagingOptions(False, False, False, False))
    copy = stager.stage(state)
    assert isinstance(copy, dict)
    executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="cpgen-checkpoint")
    written = executor.submit(write, copy, path, keep, background=True)
    written.add_done_callback(lambda _: stager.close())
    executor.shutdown(wait=False)
    return AsyncSave(written)


def reason(error: BaseException) -> str:
    """What went wrong, in a line: DCP's exception holds those of all ranks."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (cause, _) = min(error.failures.items())
        return f"{type(cause).__name__}: {cause} (on rank {rank})"
    return f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without DCP's remark that a single process has no process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is (disabled|unavailable)")
        yield


class _Files(FileSystem):
    """Files whose content and names are on the disk before DCP goes on, so that a complete checkpoint stays one when
    the power fails. (DCP's own sync comes before the last buffer of a file is written.)"""

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[IOBase]:
        try:
            with super().create_stream(path, mode) as stream:
                yield stream
        except RuntimeError as error:
            # torch.save wraps a failed write, and its message ("unexpected pos") says nothing of the disk.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
        sync_file(Path(path))

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        sync_directory(Path(new_path).parent)
        sync_directory(Path(new_path).parent.parent)
