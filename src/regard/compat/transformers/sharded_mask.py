"""One forward of a transformers model whose sequence lies on several ranks, and the mask that its layers get."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from regard.call.hooks import AttentionCall, notify
from regard.compat.transformers.padding import real_keys
from regard.compat.transformers.patterns import MaskContext, MaskFunction, mask_of, of_differences, without_documents
from regard.compat.transformers.written_out import Form, WrittenOut
from regard.core.dropout import Dropout
from regard.core.errors import Unsupported
from regard.core.positions import head
from regard.core.shapes import count_of
from regard.masks.algebra import Mask
from regard.masks.ragged import Documents
from regard.parallel.ranks import Ranks
from regard.parallel.sequence import SequenceParallel
from regard.scores.algebra import Score

_RUNNING: dict[int, ShardedForward] = {}  # by thread


@dataclass(eq=False)
class ShardedForward:
    """What this rank knows of the tokens of all ranks, and how many calls of attention went over the group.

    padding    booleans (batch, n), True = a real token; None: no attention_mask was given
    documents  int64 (batch, n), the number of each token's document, where position_ids begin anew; None: one document
    seen       whether some rank has two tokens side by side between which position_ids do not rise by one
    """

    parallel: SequenceParallel
    model: str
    padding: Tensor | None
    documents: Tensor | None
    seen: bool
    calls: int = 0

    @staticmethod
    def of(
        parallel: SequenceParallel, model: str, position_ids: Tensor, attention_mask: Tensor | None
    ) -> ShardedForward:
        """From this rank's (batch, n_r) of both; the ranks exchange them. ValueError where only some have a mask."""
        own = position_ids.long()
        absent = torch.full_like(own, -1)  # which no tokenizer writes
        real = absent if attention_mask is None else attention_mask.to(own.device).long()
        positions, real = parallel.unshard(torch.stack([own, real]), -1)
        if bool((real < 0).any()) != bool((real < 0).all()):
            raise ValueError("attention_mask is given on some ranks of the group and not on others; expected one way.")
        padding = None if bool((real < 0).any()) else real.bool()
        jumps = positions.diff(dim=-1) != 1
        documents = torch.nn.functional.pad(jumps.long().cumsum(-1), (1, 0)) if bool(jumps.any()) else None
        seen = any(bool((positions[:, at].diff(dim=-1) != 1).any()) for at in parallel.shards.indices)
        return ShardedForward(parallel, model, padding, None if padding is not None else documents, seen)

    def mask(self, batch: int, fn: MaskFunction, mapped: bool, form: Form) -> ShardedMask:
        """What transformers gets where it wants the mask of a function of absolute positions."""
        inner, found = without_documents(fn)
        n, count = self.parallel.shards.n, self.parallel.shards.lengths[self.parallel.rank]
        mask = mask_of(inner, MaskContext(head(n, n), mapped))
        if not of_differences(mask):
            raise Unsupported(
                f"{self.model} makes its mask of tensors or of a function of its own ({mask!r}), which know this "
                "rank's tokens alone. Over a group masks are causal, windows, documents and padding; run it in one "
                "process."
            )
        if self.documents is not None and self._has_documents(found):
            mask = Documents(self.documents, self.documents) & mask
        if self.padding is not None:
            mask = mask & real_keys(self.padding)
        return ShardedMask(self, mask, (batch, 1, count, count), form)

    def _has_documents(self, found: bool) -> bool:
        """Whether the model looks for documents, as transformers found some on one of the ranks."""
        anywhere = any(of_rank[0] for of_rank in Ranks.of(self.parallel.group).gather([int(found)]))
        if not anywhere and not self.seen:
            raise Unsupported(
                f"position_ids begin anew where shards begin, and nowhere else, so that nothing shows whether "
                f"{self.model} keeps documents apart. Pass shards with a document's end inside (Shards.zigzag), or "
                "position_ids of one document."
            )
        return anywhere

    def check_call(self, mask: object, position_bias: object, indices: Tensor | None) -> None:
        """Raises Unsupported for a call of attention that is of this rank's tokens alone."""
        why = None
        if position_bias is not None:
            why = "adds a bias that it made for these tokens alone"
        elif indices is not None:
            why = "chooses keys among these tokens alone"
        elif not isinstance(mask, ShardedMask):
            why = "has no mask of transformers' own making"
        if why is not None:
            raise Unsupported(
                f"{self.model} is sharded, and a call of its attention {why}; it would miss the tokens of the other "
                "ranks. Run this model in one process."
            )


@dataclass(frozen=True, eq=False)
class ShardedMask(WrittenOut):
    """The mask of all tokens, in the place of one (batch, 1, n_r, n_r) of this rank's.

    It is not written out: for a model that computes with its mask Unsupported is raised.
    """

    forward: ShardedForward
    mask: Mask
    shape: tuple[int, int, int, int]
    form: Form
    ndim: int = 4

    @property
    def dtype(self) -> torch.dtype:
        return self.form.dtype

    def dim(self) -> int:
        return self.ndim

    def size(self, axis: int | None = None) -> Any:
        return self.shape if axis is None else self.shape[axis]

    def __getitem__(self, index: Any) -> Any:
        parts = index if isinstance(index, tuple) else (index,)
        whole = (
            len(range(n)[part]) == n for part, n in zip(parts, self.shape, strict=False) if isinstance(part, slice)
        )
        return self if list(whole) == [True] * len(parts) else self.dense()

    def dense(self) -> NoReturn:
        raise Unsupported(
            f"{self.forward.model} computes with its attention mask, which would be queries × keys of the whole "
            "sequence, and is not made over a group. Run this model in one process."
        )

    def attend(
        self,
        module: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        score: Score,
        sink: Tensor | None,
        drop: Dropout | None,
    ) -> Tensor:
        """The output for this rank's queries, from the keys and values of all ranks."""
        if (q.shape[-2], k.shape[-2]) != self.shape[-2:]:
            raise Unsupported(
                f"{count_of(q.shape[-2], 'query')} at {count_of(k.shape[-2], 'key')} in {self.forward.model}, whose "
                f"tokens on this rank are {self.shape[-1]}: a cache, or another sequence. Over a group each layer "
                "attends to its own tokens; tree_decode reads a cache of which each rank has a part."
            )
        self.forward.calls += 1
        parallel = self.forward.parallel
        notify(
            lambda: parallel.with_all_keys(AttentionCall(module, q, k, score=score, mask=self._for_hooks(), sink=sink))
        )
        return parallel.attention(q, k, v, score=score, mask=self.mask, sink=sink, dropout=drop, backend=None)

    def _for_hooks(self) -> Mask:
        """The mask for observers of the call, in which padded queries see nothing."""
        real = self.forward.padding
        if real is None or bool(real.all()):
            return self.mask
        return self.mask & Documents((~real).long(), real.new_zeros(real.shape[-1], dtype=torch.int64))


def running() -> ShardedForward | None:
    """The forward of a sharded model that this thread is in."""
    return _RUNNING.get(threading.get_ident()) if _RUNNING else None


def begin(forward: ShardedForward) -> None:
    _RUNNING[threading.get_ident()] = forward


def end() -> ShardedForward | None:
    """The forward that ends here; None where it never began."""
    return _RUNNING.pop(threading.get_ident(), None)
