"""Fixtures for every test."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def root() -> Path:
    """Return the repository's folder."""
    return ROOT


@pytest.fixture(scope="session")
def real_stories() -> Path:
    """Return a file of genuine TinyStories beside the repository; skip where there is none."""
    path = ROOT.parent / "shared" / "tinystories" / "stories.txt"
    if not path.is_file():
        pytest.skip(f"needs genuine stories in {path}")
    return path
