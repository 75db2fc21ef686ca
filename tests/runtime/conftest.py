"""What several modules of tests share."""

import pytest

from tests.runtime import training_models, weight_cases


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory with the packages of the training tests."""
    root = tmp_path_factory.mktemp("packages")
    training_models.emit_packages(root)
    weight_cases.emit_tied_package(root)
    return str(root)
