from collections.abc import Iterator

import pytest

from cpgen.verify.pool import WorkerPool
from tests.preloaded import PRELOADED

pytest.register_assert_rewrite("tests.unit.before_and_after")  # its assertions show both texts, as those in tests do


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(4, preload=PRELOADED) as workers:
        yield workers
