from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from gloo_processes import Group

GROUPS = pytest.StashKey[dict[str, Group]]()


def pytest_collection_finish(session: pytest.Session) -> None:
    """The processes load torch while tests of other folders run."""
    fixtures = {name for item in session.items for name in getattr(item, "fixturenames", ())}
    wanted = () if session.config.option.collectonly else fixtures & {"gloo", "gpus"}
    session.config.stash[GROUPS] = {name: Group(4) for name in wanted}


@pytest.fixture(scope="session")
def gloo(pytestconfig: pytest.Config) -> Iterator[Group]:
    """Four processes of one gloo group."""
    group = pytestconfig.stash[GROUPS]["gloo"]
    yield group
    group.close()


@pytest.fixture(scope="session")
def gpus(pytestconfig: pytest.Config) -> Iterator[Group]:
    """Four more, for those that pretend to have GPUs and cannot go back (pretended_device)."""
    group = pytestconfig.stash[GROUPS]["gpus"]
    yield group
    group.close()


@pytest.fixture(scope="session")
def nccl() -> Iterator[Group]:
    """Four processes whose tensors on the first GPU travel by nccl."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    group = Group(4, "cpu:gloo,cuda:nccl")
    yield group
    group.close()
