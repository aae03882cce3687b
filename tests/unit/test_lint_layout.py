"""lint: q, k and v whose axes are more likely (batch, n, heads, d) than (batch, heads, n, d)."""

from __future__ import annotations

import pytest
import torch

import regard as rg
from test_lint import B, D, only, qkv


@pytest.mark.parametrize(
    ("tokens", "heads"),
    [(64, 4), (128, 8), (33, 8), (17, 12), (13, 8), (512, 16)],  # of what was meant; read the other way round
)
def test_heads_and_tokens_turned_round(tokens: int, heads: int) -> None:
    q, k, v = torch.randn(3, B, tokens, heads, D).unbind(0)
    found = only(rg.lint(q, k, v), "heads and tokens turned round")
    assert found.number == tokens and f"they would be {tokens} tokens and {heads} heads" in found.said
    assert not rg.lint(*(t.transpose(1, 2) for t in (q, k, v)), mask=rg.Causal())
    assert only(rg.lint(q, k, v, mask=rg.Causal()), "heads and tokens turned round")
    several = rg.lint(q, k[:, :, ::2], v[:, :, ::2])  # grouped heads
    assert only(several, "heads and tokens turned round").number == tokens


def test_many_heads_of_few_tokens_may_be_right() -> None:
    q, k, v = qkv(heads=64, n=4)
    assert rg.lint(q, k, v).names == ("heads and tokens turned round",)
    assert not rg.lint(q, k, v, positions=rg.head(4, 4))  # somebody has said so
    assert not rg.lint(q, k, torch.randn(B, 4, 64, D).transpose(1, 2))  # a projection, transposed
    assert not rg.lint(q, k, v, sink=torch.zeros(64))  # a number a head
    assert not rg.lint(q, k, v, score=rg.ScaledDot() >> rg.Alibi(rg.Alibi.geometric(64)))
    assert not rg.lint(q, k, v, mask=rg.Dense(torch.ones(4, 4) > 0))
    assert not rg.lint(*qkv(heads=12, n=5))  # a short text
    assert not rg.lint(q[:, :, :1], k, v)  # decoding
    assert not rg.lint(*(t[0] for t in (q, k, v)))  # (batch, n, d)
