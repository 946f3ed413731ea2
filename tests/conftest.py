"""What all tests share: the checkout and the markers.

Promise: tests run against the checkout this file lies in, whatever the working directory is.
"""

from pathlib import Path

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "boot: builds or boots the virtual board; minutes at first")
    config.addinivalue_line("markers", "long: does not fit into the budget; ./inv test --all")


@pytest.fixture(scope="session")
def repo() -> Path:
    """The root of the checkout."""
    return Path(__file__).resolve().parents[1]
