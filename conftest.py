"""Settings that the tests and the chapters share, wherever pytest is started."""

import os
from pathlib import Path

import pytest

# For the tests that import torch before mdsd: see mdsd/__init__.py.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def pytest_configure(config: pytest.Config) -> None:
    # nbval reads this path relative to the working directory; an absolute one works from anywhere.
    if config.getoption("nbval", default=False) and not config.getoption("nbval_sanitize_with"):
        config.option.nbval_sanitize_with = str(
            Path(__file__).parent / "tests" / "nbval_sanitize.cfg"
        )
