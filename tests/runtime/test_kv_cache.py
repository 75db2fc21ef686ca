"""Keys and values that one forward leaves in a cache for later ones: the cache holds those of all tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cpgen.verify.pool import WorkerPool

from .emitted import emit
from .kv_cache_cases import message_of_reading, read_after_write

GLM_IMAGE = "GlmImageTransformer2DModel"


@pytest.mark.parametrize(
    ("cp", "strategy"), [(2, "ulysses"), (2, "allgather"), (4, "ulysses"), (4, "allgather"), (4, "hybrid")]
)
def test_reference_images(tmp_path: Path, pool: WorkerPool, cp: int, strategy: str) -> None:
    emitted = emit(tmp_path, GLM_IMAGE, cp, strategy)
    assert max(pool.run(read_after_write, emitted, emitted.probe(), world_size=cp)) < 1e-13


@pytest.mark.parametrize(
    ("cp", "options", "message"),
    [
        (2, {"strategy": "ring"}, "tokens on this rank, but the plan says text"),
        (4, {"strategy": "hybrid", "outer": "ring"}, "keys out of a cache don't travel; use ulysses or allgather"),
    ],
)
def test_a_ring_cannot_read_a_cache(
    tmp_path: Path, pool: WorkerPool, cp: int, options: dict[str, Any], message: str
) -> None:
    emitted = emit(tmp_path, GLM_IMAGE, cp, **options)
    for found in pool.run(message_of_reading, emitted, emitted.probe(), world_size=cp):
        assert message in found
