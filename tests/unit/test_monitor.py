"""monitor: numbers of each layer and head, at the steps that are looked at, and at no others."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import regard as rg
from recorded_models import Block, Plain


def model() -> nn.Sequential:
    return nn.Sequential(Block(Plain(is_causal=True)), Block(rg.nn.MultiHeadAttention(12, heads=2)))


def definitions(p: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """The largest score and the mean entropy of each head."""
    return s.movedim(1, 0).flatten(1).amax(-1), -torch.special.xlogy(p, p).sum(-1).mean((0, 2))


def test_scalars_are_what_the_weights_say() -> None:
    made, x = model(), torch.randn(2, 7, 12)
    watch = rg.monitor(made)
    with watch:
        made(x)
    layer = made[1].attention
    q, k, _ = layer.project(made[1].norm(made[0](x)))
    peak, entropy = definitions(rg.attention_weights(q, k).detach(), (q @ k.mT / 6**0.5).detach())
    seen = {name: value for name, value in watch.scalars().items() if "/1.attention/" in name}
    assert seen == {
        "attention/1.attention/max_score": pytest.approx(float(peak.max()), rel=1e-5),
        "attention/1.attention/entropy": pytest.approx(float(entropy.mean()), rel=1e-5),
        "attention/1.attention/head0/max_score": pytest.approx(float(peak[0]), rel=1e-5),
        "attention/1.attention/head0/entropy": pytest.approx(float(entropy[0]), rel=1e-5),
        "attention/1.attention/head1/max_score": pytest.approx(float(peak[1]), rel=1e-5),
        "attention/1.attention/head1/entropy": pytest.approx(float(entropy[1]), rel=1e-5),
    }
    assert len(watch.scalars()) == 6 + 8


def test_calls_of_one_layer_count_as_one() -> None:
    made, x = Plain(), torch.randn(4, 7, 12)
    whole, halves = rg.monitor(made), rg.monitor(made)
    with whole:
        made(x)
    with halves:
        made(x[:1])
        made(x[1:])
    assert halves.scalars() == pytest.approx(whole.scalars(), rel=1e-5)


def test_queries_that_see_nothing_count_for_nothing() -> None:
    mask = torch.ones(7, 7, dtype=torch.bool)
    mask[4:] = False
    made, x = Plain(attn_mask=mask), torch.randn(2, 7, 12)
    watch = rg.monitor(made)
    with watch:
        made(x)
    q, k, _ = made.project(x)
    peak, entropy = definitions(*((t[:, :, :4]).detach() for t in (rg.attention_weights(q, k), q @ k.mT / 2)))
    assert watch.scalars()["attention/Plain/max_score"] == pytest.approx(float(peak.max()), rel=1e-5)
    assert watch.scalars()["attention/Plain/entropy"] == pytest.approx(float(entropy.mean()), rel=1e-5)


@pytest.mark.parametrize("rows", [0, 7])
def test_a_layer_in_which_no_query_sees_a_key(rows: int) -> None:
    made = Plain(attn_mask=torch.zeros(rows, rows, dtype=torch.bool))
    watch = rg.monitor(made)
    with watch:
        made(torch.randn(2, rows, 12))
    assert watch.scalars()["attention/Plain/max_score"] == -math.inf
    assert math.isnan(watch.scalars()["attention/Plain/entropy"])


def test_each_so_many_steps_the_first_included() -> None:
    made = model()
    watch = rg.monitor(made, every=3, layers="1.*")
    looked = list[int]()
    for step in range(8):
        with watch:
            made(torch.randn(1, 5, 12))
        looked += [step] if watch.scalars() else []
        assert all(name.startswith("attention/1.attention/") for name in watch.scalars())
    assert looked == [0, 3, 6]


def test_training_is_that_without_a_monitor() -> None:
    trained = list[list[Tensor]]()
    for watched in (False, True):
        torch.manual_seed(3)
        made = nn.Sequential(model(), nn.Dropout(0.2))
        watch, optimizer = rg.monitor(made, every=2), torch.optim.SGD(made.parameters(), 0.1)
        for _ in range(4):
            optimizer.zero_grad()
            if watched:
                with watch:
                    loss = made(torch.randn(2, 5, 12)).square().mean()
                    loss.backward()
            else:
                made(torch.randn(2, 5, 12)).square().mean().backward()
            optimizer.step()
        trained.append([*made.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*trained, strict=True))


def test_an_error_in_a_step_leaves_no_scalars_and_a_monitor_that_goes_on() -> None:
    made = model()
    watch = rg.monitor(made, every=1)
    with watch:
        made(torch.randn(1, 5, 12))
    with pytest.raises(TypeError), watch:
        made(torch.randn(1, 5, 12), "one argument too many")
    assert watch.scalars() == {}
    with watch:
        made(torch.randn(1, 5, 12))
    assert watch.scalars()


def test_a_step_in_which_nothing_is_seen_is_an_error() -> None:
    with pytest.raises(LookupError, match="no module of Plain ran"), rg.monitor(Plain()):
        pass


def test_wrong_uses_are_refused() -> None:
    with pytest.raises(ValueError, match=r"every=0: expected 1 \(each step\) or more"):
        rg.monitor(model(), every=0)
    with pytest.raises(TypeError, match=r"every is 1\.5; expected an integer"):
        rg.monitor(model(), every=1.5)  # type: ignore[arg-type]
    watch = rg.monitor(model(), every=2)
    watch.steps = 1
    with watch, pytest.raises(RuntimeError, match="is open already"), watch:
        pass
    watch = rg.monitor(model(), layers="*.nothing")
    with pytest.raises(ValueError, match="fits no module"), watch:
        pass
    with pytest.raises(ValueError, match="fits no module"), watch:  # the first try has not left it open
        pass
