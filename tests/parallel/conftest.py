from __future__ import annotations

from collections.abc import Iterator

import pytest

from gloo_processes import Group

GROUP = pytest.StashKey[Group]()


def pytest_collection_finish(session: pytest.Session) -> None:
    """The processes load torch while tests of other folders run."""
    wanted = any("gloo" in getattr(item, "fixturenames", ()) for item in session.items)
    if wanted and not session.config.option.collectonly:
        session.config.stash[GROUP] = Group(4)


@pytest.fixture(scope="session")
def gloo(pytestconfig: pytest.Config) -> Iterator[Group]:
    """Four processes of one gloo group."""
    group = pytestconfig.stash[GROUP]
    yield group
    group.close()
