"""Native(invariant=True): the bits of a row, alone, in chunks and among all, under every score that it takes."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from operator import rshift

import pytest
import torch
from torch import Tensor

import regard as rg
from needed import needs_kernels
from regard import testing

pytestmark = needs_kernels

AT = testing.frame(nq=141, nk=157, batch=(3,), heads=4)
WIDTH = 19  # no multiple of a vector
INVARIANT = rg.Native(invariant=True)
REFUSED = {
    "Additive": "depends on how far the queries beside it reach",
    "Bilinear": "the product of q and M is torch's, whose rounding depends on how many queries there are",
    "Custom": "its scores begin with a dot product",
    "Distance": "distances are measured from the middle of all keys, hidden ones too",
    "Elementwise": "have no rows that depend on no other",
}
SCORES = {
    **testing.scores(AT, WIDTH),
    "ScaledDot of a tensor ()": rg.ScaledDot(torch.tensor(0.3)),
    "Cosine of a tensor ()": rg.Cosine(torch.tensor(3.0)),
    "two biases": rg.ScaledDot() >> rg.Bias(torch.randn(141, 157)) >> rg.Bias(torch.randn(157)),
}
CHUNKS = [slice(n, n + 1) for n in (0, 16, 77, 140)] + [slice(0, 64), slice(5, 7), slice(64, 117), slice(101, 141)]


def cut(case: testing.Case, rows: slice, nk: int) -> testing.Case:
    """The same call of some of the queries, on the second batch element, with the first nk keys alone."""

    def part(stage: rg.Score) -> rg.Score:
        if isinstance(stage, rg.Bias):
            t = stage.bias[..., :nk]
            t = t[..., rows, :] if t.dim() > 1 else t
            return rg.Bias(t[1:2] if t.dim() > 3 else t)
        if isinstance(stage, rg.Alibi) and stage.coordinates is not None:
            return replace(stage, coordinates=stage.coordinates[:nk], query_coordinates=stage.query_coordinates[rows])
        return stage

    at = rg.Positions(case.positions.q[rows], case.positions.k[:nk])
    q, k, v = case.q[1:2, :, rows], case.k[1:2, :, :nk], case.v[1:2, :, :nk]
    return replace(case, q=q, k=k, v=v, score=reduce(rshift, map(part, case.score.stages)), positions=at)


def run(case: testing.Case) -> tuple[Tensor, Tensor]:
    given = {"score": case.score, "mask": case.mask, "positions": case.positions, "sink": case.sink}
    return rg.attention_state(case.q, case.k, case.v, **given, backend=INVARIANT).finish()


@pytest.mark.parametrize("layout", ["rows", "features first"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", SCORES)
def test_a_row_has_the_same_bits_alone_in_a_chunk_and_among_all(
    isa: str, name: str, dtype: torch.dtype, layout: str
) -> None:
    case = testing.draw(AT, dk=WIDTH, score=SCORES[name], key_heads=2, mask=rg.Causal(), sink=True)
    case = case.leaves(dtype)
    if layout == "features first":
        case = replace(case, q=case.q.mT.contiguous().mT, k=case.k.mT.contiguous().mT)
    with torch.no_grad():
        if name.split()[0] in REFUSED:
            with pytest.raises(rg.Unsupported, match=REFUSED[name.split()[0]]):
                run(case)
            return
        out, lse = run(case)
        for rows in CHUNKS:
            for nk in (157, 16 + rows.stop):  # all keys, and those before the last query: a cache
                part, part_lse = run(cut(case, rows, nk))
                assert torch.equal(part, out[1:2, :, rows]) and torch.equal(part_lse, lse[1:2, :, rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("what", [torch.inf, -torch.inf, torch.nan], ids=str)
@pytest.mark.parametrize("where", ["k", "v"])
def test_what_is_not_finite_reaches_the_rows_that_see_it(isa: str, where: str, what: float, dtype: torch.dtype) -> None:
    """As in the reference; of bfloat16 values the bits of rows beside it may be others."""
    for mask in (rg.Everything(), rg.Causal(), rg.Window(9, 0)):
        q, k, v = (torch.randn(1, 4, n, WIDTH).to(dtype) for n in (141, 157, 157))
        {"k": k, "v": v}[where][0, 1, 33, 3] = what
        at = rg.tail(141, 157)
        out = rg.attention(q, k, v, mask=mask, positions=at, backend=INVARIANT)
        wide = (t.double() for t in (q, k, v))
        exact = rg.attention(*wide, mask=mask, positions=at, backend=rg.Reference())
        rough = rg.attention(q, k, v, mask=mask, positions=at, backend=rg.Reference())
        finite = exact.isfinite()
        assert torch.equal(out.isnan(), exact.isnan()) and torch.equal(out[~finite].isinf(), exact[~finite].isinf())
        off, allowed = testing.error(out[finite], exact[finite]), testing.tolerance(exact[finite], rough[finite])
        assert off <= allowed
        if (where, dtype) == ("v", torch.bfloat16):
            continue
        for rows in CHUNKS:
            own = rg.Positions(at.q[rows], at.k)
            part = rg.attention(q[:, :, rows], k, v, mask=mask, positions=own, backend=INVARIANT)
            assert torch.equal(part.nan_to_num(0.5, 2, -2), out[:, :, rows].nan_to_num(0.5, 2, -2))
