"""FactResults: the answers of one look."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

import regard.core.html as html
from regard.inspect.facts.algebra import Fact
from regard.inspect.tables import facts_table

T = TypeVar("T")


class FactResults:
    """The answers of one look: `seen[Entropy()]` is the entropy; `seen.lse` the log-sum-exp (*batch, h, nq).

    key_heads: how many heads the keys have, None where the caller's tensors have no head axis.
    ways: by which way each fact was found, see `way`.

    >>> import regard as rg, torch
    >>> seen = rg.look(torch.zeros(6, 5, 8)[None], torch.zeros(2, 5, 8)[None], facts=(rg.facts.Entropy(),))
    >>> seen[rg.facts.Entropy()].shape, seen.grouped(rg.facts.Entropy()).shape
    (torch.Size([1, 6, 5]), torch.Size([1, 2, 5]))
    """

    def __init__(
        self,
        lse: Tensor,
        answers: dict[Fact[Any], Any],
        key_heads: int | None,
        ways: dict[Fact[Any], str] | None = None,
    ) -> None:
        self.lse, self.key_heads, self._answers, self._ways = lse, key_heads, answers, ways or {}

    @property
    def headed(self) -> bool:
        """Whether the answers have an axis of heads, as the caller's tensors do."""
        return self.key_heads is not None

    @property
    def facts(self) -> tuple[Fact[Any], ...]:
        """What was asked for."""
        return tuple(self._answers)

    def __getitem__(self, fact: Fact[T]) -> T:
        if fact not in self._answers:
            raise KeyError(f"{fact!r} was not computed; this look has {', '.join(map(repr, self._answers))}.")
        return self._answers[fact]

    if not TYPE_CHECKING:  # which would take every name for an attribute

        def __getattr__(self, name: str) -> object:
            """AttributeError, with the way to the answers."""
            said = f"{type(self).__name__!r} object has no attribute {name!r}"
            if not name.startswith("_"):
                said += f"; an answer is read by its fact: {', '.join(f'seen[{fact!r}]' for fact in self._answers)}."
            raise AttributeError(said)

    def way(self, fact: Fact[Any]) -> str:
        """Which way found a fact: the native kernels, or a sweep over tiles in PyTorch, and why that.

        >>> import regard as rg, torch
        >>> x, first = torch.zeros(5, 8), rg.facts.Rows([0])
        >>> rg.look(x, x, facts=(first,)).way(first)
        'tiles in PyTorch, not the native kernels: it has no Rows'
        """
        self[fact]
        return self._ways.get(fact, "tiles in PyTorch")

    def grouped(self, fact: Fact[Tensor]) -> Tensor:
        """The mean of an answer over the query heads that share a key head: (*batch, h, ...) -> (*batch, hk, ...).

        Raises TypeError where the answer is no one tensor, or the tensors have no head axis.
        """
        answer = self[fact]
        if not isinstance(answer, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            fields = ", ".join(answer._fields)
            raise TypeError(f"{fact!r} answers with {fields}, which have no common mean; take that of one of them.")
        if self.key_heads is None:
            raise TypeError("grouped: the tensors of this look have no head axis, so there are no groups of heads.")
        axis = self.lse.dim() - 2
        heads = answer.shape[axis]
        if heads == self.key_heads:
            return answer
        wide = answer if answer.dtype.is_floating_point else answer.double()
        return wide.unflatten(axis, (self.key_heads, heads // self.key_heads)).mean(axis + 1)

    def without(self, axis: int, key_heads: int | None) -> FactResults:
        """The same without an axis of size 1 that the caller does not have; key_heads as it is then."""
        answers = {
            fact: answer.squeeze(axis)
            if isinstance(answer, Tensor)
            else type(answer)(*(t.squeeze(axis) for t in answer))
            for fact, answer in self._answers.items()
        }
        return FactResults(self.lse.squeeze(axis), answers, key_heads, self._ways)

    def __repr__(self) -> str:
        return f"FactResults({', '.join(map(repr, self._answers))})"

    def _repr_html_(self) -> str:
        """A table of the answers for a notebook."""
        return html.panel("FactResults", facts_table(self))
