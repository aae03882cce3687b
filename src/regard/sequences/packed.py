"""Packed batches: sequences of unequal lengths, one behind another, without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

import regard.core.arrays as arrays
from regard.core.errors import ShapeError
from regard.core.positions import Positions
from regard.core.shapes import count_of, listed
from regard.core.tracing import data_unavailable
from regard.core.value import Value
from regard.core.wrong_calls import answers_wrong_calls, kind_of
from regard.masks.ragged import Documents
from regard.sequences.jagged import jagged, ragged_axis

_REAL = " A padding mask (True = a real token, padding at the end) becomes lengths by mask.sum(-1)."


@dataclass(frozen=True)
class Packed(Value):
    """Sequences one after another: values (total, ...), and the length of each sequence, lengths (batch,), int64.

    Layers that treat each token alone (linear layers, norms) run on `values`; attention needs `mask`, under which a
    token sees only its own sequence. There is no padding to compute. `pack` makes a Packed, `unpack` returns the
    sequences.
    Raises ShapeError where the lengths do not add up to the number of tokens.

    >>> p = pack([torch.randn(4, 16), torch.randn(7, 16)])
    >>> p
    Packed(values=float32[11, 16], lengths=int64[2])
    >>> layer = rg.nn.MultiHeadAttention(16, heads=2)
    >>> [t.shape for t in unpack(p.with_values(layer(p.values, mask=p.mask & rg.Causal())))]
    [torch.Size([4, 16]), torch.Size([7, 16])]
    """

    values: Tensor
    lengths: Tensor
    instead_of_tensor: ClassVar[str] = "pass its values (for attention, heads before tokens) and mask=x.mask"

    def __post_init__(self) -> None:
        values = arrays.tensor(self.values, "Packed.values")
        lengths = _of_each(self.lengths, "Packed.lengths")
        if values.dim() < 1 or lengths.dim() != 1:
            raise ShapeError(
                f"Packed has values of shape {listed(values.shape)}, lengths {listed(lengths.shape)}; "
                "expected (total, ...) and (batch,)."
            )
        if not data_unavailable(lengths) and bool((lengths < 0).any()):
            raise ShapeError(f"lengths {lengths.tolist()}: expected 0 or more; running totals, cu_seqlens, never fall.")
        if not data_unavailable(lengths) and int(lengths.sum()) != len(values):
            raise ShapeError(
                f"lengths {lengths.tolist()} do not divide {count_of(len(values), 'token')}; expected their sum."
            )
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "lengths", lengths.to(values.device))

    def with_values(self, values: Tensor) -> Packed:
        """The same sequences with other values (total, ...), for example the output of a layer."""
        return Packed(values, self.lengths)

    @property
    def ids(self) -> Tensor:
        """The number of the sequence that each token belongs to: int64 (total,)."""
        return torch.arange(len(self.lengths), device=self.lengths.device, dtype=torch.int64).repeat_interleave(
            self.lengths
        )

    @property
    def mask(self) -> Documents:
        """A token sees only its own sequence. For keys of another pack: Documents(queries.ids, keys.ids)."""
        return Documents(self.ids)

    @property
    def positions(self) -> Positions:
        """The position of each token in its own sequence, for masks that compare more than distances, such as Prefix.

        Causal and Window do not need it: differences of positions in the pack are the same.
        """
        starts = self.lengths.cumsum(0) - self.lengths
        at = torch.arange(len(self.values), device=self.lengths.device, dtype=torch.int64) - starts.repeat_interleave(
            self.lengths
        )
        return Positions(at, at)

    @property
    def cu_seqlens(self) -> Tensor:
        """The starts and ends of sequences, 0 first and the total last: int32 (batch + 1,), as in flash-attention."""
        return torch.nn.functional.pad(self.lengths.cumsum(0), (1, 0)).int()

    def padded(self, fill: float = 0) -> Tensor:
        """(batch, longest, ...), with `fill` after the end of each sequence. Differentiable."""
        most = int(self.lengths.max()) if len(self.lengths) else 0
        out = self.values.new_full((len(self.lengths), most, *self.values.shape[1:]), fill)
        return out.index_put((self.ids, self.positions.q), self.values)

    def nested(self) -> Tensor:
        """torch's jagged nested tensor over the same values: (batch, n*, ...). Differentiable."""
        return torch.nested.nested_tensor_from_jagged(self.values, self.cu_seqlens.long())


@answers_wrong_calls(
    {
        **dict.fromkeys(("attention_mask", "mask"), "write lengths=mask.sum(-1), where the padding is at the end"),
        "key_padding_mask": "write lengths=(~key_padding_mask).sum(-1), where the padding is at the end",
        **dict.fromkeys(("offsets", "cu_seqlens_q"), "write cu_seqlens=, from 0 to the number of tokens"),
        **dict.fromkeys(("seq_lens", "sizes", "length"), "write lengths="),
    }
)
def pack(x: Any, lengths: Any = None, *, cu_seqlens: Any = None) -> Packed:
    """Sequences of unequal lengths as one Packed, from one of four forms. Differentiable.

    pack([a, b, ...])                a list of tensors (n_i, ...)
    pack(x, lengths)                 x (batch, n, ...) padded at the end, the first lengths[b] tokens of each are real;
                                     lengths are integers, a tensor (batch,) or a list
    pack(x)                          a nested tensor of torch with layout=torch.jagged, (batch, n*, ...)
    pack(x, cu_seqlens=offsets)      x (total, ...) that is packed already, offsets (batch + 1,) from 0 to total

    Back: unpack(p), p.padded(), p.nested(), p.values and p.cu_seqlens.
    Raises ShapeError where shapes or lengths do not fit, TypeError for other types, ValueError for an empty list.

    >>> p = pack(torch.arange(8.0).reshape(2, 4), torch.tensor([1, 3]))
    >>> p.values, p.cu_seqlens
    (tensor([0., 4., 5., 6.]), tensor([0, 1, 4], dtype=torch.int32))
    """
    if isinstance(x, (list, tuple)):
        return _of_list(x, given=lengths is not None or cu_seqlens is not None)  # pyright: ignore[reportUnknownArgumentType]
    if isinstance(x, Tensor) and x.is_nested:
        if lengths is not None or cu_seqlens is not None:
            raise TypeError("a nested tensor has its own lengths; give neither lengths nor cu_seqlens.")
        values, lengths = jagged(x, "x")
        return Packed(values.movedim(ragged_axis(x) - 1, 0), lengths)
    x = arrays.tensor(x, "x")
    if (lengths is None) == (cu_seqlens is None):
        raise TypeError(
            f"x is one tensor, {listed(x.shape)}; give lengths (batch,) if it is (batch, n, ...), padded at the end, "
            "or cu_seqlens (batch + 1,) if it is (total, ...), packed already."
        )
    if cu_seqlens is not None:
        offsets = arrays.integers(cu_seqlens, "cu_seqlens")
        if offsets.dim() != 1 or len(offsets) < 1 or int(offsets[0]) != 0:
            raise ShapeError(
                f"cu_seqlens is {offsets.tolist()}; expected (batch + 1,), from 0 to the number of tokens."
            )
        return Packed(x, offsets.diff())
    lengths = _of_each(lengths, "lengths").to(x.device)
    if x.dim() < 2 or tuple(lengths.shape) != (x.shape[0],):
        raise ShapeError(
            f"x has shape {listed(x.shape)}, lengths {listed(lengths.shape)}; expected (batch, n, ...) and (batch,)."
        )
    if bool(((lengths < 0) | (lengths > x.shape[1])).any()):
        raise ShapeError(f"lengths {lengths.tolist()}; expected 0 to {x.shape[1]}, the padded length of x.")
    return Packed(x[torch.arange(x.shape[1], device=x.device, dtype=torch.int64) < lengths[:, None]], lengths)


def unpack(packed: Packed) -> list[Tensor]:
    """The sequences of a pack: tensors (n_i, ...), views of its values. See Packed for the other conversions.

    >>> unpack(pack([torch.tensor([1, 2]), torch.tensor([3])]))
    [tensor([1, 2]), tensor([3])]
    """
    if not isinstance(packed, Packed):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"packed is {kind_of(packed)}; expected a Packed, which pack(...) makes.")
    return list(packed.values.split(packed.lengths.tolist()))


def _of_each(lengths: Any, name: str) -> Tensor:
    """The length of each sequence as int64; TypeError for other numbers than integers."""
    if isinstance(lengths, (list, tuple)):
        return torch.tensor(arrays.numbers(lengths, name), dtype=torch.int64, device="cpu")
    return arrays.integers(lengths, name, _REAL)


def _of_list(sequences: Sequence[Any], given: bool) -> Packed:
    if given:
        raise TypeError("a list of tensors has its own lengths; give neither lengths nor cu_seqlens.")
    if not sequences:
        raise ValueError("x is an empty list; expected one sequence or more, which say what a token is.")
    tensors = [arrays.tensor(t, f"x[{n}]") for n, t in enumerate(sequences)]
    for n, t in enumerate(tensors):
        if t.dim() < 1 or t.shape[1:] != tensors[0].shape[1:]:
            raise ShapeError(
                f"x[{n}] has shape {listed(t.shape)}, x[0] {listed(tensors[0].shape)}; expected tensors (n_i, ...) "
                "that differ in their first axis alone."
            )
    return Packed(torch.cat(tensors), torch.tensor([len(t) for t in tensors], dtype=torch.int64, device="cpu"))
