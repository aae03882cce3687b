from __future__ import annotations

from collections.abc import Iterator

import pytest

from gloo_processes import Group


@pytest.fixture(scope="session")
def gloo() -> Iterator[Group]:
    """Four processes of one gloo group."""
    group = Group(4)
    yield group
    group.close()
