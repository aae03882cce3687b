"""AttentionPooling and GatedAttentionPooling against the formulas of Ilse et al. 2018."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import Tensor

import regard as rg

exact = partial(torch.testing.assert_close, rtol=0, atol=1e-12)
KINDS = (rg.nn.AttentionPooling, rg.nn.GatedAttentionPooling)
DOUBLE = {"dtype": torch.float64}


def formula(pool: rg.nn.AttentionPooling, h: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Equations 7 to 9 for one bag h (n, d) and one w: z (d,) and a (n,)."""
    logits = []
    for instance in h:
        hidden = torch.tanh(pool.v_proj.weight @ instance + (0 if pool.v_proj.bias is None else pool.v_proj.bias))
        if isinstance(pool, rg.nn.GatedAttentionPooling):
            gate = pool.u_proj.weight @ instance + (0 if pool.u_proj.bias is None else pool.u_proj.bias)
            hidden = hidden * (1 / (1 + torch.exp(-gate)))
        logits.append(w @ hidden)
    a = torch.stack(logits).exp()
    a = a / a.sum()
    return sum((x * y for x, y in zip(a, h, strict=True)), torch.zeros_like(h[0])), a


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("n", [1, 7])
def test_a_bag_is_pooled_as_in_the_paper(kind: type[rg.nn.AttentionPooling], bias: bool, n: int) -> None:
    pool, h = kind(5, 3, bias=bias, **DOUBLE), torch.randn(n, 5, **DOUBLE, requires_grad=True)
    assert {child.bias is not None for child in pool.children()} == {bias}
    z, a = formula(pool, h, pool.query)
    exact(pool(h), z)
    exact(pool.weights(h), a)
    g, inputs = torch.randn(5, **DOUBLE), [h, *pool.parameters()]
    for found, true in zip(torch.autograd.grad(pool(h), inputs, g), torch.autograd.grad(z, inputs, g), strict=True):
        exact(found, true)


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_learns(kind: type[rg.nn.AttentionPooling]) -> None:
    pool = kind(5, 3)
    pool(torch.randn(2, 7, 5)).square().sum().backward()
    assert {n for n, p in pool.named_parameters() if p.grad is None or not bool(p.grad.abs().max() > 0)} == set()


@pytest.mark.parametrize("kind", KINDS)
def test_several_queries_share_the_features(kind: type[rg.nn.AttentionPooling]) -> None:
    pool, h = kind(5, 3, heads=4, **DOUBLE), torch.randn(2, 7, 5, **DOUBLE)
    assert pool(h).shape == (2, 4, 5) and pool.weights(h).shape == (2, 4, 7)
    for b in range(2):
        for i in range(4):
            z, a = formula(pool, h[b], pool.query[i])
            exact(pool(h)[b, i], z)
            exact(pool.weights(h)[b, i], a)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", [None, 3])
def test_batch_axes_and_none(kind: type[rg.nn.AttentionPooling], heads: int | None) -> None:
    pool, h = kind(5, 3, heads=heads, **DOUBLE), torch.randn(2, 3, 7, 5, **DOUBLE)
    for a in range(2):
        for b in range(3):
            exact(pool(h)[a, b], pool(h[a, b]))
            exact(pool.weights(h)[a, b], pool.weights(h[a, b]))


@pytest.mark.parametrize("kind", KINDS)
def test_padded_instances_count_for_nothing(kind: type[rg.nn.AttentionPooling]) -> None:
    pool, h, lengths = kind(5, 3, **DOUBLE), torch.randn(4, 7, 5, **DOUBLE), torch.tensor([7, 3, 1, 0])
    for b, n in enumerate(lengths.tolist()):
        h[b, n:] = torch.nan
    z, a = pool(h, mask=rg.Lengths(lengths)), pool.weights(h, mask=rg.Lengths(lengths))
    for b, n in enumerate(lengths.tolist()):
        exact(z[b], pool(h[b, :n]))
        exact(a[b, :n], pool.weights(h[b, :n]))
        assert bool((a[b, n:] == 0).all())
    assert bool((z[3] == 0).all()), "an empty bag gives 0"


@pytest.mark.parametrize("kind", KINDS)
def test_order_does_not_matter(kind: type[rg.nn.AttentionPooling]) -> None:
    pool, h, order = kind(5, 3, **DOUBLE), torch.randn(11, 5, **DOUBLE), torch.randperm(11)
    exact(pool(h[order]), pool(h))
    exact(pool.weights(h[order]), pool.weights(h)[order])
    exact(pool.weights(h).sum(), torch.ones((), **DOUBLE))


@pytest.mark.parametrize("kind", KINDS)
def test_a_bag_of_100_003(kind: type[rg.nn.AttentionPooling]) -> None:
    pool, h = kind(5, 3, **DOUBLE), torch.randn(100_003, 5, **DOUBLE)
    a = torch.softmax(pool.features(h) @ pool.query, 0)
    exact(pool(h), a @ h)
    exact(pool.weights(h), a)


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_and_copies(kind: type[rg.nn.AttentionPooling]) -> None:
    pool, h = kind(5, 3), torch.randn(7, 5)
    twin = kind(5, 3)
    twin.load_state_dict(pool.state_dict())
    assert torch.equal(twin(h), pool(h)) and torch.equal(copy.deepcopy(pool)(h), pool(h))
    assert pool.bfloat16()(h.bfloat16()).dtype == torch.bfloat16
    assert kind(5, 3, device="meta").query.is_meta


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_input_gets_its_sentence(kind: type[rg.nn.AttentionPooling]) -> None:
    pool = kind(5, 3)
    with pytest.raises(rg.ShapeError, match=r"h has shape \(7, 4\); expected bags \(\*batch, n, 5\)"):
        pool(torch.zeros(7, 4))
    with pytest.raises(rg.ShapeError, match=r"h has shape \(5,\)"):
        pool.weights(torch.zeros(5))
    for call in (pool, pool.weights):
        with pytest.raises(ValueError, match=r"mask Causal\(\) compares positions; a pooling query has none"):
            call(torch.zeros(7, 5), mask=rg.Causal())
