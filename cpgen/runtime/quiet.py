"""Remarks of torch that a user can do nothing about."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

_LOGGER = "torch.distributed.tensor._redistribute"


@contextmanager
def without_redistribution_remarks() -> Iterator[None]:
    """Without the warning that a DTensor on a mesh of two axes, of FSDP2 and tp, is gathered or summed in two steps."""
    logger = logging.getLogger(_LOGGER)
    logger.addFilter(_nothing)
    try:
        yield
    finally:
        logger.removeFilter(_nothing)


def _nothing(record: logging.LogRecord) -> bool:
    return False
