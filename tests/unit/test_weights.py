"""attention_weights: gradients as exact as those of torch's softmax, and no work where an answer does not fit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import regard as rg
from regard import testing
from regard.call.problem import Problem


def gradients(weights: Tensor, given: tuple[Tensor, ...], g: Tensor) -> list[Tensor]:
    return [found.double() for found in torch.autograd.grad(weights, given, g.to(weights.dtype))]


@pytest.mark.parametrize("mean", [0.0, 1.0, 30.0])
@pytest.mark.parametrize("rows", [None, [3, 4, 5, 0, -1, 4]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_under_a_cotangent_that_has_a_mean(dtype: torch.dtype, rows: list[int] | None, mean: float) -> None:
    """A row's weights sum to 1, so the mean of its cotangent changes no gradient; sums must not lose it in half."""
    q, k = torch.randn(2, 4, 37, 16).to(dtype), torch.randn(2, 4, 53, 16).to(dtype)
    chosen = list(range(37)) if rows is None else rows
    g = (torch.randn(2, 4, len(chosen), 53) + mean).to(dtype)

    def evaluated(as_dtype: torch.dtype, sums: torch.dtype) -> list[Tensor]:
        """By torch's softmax: inputs of one dtype, everything between them and the weights in another."""
        own = tuple(t.to(as_dtype).requires_grad_() for t in (q, k))
        wide = [t.to(sums) for t in own]
        return gradients(torch.softmax(wide[0][..., chosen, :] @ wide[1].mT / 4, -1).to(as_dtype), own, g)

    ours = tuple(t.clone().requires_grad_() for t in (q, k))
    found = gradients(rg.attention_weights(*ours, rows=rows), ours, g)
    exact, plain = evaluated(torch.float64, torch.float64), evaluated(dtype, torch.float32)
    for got, want, theirs in zip(found, exact, plain, strict=True):
        assert testing.error(got, want) <= testing.tolerance(want, theirs.to(dtype))


@pytest.mark.full
def test_every_score_mask_and_sink_against_the_definition() -> None:
    at = testing.frame((2,), 3, 11, 13)
    for name, score in testing.scores(at).items():
        for masked, mask in list(testing.masks(at).items())[::3]:
            call = testing.draw(at, score=score, mask=mask, sink=True).leaves(torch.float64)
            given = {"score": call.score, "mask": call.mask, "positions": call.positions, "sink": call.sink}
            tensors = [t for key, t in call.differentiable.items() if key != "v"]
            g = torch.randn(2, 3, 11, 13, dtype=torch.float64)
            found = torch.autograd.grad(rg.attention_weights(call.q, call.k, **given), tensors, g, allow_unused=True)
            # attention to the unit vectors is the weights
            unit = torch.eye(13, dtype=torch.float64).expand(2, call.k.shape[-3], 13, 13)
            out = rg.attention(call.q, call.k, unit, **given, backend=rg.Reference())
            torch.testing.assert_close(rg.attention_weights(call.q, call.k, **given), out)
            for got, want in zip(found, torch.autograd.grad(out, tensors, g, allow_unused=True), strict=True):
                assert (got is None) == (want is None), (name, masked)
                if got is not None:
                    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11, msg=f"{name} under {masked}")


@pytest.mark.parametrize("function", [rg.attention_weights, rg.attention_scores])
def test_an_answer_that_does_not_fit_is_found_out_before_any_work(
    function: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    q = torch.zeros(1, 1, 1 << 24, 1)

    def worked(*_: object, **__: object) -> None:
        raise AssertionError("scores were computed")

    monkeypatch.setattr(Problem, "tile", worked)
    with pytest.raises(RuntimeError, match="allocate memory"):  # 2^48 numbers: a petabyte
        function(q, q)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_cotangent_that_is_not_finite_where_hidden_reaches_no_gradient(wrong: float) -> None:
    q, k = torch.randn(2, 3, 7, 5, requires_grad=True), torch.randn(2, 3, 11, 5, requires_grad=True)
    visible = torch.rand(7, 11) < 0.6
    g = torch.randn(2, 3, 7, 11)
    found = [
        gradients(rg.attention_weights(q, k, mask=rg.Dense(visible)), (q, k), g.masked_fill(~visible, hidden))
        for hidden in (wrong, 0.0)
    ]
    for got, want in zip(*found, strict=True):
        assert torch.equal(got, want)
