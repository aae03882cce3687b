"""Who listens is told of each call, on the same thread, as long as it listens."""

from __future__ import annotations

import threading

import pytest
import torch

import regard as rg
from regard.witness import Witnessed, listening


def layer() -> rg.nn.MultiHeadAttention:
    return rg.nn.MultiHeadAttention(12, heads=3, sink=0.5, rotary=rg.nn.Rotary(4))


def test_what_is_told_gives_the_weights_again() -> None:
    told, own, x = list[Witnessed](), layer(), torch.randn(2, 7, 12)
    with listening(told.append):
        own(x, mask=rg.Causal())
    (call,) = told
    assert call.layer is own
    weights = rg.attention_weights(
        call.q, call.k, score=call.score, mask=call.mask, positions=call.positions, sink=call.sink
    )
    torch.testing.assert_close(weights, own.weights(x, mask=rg.Causal()))


def test_nobody_is_told_after_the_end_or_on_another_thread() -> None:
    told, own, x = list[Witnessed](), layer(), torch.randn(2, 7, 12)
    with listening(told.append):
        other = threading.Thread(target=own, args=(x,))
        other.start()
        other.join()
    own(x)
    assert not told


def test_the_end_comes_after_an_error_too() -> None:
    told = list[Witnessed]()
    with pytest.raises(ZeroDivisionError), listening(told.append):
        raise ZeroDivisionError
    layer()(torch.randn(2, 7, 12))
    assert not told


def test_two_listen_and_one_stops() -> None:
    outer, inner, own, x = list[Witnessed](), list[Witnessed](), layer(), torch.randn(2, 7, 12)
    with listening(outer.append):
        with listening(inner.append):
            own(x)
        own(x)
    assert (len(outer), len(inner)) == (2, 1)
