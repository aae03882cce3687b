"""rollout: how much of each input token reaches one output token, through all layers."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from regard.call.hooks import AttentionCall
from regard.core.arrays import whole_number
from regard.core.dtypes import accumulator
from regard.core.errors import ShapeError
from regard.core.shapes import count_of, listed
from regard.core.wrong_calls import kind_of
from regard.inspect.facts.inputs import Inputs
from regard.inspect.facts.keys import Received
from regard.inspect.kinds import Kind
from regard.inspect.look_tensors import look
from regard.inspect.tape import Recorded

_EXPECTED = (
    "expected the calls of a recording: with rg.record(model, facts=(rg.facts.Inputs(),)) as tape: model(x), then "
    "rg.rollout(tape)."
)


def rollout(calls: Iterable[AttentionCall | Recorded], row: int = -1, residual: float = 0.5) -> Tensor:
    """Attention rollout of one token: the share of each input token in output token `row`, (*batch, n).

    With P_l the weights of layer l, their mean over the heads, and A_l = residual · I + (1 - residual) · P_l, it is row
    `row` of A_L ··· A_2 A_1. Only that row is multiplied through the layers, r <- residual · r + (1 - residual) · r
    P_l, and r P_l is a mass received, so the memory is linear: no n × n product is made. It sums to 1, minus the mass
    on sinks and of rows that see nothing.

    calls: the self-attention calls of one forward, first layer first: a Tape that was recorded with Inputs(), or some
    of its calls. row: an index, from the end where negative. residual: the share of the residual stream, from 0 to 1.
    float32, or float64 for float64 calls. No gradients. Raises ValueError for no calls, another residual or a Tape
    without Inputs(), IndexError for a token that does not exist, ShapeError where a call is not of the n tokens with
    themselves.
    Source: Abnar and Zuidema 2020 (arXiv 2005.00928).

    >>> import regard as rg
    >>> model = torch.nn.Sequential(rg.nn.MultiHeadAttention(8, heads=2), rg.nn.MultiHeadAttention(8, heads=2))
    >>> with rg.record(model, facts=(Inputs(),)) as tape:
    ...     _ = model(torch.randn(1, 5, 8))
    >>> rollout(tape).shape
    torch.Size([1, 5])

    >>> x = torch.zeros(1, 1, 4, 8)
    >>> rollout([AttentionCall(None, x, x, mask=rg.Causal())] * 2, row=1)
    tensor([[0.4375, 0.5625, 0.0000, 0.0000]])
    """
    if not isinstance(calls, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"calls is {kind_of(calls)}; {_EXPECTED}")
    given = list(calls)
    calls = [_call(one, number) for number, one in enumerate(given)]
    _check_kinds([one.kind if isinstance(one, Recorded) else "cross" if one.cross else "unknown" for one in given])
    if not calls:
        raise ValueError("calls is empty; expected one call or more, first layer first.")
    if not 0 <= residual <= 1:
        raise ValueError(f"residual is {residual}; expected a share from 0 to 1.")
    n = calls[-1].q.shape[-2]
    row = whole_number(row, "row")
    if not -n <= row < n:
        raise IndexError(f"row is {row}; there are {count_of(n, 'token')}.")
    share = _one(calls[-1], row % n)
    for number in reversed(range(len(calls))):
        share = residual * share + (1 - residual) * _carried(calls[number], number, share)
    return share


def _check_kinds(kinds: list[Kind]) -> None:
    """ShapeError where the calls are known not to be of one sequence, however long the sequences are."""
    if "cross" in kinds:
        raise ShapeError(
            f"calls[{kinds.index('cross')}] is cross-attention; expected self-attention over one sequence: leave it "
            "out, as in [call for call in tape if call.kind == 'self']."
        )
    if "encoder" in kinds and "self" in kinds:
        raise ShapeError(
            f"calls[{kinds.index('encoder')}] is an encoder's and calls[{kinds.index('self')}] is its decoder's; "
            "expected calls over one sequence: [call for call in tape if call.kind == 'encoder'], or == 'self'."
        )


def _call(given: AttentionCall | Recorded, number: int) -> AttentionCall:
    if isinstance(given, AttentionCall):
        return given
    if not isinstance(given, Recorded):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"calls holds {kind_of(given)}; {_EXPECTED}")
    if Inputs() not in given.seen.facts:
        raise ValueError(
            f"calls[{number}] has no queries and keys; expected a recording that kept them: "
            "rg.record(model, facts=(rg.facts.Inputs(),))."
        )
    return given[Inputs()]


def _one(call: AttentionCall, row: int) -> Tensor:
    """All of the share on one token, (*batch, n)."""
    share = torch.zeros(*_batch(call), call.q.shape[-2], dtype=accumulator(call.q.dtype), device=call.q.device)
    share[..., row] = 1
    return share


def _batch(call: AttentionCall) -> tuple[int, ...]:
    return tuple(call.q.shape[: -3 if call.q.dim() >= 4 else -2])


def _carried(call: AttentionCall, number: int, share: Tensor) -> Tensor:
    """r P: what the tokens' shares (*batch, n) become below one layer, the mean over its heads."""
    n = share.shape[-1]
    if (call.q.shape[-2], call.k.shape[-2]) != (n, n):
        got = f"{count_of(call.q.shape[-2], 'query')} and {count_of(call.k.shape[-2], 'key')}"
        raise ShapeError(
            f"calls[{number}] has {got}, q {listed(call.q.shape)}; expected {n} of each: rollout follows "
            "self-attention over one sequence, so leave out cross-attention and cached steps."
        )
    if _batch(call) != share.shape[:-1]:
        raise ShapeError(
            f"calls[{number}] has batch axes {listed(_batch(call))}, the last of calls {listed(share.shape[:-1])}; "
            "expected the calls of one forward."
        )
    headed = call.q.dim() >= 4
    received = Received(share.unsqueeze(-2) if headed else share)
    seen = look(
        call.q,
        call.k,
        facts=(received,),
        score=call.score,
        mask=call.mask,
        positions=call.positions,
        sink=call.sink,
    )
    found = seen[received]
    return found.mean(-2) if headed else found
