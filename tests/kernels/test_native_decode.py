"""The native kernel of few queries (decoding) against the dense definition, on every instruction set."""

from __future__ import annotations

import pytest
import torch

import regard as rg
from kernel_checks import compare
from needed import needs_kernels
from regard import testing

pytestmark = needs_kernels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33, 64, 65])
def test_rows_of_a_group_at_every_edge(isa: str, rows: int, dtype: torch.dtype) -> None:
    for group in (n for n in (1, 2, 3, 8) if rows % n == 0):
        at = testing.frame(nq=rows // group, nk=193, batch=(2,), heads=2 * group)
        bias = torch.randn(at.heads, at.nq, at.nk, dtype=torch.float64)
        score = rg.ScaledDot() >> rg.Alibi(torch.linspace(0.1, 0.5, at.heads, dtype=torch.float64)) >> rg.Bias(bias)
        compare(testing.draw(at, key_heads=2, dk=24, dv=40, mask=rg.Causal()), dtype)
        compare(testing.draw(at, key_heads=2, dk=19, dv=35, score=score, mask=testing.masks(at)["Dense"]), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("nq", "group"), [(1, 16), (4, 4), (3, 6), (5, 8), (8, 2), (1, 31), (8, 8), (2, 33), (1, 70)])
def test_many_rows_of_a_group(isa: str, nq: int, group: int, dtype: torch.dtype) -> None:
    """Folded into rows of one head: with intervals, and with what heads of a group may differ in, which is not."""
    at = testing.frame(nq=nq, nk=193, batch=(2, 2), heads=2 * group)
    lengths = rg.Lengths(keys=torch.tensor([[193, 5], [0, 64]]))
    for mask in (rg.Everything(), rg.Causal() & lengths, testing.masks(at)["Dense"]):
        compare(testing.draw(at, key_heads=2, dk=24, dv=41, mask=mask), dtype)
    compare(testing.draw(at, key_heads=2, dk=24, dv=41, score=rg.ScaledDot() >> rg.SoftCap(3.0), sink=True), dtype)
    compare(testing.draw(at, key_heads=2, dk=24, dv=41, score=rg.ScaledDot() >> rg.SoftCap(3.0)), dtype)


@pytest.mark.parametrize("dk", [32, 64, 96, 128])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8])
def test_features_that_fill_whole_vectors_of_pairs(isa: str, rows: int, dk: int) -> None:
    """Of bfloat16, which some processors multiply in pairs: the scale and the caps of the heads come after."""
    at = testing.frame(nq=1, nk=193, batch=(2,), heads=2 * rows)
    caps = torch.linspace(3.0, 9.0, at.heads, dtype=torch.float64)
    for score, mask in ((rg.ScaledDot(), rg.Everything()), (rg.ScaledDot() >> rg.SoftCap(caps), rg.Causal())):
        compare(testing.draw(at, key_heads=2, dk=dk, dv=40, score=score, mask=mask), torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_group_lie_as_they_like(isa: str, dtype: torch.dtype) -> None:
    """Heads beside rows, as models have them, or features that are no neighbours: the same bits."""
    q, k, v = (torch.randn(4, n, h, 24).to(dtype).transpose(1, 2) for n, h in ((5, 8), (300, 2), (300, 2)))
    lying = [(q, k, v), (q.contiguous(), k.contiguous(), v.contiguous())]
    if dtype == torch.float32:  # bfloat16 whose features are no neighbours is not multiplied in pairs
        lying.append((q.mT.contiguous().mT, k.mT.contiguous().mT, v.mT.contiguous().mT))
    given = {"mask": rg.Causal(), "positions": rg.tail(5, 300), "backend": rg.Native()}
    found = [rg.attention_state(*some, **given).finish() for some in lying]
    for out, lse in found[1:]:
        assert torch.equal(out, found[0][0]) and torch.equal(lse, found[0][1])


@pytest.mark.parametrize("nq", [9, 17, 60, 130])
def test_keys_that_are_fetched_ahead(isa: str, nq: int) -> None:
    """More than 512 KB of long rows, met by one block and by several, to an end within a tile."""
    at = testing.frame(nq=nq, nk=2061, batch=(1,), heads=2)
    for mask in (rg.Everything(), rg.Window(before=300, after=0)):
        compare(testing.draw(at, key_heads=2, dk=80, dv=67, mask=mask))


@pytest.mark.parametrize("nk", [1, 7, 8, 9, 63, 64, 65, 127, 128, 129, 255, 256, 257, 513, 2048, 2049])
def test_chunks_and_parts_of_keys_at_every_edge(isa: str, nk: int) -> None:
    at = testing.frame(nq=3, nk=nk, batch=(1,), heads=6)
    window = rg.Window(before=70, after=0)
    for mask in (rg.Everything(), rg.Lengths(keys=torch.tensor([max(nk - 3, 0)]))):
        compare(testing.draw(at, key_heads=2, dk=9, dv=11, mask=mask, dropout=rg.Dropout(0.3, seed=5)))
    compare(testing.draw(at, key_heads=2, dk=9, dv=11, mask=window))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [*range(1, 36), 63, 64, 65, 80, 127, 128, 129, 130])
def test_widths_of_few_rows(isa: str, width: int, dtype: torch.dtype) -> None:
    for nq in (1, 2):
        at = testing.frame(nq=nq, nk=70, batch=(1,), heads=3)
        compare(testing.draw(at, key_heads=1, dk=width, dv=131 - width), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_hidden_keys_of_few_rows_never_leak(isa: str, dtype: torch.dtype, bad: float) -> None:
    """Booleans, rows that see different keys, features beyond the last whole vector."""
    q, k, v = (torch.randn(1, h, n, 19).to(dtype) for h, n in ((5, 1), (1, 150), (1, 150)))
    allowed = torch.rand(1, 5, 1, 150) > 0.3
    allowed[..., 70], allowed[:, 2, :, 70] = False, True
    clean = rg.attention(q, k, v, mask=rg.Dense(allowed), backend=rg.Native())
    v[..., 70, 3], v[..., 70, 17] = bad, bad
    out = rg.attention(q, k, v, mask=rg.Dense(allowed), backend=rg.Native())
    assert torch.equal(out[:, [0, 1, 3, 4]], clean[:, [0, 1, 3, 4]])
    assert not out[:, 2, :, [3, 17]].isfinite().any()
    rest = [n for n in range(19) if n not in (3, 17)]
    assert torch.equal(out[:, 2, :, rest], clean[:, 2, :, rest])
