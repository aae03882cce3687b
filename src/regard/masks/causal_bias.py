"""torch.nn.attention.bias: causal masks of torch that are tensors by name, whose numbers mean nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from regard.core.errors import ShapeError
from regard.core.positions import Positions, head, tail

if TYPE_CHECKING:
    from torch.nn.attention.bias import CausalBias


def is_causal_bias(x: Any) -> TypeGuard[CausalBias]:
    """Whether x is a torch.nn.attention.bias.CausalBias.

    The result of an operation on one is of that class too, and stands for nothing: it does not say which it is.
    """
    kind = type(x)
    return (kind.__module__, kind.__name__) == ("torch.nn.attention.bias", "CausalBias") and hasattr(x, "variant")


def causal_bias_positions(bias: CausalBias, nq: int, nk: int, device: torch.device | str | None = None) -> Positions:
    """Where queries and keys stand, for Causal(), under causal_upper_left(nq, nk) or causal_lower_right(nq, nk).

    Raises ShapeError where the bias was made for other numbers of queries and keys, which torch ignores by path.

    >>> from torch.nn.attention.bias import causal_lower_right
    >>> causal_bias_positions(causal_lower_right(2, 4), 2, 4).q
    tensor([2, 3])
    """
    made_for = bias.seq_len_q, bias.seq_len_kv
    if made_for != (nq, nk):
        raise ShapeError(
            f"attn_mask is a causal bias of {made_for[0]} queries and {made_for[1]} keys; the call has {nq} and {nk}. "
            f"Pass one made for these: causal_upper_left({nq}, {nk}) or causal_lower_right({nq}, {nk})."
        )
    return (head if bias.variant.name == "UPPER_LEFT" else tail)(nq, nk, device=device)
