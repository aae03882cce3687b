"""Who listens is told of each call, on the same thread, as long as it listens."""

from __future__ import annotations

import threading

import pytest
import torch

import regard as rg
from regard.call.hooks import AttentionCall, observing


def layer() -> rg.nn.MultiHeadAttention:
    return rg.nn.MultiHeadAttention(12, heads=3, sink=0.5, rotary=rg.nn.Rotary(4))


def test_what_is_told_gives_the_weights_again() -> None:
    told, own, x = list[AttentionCall](), layer(), torch.randn(2, 7, 12)
    with observing(told.append):
        own(x, mask=rg.Causal())
    (call,) = told
    assert call.layer is own
    weights = rg.attention_weights(
        call.q, call.k, score=call.score, mask=call.mask, positions=call.positions, sink=call.sink
    )
    torch.testing.assert_close(weights, own.weights(x, mask=rg.Causal()))


def test_nobody_is_told_after_the_end_or_on_another_thread() -> None:
    told, own, x = list[AttentionCall](), layer(), torch.randn(2, 7, 12)
    with observing(told.append):
        other = threading.Thread(target=own, args=(x,))
        other.start()
        other.join()
    own(x)
    assert not told


def test_the_end_comes_after_an_error_too() -> None:
    told = list[AttentionCall]()
    with pytest.raises(ZeroDivisionError), observing(told.append):
        raise ZeroDivisionError
    layer()(torch.randn(2, 7, 12))
    assert not told


def test_two_listen_and_one_stops() -> None:
    outer, inner, own, x = list[AttentionCall](), list[AttentionCall](), layer(), torch.randn(2, 7, 12)
    with observing(outer.append):
        with observing(inner.append):
            own(x)
        own(x)
    assert (len(outer), len(inner)) == (2, 1)
