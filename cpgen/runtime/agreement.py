"""How ranks agree: messages between hosts, and errors that every rank raises."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

ResultT = TypeVar("ResultT")

_groups: dict[bool, tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}  # background: (world it was made in, group)


def control_group(*, background: bool = False) -> dist.ProcessGroup | None:
    """A gloo group of all ranks for messages between hosts, or None without a process group. First call: collective.

    There are two: `background` is for the thread that writes a checkpoint. Were it one group, messages of that thread
    and of the training's own would meet in another order on another rank.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    world = dist.group.WORLD
    assert world is not None
    if background not in _groups or _groups[background][0] is not world:
        _groups[background] = (world, dist.new_group(backend="gloo", timeout=_timeout(world)))
    return _groups[background][1]


def _timeout(world: dist.ProcessGroup) -> timedelta:
    """How long ranks wait for each other's disks, and for a callback: as long as the process group's own collectives
    may take, but no less than torch's default. Some runs give their collectives seconds only."""
    options = [world._get_backend(device).options for device in world._device_types]
    return max([default_pg_timeout, *(option._timeout for option in options if option is not None)])


def is_first_rank() -> bool:
    """Whether this is rank 0, or the only process."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def gather(value: Any) -> list[Any]:
    """The `value` of every rank, by rank. Collective."""
    if (group := control_group()) is None:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def on_every_rank(action: Callable[[], ResultT]) -> ResultT:
    """Run `action` on every rank; if it raises ValueError on one, raise ValueError on all. Collective."""
    failure: ValueError | None = None
    try:
        result = action()
    except ValueError as error:
        failure = error
    errors = gather(None if failure is None else str(failure))
    if failure is not None:
        raise failure
    for rank, message in enumerate(errors):
        if message is not None:
            raise ValueError(f"{message} (on rank {rank})")
    return result


def on_first_rank(action: Callable[[], ResultT], what: str, *, background: bool = False) -> ResultT:
    """Run `action` on rank 0 and return its result on every rank. Collective, in that `control_group`.

    If it raises OSError or ValueError, every rank raises ValueError; `what` says what could not be done.
    """
    outcome: list[Any] = [None, None]
    if is_first_rank():
        try:
            outcome = [None, action()]
        except OSError as error:
            outcome = [f"{what}: {error}", None]
        except ValueError as error:
            outcome = [str(error), None]
    if (group := control_group(background=background)) is not None:
        dist.broadcast_object_list(outcome, src=0, group=group)
    if outcome[0] is not None:
        raise ValueError(outcome[0])
    result: ResultT = outcome[1]
    return result
