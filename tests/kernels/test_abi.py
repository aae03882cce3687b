"""The structs of the kernels: one table, a header that is written from it, and no object that reads other ones."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import regard as rg
import regard.backends.native.abi as abi
import regard.backends.native.ffi as ffi
from needed import needs_kernels
from regard.backends.native.call_operands import NUMBERS, OPERANDS
from regard.backends.native.header import headers

NATIVE = Path(__file__).resolve().parents[2] / "native"


@pytest.mark.parametrize("name", headers())
def test_a_header_is_what_the_tables_say(name: str) -> None:
    written = (NATIVE / "abi" / name).read_text(encoding="utf-8")
    again = "python -m regard.backends.native.header native/abi"
    assert written == headers()[name], f"the tables changed; write the headers again: {again}"


def test_every_operand_and_number_is_a_member() -> None:
    members = {member.name for member in abi.CallArguments.members}
    assert OPERANDS.keys() | NUMBERS.keys() <= members


def test_a_new_operand_is_refused_where_sequences_have_any_lengths() -> None:
    """Until its declaration says that they can share it: C++ and Python ask the same declaration."""
    written, parted = headers()["structs.h"].split("regard_not_ragged", 1)[1].split("regard_parted", 1)
    for name, operand in OPERANDS.items():
        assert (re.search(rf"c->{name}\b", written) is None) == operand.ragged
        assert (re.search(rf"c->{name}\b", parted) is not None) == operand.parted


def test_the_number_follows_names_types_and_order(monkeypatch: pytest.MonkeyPatch) -> None:
    members = abi.AdditiveArguments.members
    for changed in (members[::-1], members[:-1], (*members[:-1], abi.Member("int32_t", "slope"))):
        monkeypatch.setattr(abi.AdditiveArguments, "members", changed)
        assert abi._abi() != abi.ABI
    other = abi.Member(members[-1].type, members[-1].name, "said in other words")
    monkeypatch.setattr(abi.AdditiveArguments, "members", (*members[:-1], other))
    assert abi._abi() == abi.ABI


@needs_kernels
def test_every_object_answers_with_its_number() -> None:
    for path in ffi.built().values():
        handle = ctypes.CDLL(str(path))
        handle.regard_abi.restype = ctypes.c_uint64
        assert handle.regard_abi() == abi.ABI


@pytest.fixture
def another_version(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Objects that were built from another table."""

    def forget() -> None:
        ffi.stale.cache_clear()
        ffi._runnable.cache_clear()

    monkeypatch.setattr(abi, "ABI", abi.ABI + 1)
    forget()
    yield
    monkeypatch.undo()
    forget()


@needs_kernels
@pytest.mark.usefixtures("another_version")
def test_objects_of_another_version_are_not_called() -> None:
    x = torch.randn(1, 2, 9, 8)
    plan = str(rg.explain(x, x, x))
    assert "not Native()" in plan and "belong to another version of regard" in plan
    with pytest.raises(rg.Unsupported, match="install it again"):
        rg.attention(x, x, x, backend=rg.Native())
    assert rg.attention(x, x, x, mask=rg.Window(3, 0)).isfinite().all()
