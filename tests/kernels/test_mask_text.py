"""Masks that are no intervals, in graphs: a text and tensors, read again as the mask that they were."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

import regard as rg
from needed import needs_kernels
from regard import testing
from regard.backends.native.args import lower
from regard.backends.native.lower_mask import MASK_TENSORS, lower_mask
from regard.backends.native.mask_text import MOST, read_mask, why_not_text, write_mask
from regard.backends.native.torch_ops import traced
from regard.core.errors import ShapeError

FRAMES = {"headed": testing.frame(nq=29, nk=37), "without heads": testing.frame(nq=29, nk=37, heads=1, headed=False)}
WRITTEN = [name for name, mask in testing.masks(FRAMES["headed"]).items() if "Where" not in repr(mask)]


@dataclass(frozen=True)
class Stride(rg.Mask):
    """A mask of a user's."""

    n: int

    def visible(self, at: object) -> Tensor:
        assert isinstance(at, rg.core.region.Region)
        return at.j % self.n == 0


@pytest.mark.parametrize("frame", FRAMES)
@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_read_is_what_was_written(name: str, frame: str) -> None:
    at = FRAMES[frame]
    mask = testing.masks(at)[name]
    assert why_not_text(mask) is None
    text, tensors = write_mask(mask, at)
    back = read_mask(text, tensors)
    assert back.visible(replace(at, headed=True).region()).equal(mask.visible(at.region()))
    assert frame != "headed" or back == mask


def test_an_example() -> None:
    mask = rg.Causal() & (rg.Window(None, 3) | ~rg.Dense(torch.ones(5, 7, dtype=torch.bool)))
    text, tensors = write_mask(mask, testing.frame(nq=5, nk=7))
    assert text == '["And",["Causal"],["Or",["Window",null,3],["Not",["Dense",[0]]]]]' and len(tensors) == 1


def test_what_has_no_text() -> None:
    assert why_not_text(rg.Where(lambda b, h, i, j: i > j) | rg.Causal()) == "Where is a function of Python"
    assert why_not_text(~Stride(3)) == "Stride is a function of Python"
    many = rg.Prefix(torch.tensor([1]))
    for n in range(MOST):
        many = many | rg.Lengths(keys=torch.tensor([n]))
    assert why_not_text(many) == f"it holds more than {MOST} tensors"


@needs_kernels
def test_explain_says_which_masks_a_graph_writes_out() -> None:
    x, seen = torch.randn(1, 2, 1000, 8), torch.rand(1000) < 0.5
    where = rg.Where(lambda b, h, i, j: seen[j])
    told = dict(rg.explain(x, x, x, mask=where & rg.Causal()).facts)["in graphs"]
    assert told.startswith("the mask is written out, 1.0 MB")
    assert told.endswith("it reads a tensor that none of its fields holds")
    assert all("in graphs" not in dict(rg.explain(x, x, x, mask=mask).facts) for mask in (rg.Dilated(3), rg.Causal()))


@needs_kernels
@pytest.mark.parametrize("name", WRITTEN)
def test_the_operator_reads_it(name: str) -> None:
    """Values and gradients of the node, of each mask as a text, compared with the definition in float64."""
    case = testing.draw(FRAMES["headed"], mask=testing.masks(FRAMES["headed"])[name])
    problem = case.problem
    text, tensors = write_mask(case.mask, problem.frame)
    positions = problem.frame.positions
    mask = {"mask_text": text, **dict(zip(MASK_TENSORS, (positions.q, positions.k, *tensors), strict=False))}
    found, expected = [], []
    for kept, dtype in ((found, torch.float32), (expected, torch.float64)):
        q, k, v = (t.detach().to(dtype).requires_grad_() for t in (problem.q, problem.k, problem.v))
        if kept is found:
            out, _ = traced(lower(replace(problem, q=q, k=k, v=v), mask))
        else:
            out = rg.attention(q, k, v, mask=case.mask, positions=positions, backend=rg.Reference())
        seed = torch.linspace(-1, 1, out.numel(), dtype=dtype).view_as(out)
        kept += [t.float() for t in (out, *torch.autograd.grad(out, (q, k, v), seed))]
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


@needs_kernels
def test_a_mask_of_another_length_is_refused() -> None:
    """A graph recorded by make_fx may hold one."""
    case = testing.draw(FRAMES["headed"], mask=rg.Dense(torch.rand(29, 37) < 0.5) | rg.Dilated(3))
    lowered = lower(case.problem, lower_mask(case.problem, None))
    assert lowered.mask_text
    with pytest.raises(ShapeError, match=r"Dense\.allowed has shape"):
        traced(lowered.with_operands(mask_2=lowered.operands["mask_2"][:, :-1]))
    with pytest.raises(ShapeError, match=r"positions\.q has shape"):
        traced(lowered.with_operands(mask_0=lowered.operands["mask_0"][:-1]))
