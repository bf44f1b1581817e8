"""A finished run's folder with invented numbers."""

import pytest
from invented_run import invented_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return invented_run(tmp_path_factory.mktemp("run") / "a")
