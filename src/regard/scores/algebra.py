"""Score: one similarity of query and key, then modifiers, joined by >>."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

import regard.core.html as html
from regard.core.errors import ShapeError
from regard.core.region import Frame, Region
from regard.core.shapes import broadcasts, listed
from regard.core.value import Value, described
from regard.core.wrong_calls import kind_of
from regard.scores.ways import way_to_score

Pull = Callable[[Tensor], tuple[Tensor | None, ...]]


@dataclass(frozen=True)
class Score(Value):
    """How well a key matches a query: a similarity, then modifiers, applied left to right.

    Any tensor field of a score (a matrix, slopes, a table, a bias) receives its gradient if it requires one. `formula`
    is the text that a notebook shows for a stage; a subclass inherits it.

    >>> from regard.scores.similarity import ScaledDot
    >>> from regard.scores.modifiers import SoftCap
    >>> ScaledDot() >> SoftCap(50.0)
    ScaledDot() >> SoftCap(cap=50.0)
    """

    argument: ClassVar[str] = "score"
    formula: ClassVar[str] = ""
    head_axes: ClassVar[Mapping[str, int] | None] = None
    """By field: which axis of a tensor may be that of heads, from the last (-1) on. Each class says it itself; of one
    that does not, a call with some of the heads asks a modifier about the whole, and refuses a similarity."""
    of_key_heads: ClassVar[frozenset[str]] = frozenset()
    """The fields whose axis of heads may be that of the keys' heads."""

    @property
    def stages(self) -> tuple[Score, ...]:
        return (self,)

    def __rshift__(self, other: Score) -> Pipeline:
        if not isinstance(other, Score):  # pyright: ignore[reportUnnecessaryIsInstance]
            way = way_to_score(other) or "a score is a similarity, then modifiers, as in ScaledDot() >> SoftCap(50)"
            raise TypeError(f">> joins scores; after {self!r} comes {kind_of(other)}: {way}.")
        return Pipeline((*self.stages, *other.stages))

    def _refuse(self, other: object) -> NoReturn:
        if isinstance(other, Score):
            similarity_first = (other, self) if isinstance(other, Similarity) else (self, other)
            way = "write " + " >> ".join(map(repr, similarity_first))
        else:
            way = way_to_score(other) or "a score is a similarity, then modifiers, as in ScaledDot() >> SoftCap(50)"
        raise TypeError(f"scores are joined by >> alone; {self!r} meets {kind_of(other)}: {way}.")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __matmul__ = _refuse
    __or__ = __ror__ = __and__ = __rand__ = __rrshift__ = _refuse

    def __bool__(self) -> bool:
        raise TypeError(
            f"{self!r} is neither true nor false, so `and` and `or` would take one side; join scores by >>."
        )

    def compares_positions(self) -> bool:
        """Whether an answer depends on absolute positions."""
        return False

    def shape_error(self, frame: Frame) -> str | None:
        """Why this score does not fit a call of that size, as a sentence; None if it does."""
        return None

    def local(self, at: Region) -> Score:
        """The same stage holding only those views of its tensors that the region needs."""
        return self

    @classmethod
    def examples(cls, frame: Frame, width: int) -> tuple[Score, ...]:
        """Small stages that fit a call of that frame, its queries and keys of that width, with float64 tensors.

        regard.testing tries each of them on every backend, with gradients for every tensor.
        """
        return ()

    def _repr_html_(self) -> str:
        """Its stages for a notebook: what each computes, and its parameters."""
        rows = [(type(stage).__name__, stage.formula, described(stage)) for stage in self.stages]
        return html.panel(repr(self), html.table(rows, ("stage", "formula", "parameters")))


@dataclass(frozen=True)
class Similarity(Score):
    """The first stage: s_ij from q_i and k_j. Subclass with `compare`, and `prepare` for work done once an element.

    footprint: how many numbers `compare` holds for each pair; the more, the smaller the tiles.

    >>> import regard as rg
    >>> @dataclass(frozen=True)
    ... class Manhattan(Similarity):
    ...     def compare(self, q, k, at):
    ...         return -torch.cdist(q, k, p=1)
    >>> rg.attention_weights(torch.zeros(1, 2), torch.ones(2, 2), score=Manhattan())
    tensor([[0.5000, 0.5000]])
    """

    _follow: ClassVar[Mapping[str, tuple[str, ...]]] = {"compare": ("quick",)}

    @property
    def footprint(self) -> int:
        return 1

    def widths(self, dq: int, dk: int) -> str | None:
        """Why queries of width dq and keys of width dk cannot be compared; None if they can."""
        if dq == dk:
            return None
        return (
            f"q has width {dq}, k has width {dk}; {type(self).__name__} compares equal widths; "
            "Bilinear(m), Additive(...) and Custom(fn) can relate unequal widths"
        )

    def prepare(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """What is done once for each query and key: (*batch, h, nq, dq), (*batch, hk, nk, dk) -> the same axes."""
        return q, k

    @classmethod
    def prepares(cls) -> bool:
        """Whether `prepare` does anything."""
        return cls.prepare is not Similarity.prepare

    def compare(self, q: Tensor, k: Tensor, at: Region) -> Tensor:
        """Scores (*batch, h, r, c) of prepared queries (*batch, h, r, d) and keys (*batch, h, c, d')."""
        raise NotImplementedError(f"{type(self).__name__} does not define compare(q, k, at).")

    def quick(self, q: Tensor, k: Tensor, at: Region) -> tuple[Tensor, Pull] | None:
        """The scores of `compare`, and a function for their gradients: cheaper, and not recorded by autograd.

        The function takes the gradient of the scores, once, and returns those of (q, k, *self.tensors()), None for a
        tensor that only `prepare` reads. `quick` returns None where autograd is to differentiate `compare` instead.
        """
        return None


@dataclass(frozen=True)
class Modifier(Score):
    """A later stage: a score from a score. Subclass as a frozen dataclass with `modify`.

    Set `positional = False` if it does not read at.i and at.j, and `indexed = False` if it reads no index of a query or
    key either (at.row, at.col, a tensor with a number for each key). Set `adds = True` if its result is s plus a number
    that does not depend on s. A subclass inherits them. One that reads no index runs over sources of unknown length
    (attention_over); one that adds can be a term of the bias that ONNX's attention takes.

    >>> import regard as rg
    >>> @dataclass(frozen=True)
    ... class Recency(Modifier):
    ...     rate: float
    ...     def modify(self, s, at):
    ...         return s + self.rate * at.j
    >>> x = torch.zeros(2, 2)
    >>> rg.attention_weights(x, x, score=rg.Dot() >> Recency(9.0), rows=[0])
    tensor([[1.2339e-04, 9.9988e-01]])
    """

    _follow: ClassVar[Mapping[str, tuple[str, ...]]] = {"modify": ("local", "of_pair")}
    positional: ClassVar[bool] = True
    indexed: ClassVar[bool] = True
    adds: ClassVar[bool] = False

    def modify(self, s: Tensor, at: Region) -> Tensor:
        """The changed scores, of the shape of s (*batch, h, r, c)."""
        raise NotImplementedError(f"{type(self).__name__} does not define modify(s, at).")

    def compares_positions(self) -> bool:
        return self.positional

    def of_pair(self) -> Callable[..., Tensor] | None:
        """The function fn(s, b, h, i, j) of single pairs that `modify` evaluates, by indices; None: there is none."""
        return None


@dataclass(frozen=True)
class Pipeline(Score):
    """Stages in the order in which they apply. Made by >>, which is associative."""

    parts: tuple[Score, ...]

    @property
    def stages(self) -> tuple[Score, ...]:
        return self.parts

    def compares_positions(self) -> bool:
        return any(stage.compares_positions() for stage in self.parts)

    def shape_error(self, frame: Frame) -> str | None:
        for stage in self.parts:  # torch.compile traces no next() with a default before torch 2.9
            if (why := stage.shape_error(frame)) is not None:
                return why
        return None

    def local(self, at: Region) -> Pipeline:
        return Pipeline(tuple(stage.local(at) for stage in self.parts))

    def __repr__(self) -> str:
        return " >> ".join(map(repr, self.parts))


def as_pipeline(score: Score) -> Pipeline:
    """The score as a pipeline that begins with its one similarity, or TypeError."""
    stages = score.stages
    if not isinstance(stages[0], Similarity):
        similarities = [stage for stage in stages if isinstance(stage, Similarity)]
        modifiers = [stage for stage in stages if not isinstance(stage, Similarity)]
        first = similarities[0] if similarities else "ScaledDot()"
        way = " >> ".join((str(first), *map(repr, modifiers)))
        raise TypeError(f"score {score!r} begins with a modifier; begin with a similarity, as in {way}.")
    for stage in stages[1:]:
        if isinstance(stage, Similarity):
            raise TypeError(f"score {score!r} has a second similarity, {stage!r}; only its first stage may be one.")
    return Pipeline(stages)


def evaluate(score: Pipeline, q: Tensor, k: Tensor, at: Region, first: Tensor | None = None) -> Tensor:
    """The scores of one region, from prepared queries (*batch, h, r, d) and keys (*batch, h, c, d').

    `first`: what the similarity says, where that is known already.
    """
    similarity, *modifiers = score.parts
    assert isinstance(similarity, Similarity)
    s = similarity.compare(q, k, at) if first is None else first
    for stage in modifiers:
        assert isinstance(stage, Modifier)
        s = modified(s, stage, at)
    _check_scores(score, s, (*q.shape[:-1], k.shape[-2]))
    return s if s.dtype == q.dtype else s.to(torch.promote_types(q.dtype, torch.float32))


def modified(s: Tensor, stage: Modifier, at: Region) -> Tensor:
    """What a modifier makes of scores; TypeError where that is no tensor."""
    found: Any = stage.modify(s, at)
    if not isinstance(found, Tensor):
        name = type(stage).__name__
        raise TypeError(f"{name}.modify returned {kind_of(found)}; expected a tensor with the score of each pair.")
    return found


def _check_scores(score: Pipeline, s: Tensor, full: tuple[int, ...]) -> None:
    """Raises an error for what is no real number for each pair: a person's stage may have changed axes or dtype."""
    if torch.compiler.is_compiling():
        return
    if s.is_complex():
        raise TypeError(f"score {score!r} gave scores of {s.dtype}; expected real numbers, such as their .real.")
    if tuple(s.shape[-2:]) != full[-2:] or not broadcasts(s.shape, full):
        raise ShapeError(
            f"score {score!r} gave scores of shape {listed(s.shape)} for pairs of shape {listed(full)}, (*batch, "
            "heads, queries, keys). Each stage returns a score for each pair that it is given; at.heads(t), "
            "at.queries(t), at.keys(t) and at.pairs(t) give a tensor the axes of pairs."
        )
