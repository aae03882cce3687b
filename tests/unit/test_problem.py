"""Every wrong input gets its sentence: the argument, what was expected, what came, and the way out."""

from __future__ import annotations

import inspect
import re
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, zeros

import regard as rg
from regard import testing
from regard.call.arguments import build_problem
from regard.core.region import Region

Q, K, V = zeros(5, 6, 13, 8), zeros(5, 2, 17, 8), zeros(5, 2, 17, 3)
AXES = "expected (*batch, heads, n, d), (batch, n, d) or (n, d)"
META = torch.device("meta")

TENSORS: list[tuple[tuple[Any, Any, Any], type[Exception], str]] = [
    ((zeros(8), K, V), rg.ShapeError, f"q has shape (8,); {AXES}."),
    ((zeros(()), K, V), rg.ShapeError, f"q has shape (); {AXES}."),
    ((Q, K, zeros(3)), rg.ShapeError, f"v has shape (3,); {AXES}."),
    (
        ([1.0], K, V),
        TypeError,
        "q is a list; expected a torch tensor or an array (NumPy, or any with __dlpack__): write torch.tensor(...).",
    ),
    ((Q, K.half(), V), TypeError, "k has dtype torch.float16, q has torch.float32; expected one dtype: convert"),
    ((Q, K, V.double()), TypeError, "v has dtype torch.float64, q has torch.float32; expected one dtype"),
    ((Q.long(), K, V), TypeError, "q has dtype torch.int64; expected float16, bfloat16, float32 or float64: convert"),
    ((Q + 0j, K, V), TypeError, "q has dtype torch.complex64; expected float16"),
    ((Q, K.to(META), V), ValueError, "k is on meta, q on cpu; expected one device: move with .to(...)."),
    ((Q, K, V[0]), rg.ShapeError, "v has shape (2, 17, 3), q (5, 6, 13, 8); expected as many axes"),
    (
        (Q, zeros(4, 2, 17, 8), V),
        rg.ShapeError,
        "the batch axes differ: q (5,), k (4,), v (5,); expected equal ones, or 1 where they are shared.",
    ),
    (
        (zeros(6, 13, 8), zeros(2, 13, 8), zeros(2, 13, 8)),
        rg.ShapeError,
        "Three axes are (batch, n, d); heads need four, (batch, heads, n, d): add one by q[None].",
    ),
    (
        (Q, zeros(5, 4, 17, 8), zeros(5, 4, 17, 3)),
        rg.ShapeError,
        "k has 4 heads, q has 6; q's heads must be a multiple of k's (grouped queries).",
    ),
    ((Q, zeros(5, 0, 17, 8), zeros(5, 0, 17, 3)), rg.ShapeError, "k has 0 heads, q has 6"),
    ((Q, K, zeros(5, 1, 17, 3)), rg.ShapeError, "v has 1 head, k has 2; expected as many."),
    ((Q, K, zeros(5, 2, 16, 3)), rg.ShapeError, "v has 16 values, k has 17 keys; expected one value a key."),
    ((Q, K, zeros(5, 2, 18, 3)), rg.ShapeError, "v has 18 values, k has 17 keys; expected one value a key."),
    (
        (Q, zeros(5, 2, 17, 7), V),
        rg.ShapeError,
        "q has width 8, k has width 7; ScaledDot compares equal widths; Bilinear(m), Additive(...) and Custom(fn) can",
    ),
]


@pytest.mark.parametrize(("given", "kind", "said"), TENSORS)
def test_tensors(given: tuple[Any, Any, Any], kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=re.escape(said)):
        rg.attention(*given)


Q_SWAPPED, K_SWAPPED = zeros(5, 13, 6, 8), zeros(5, 17, 6, 8)
SWAPPED = "If the axes are (batch, n, heads, d), with 6 heads, as flash-attention has them, write q.transpose(-3, -2)"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            (Q_SWAPPED, K_SWAPPED, K_SWAPPED),
            f"k has 17 heads, q has 13; q's heads must be a multiple of k's (grouped queries). {SWAPPED}",
        ),
        ((Q, zeros(5, 4, 17, 8), zeros(5, 4, 17, 3)), "q's heads must be a multiple of k's (grouped queries)."),
    ],
)
def test_heads_on_the_axis_of_the_tokens(given: tuple[Tensor, Tensor, Tensor], said: str) -> None:
    with pytest.raises(rg.ShapeError, match=re.escape(said)) as raised:
        rg.attention(*given)
    assert ("transpose" in str(raised.value)) == (SWAPPED in said)


def test_more_heads_than_tokens_warns_once() -> None:
    q = torch.randn(2, 128, 8, 4)
    with pytest.warns(UserWarning, match=r"^q, k and v are read as \(batch, heads, n, d\), and have more heads"):
        rg.attention(q, q, q)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        for width in (3, 4, 5):  # structures of their own, each planned
            rg.attention(q, q, torch.randn(2, 128, 8, width))
    assert len(said) == 1 and "positions=head(nq, nk)" in str(said[0].message)


def test_right_calls_with_more_heads_than_tokens_do_not_warn() -> None:
    q, cache = torch.randn(1, 48, 7, 4), torch.randn(1, 48, 19, 4)
    rg.attention(q, q, q, positions=rg.head(7, 7))  # somebody has said so
    rg.attention(q, q, q, score=rg.ScaledDot(0.5))  # so did a model's own scale
    rg.attention(q, q, torch.randn(1, 7, 48, 4).transpose(1, 2))  # a projection, transposed
    rg.attention(q[:, :, :1], cache, cache)  # decoding
    rg.attention(*3 * [torch.randn(2, 12, 5, 4)])  # a short text


MOVED: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
    (
        (),
        {"attn_mask": None},
        "no argument 'attn_mask'; write mask=Dense(attn_mask) for booleans, True = may attend",
    ),
    (
        (),
        {"attn_mask": None},
        "regard.compat has functions with the arguments of torch, flash-attention, Keras",
    ),
    ((), {"is_causal": True}, "attention has no argument 'is_causal'; write mask=Causal()."),
    ((), {"scale": 0.1}, "attention has no argument 'scale'; write score=ScaledDot(scale)."),
    ((), {"dropout_p": 0.1}, "attention has no argument 'dropout_p'; write dropout=Dropout(dropout_p)."),
    ((), {"enable_gqa": True}, "'enable_gqa'; leave it out: k and v may have fewer heads than q"),
    ((), {"num_heads": 2}, "'num_heads'; heads are an axis of q, k and v"),
    ((), {"key_padding_mask": None}, "'key_padding_mask'; write mask=Dense(~key_padding_mask[:, None, None, :])"),
    (
        (),
        {"colour": 1},
        "no argument 'colour'; it has score, mask, positions, sink, dropout and backend.",
    ),
    ((zeros(13, 17) > 0,), {}, "the fourth is a Tensor of bool: write mask=Dense(mask), True = may attend."),
    ((zeros(13, 17),), {}, "the fourth is a Tensor of float32: write score=ScaledDot() >> Bias(mask) if it is added"),
    ((rg.Causal(),), {}, "attention takes q, k and v by position; the fourth is a Causal: write mask=Causal()."),
    ((True,), {}, "the fourth is a bool: name what follows: score=, mask=, positions=, sink=, dropout=, backend=."),
]


@pytest.mark.parametrize(("more", "named", "said"), MOVED)
def test_arguments_of_other_libraries(more: tuple[Any, ...], named: dict[str, Any], said: str) -> None:
    with pytest.raises(TypeError, match=re.escape(said)):
        rg.attention(Q, K, V, *more, **named)


def test_what_the_sentences_advise_runs() -> None:
    attn_mask, key_padding_mask = zeros(13, 17) > 0, zeros(5, 17) > 0
    for mask in (rg.Dense(attn_mask), rg.Dense(~key_padding_mask[:, None, None, :])):
        rg.attention(Q, K, V, mask=mask)


def test_help_shows_what_attention_takes() -> None:
    shown = inspect.signature(rg.attention).parameters
    assert list(shown) == ["q", "k", "v", "score", "mask", "positions", "sink", "dropout", "backend"]


@pytest.mark.parametrize(
    ("backend", "said"),
    [
        (rg.Native, "backend is the class Native, not one of its values; write backend=Native()."),
        ("native", "backend is 'native'; expected a Backend, such as Tiled(), or None to choose."),
    ],
)
def test_a_backend_is_a_value(backend: Any, said: str) -> None:
    with pytest.raises(TypeError, match=re.escape(said)):
        rg.attention(Q, K, V, backend=backend)


def test_a_prefix_is_counted() -> None:
    with pytest.raises(
        TypeError, match=re.escape("Prefix.n is 1.5, a float; expected an integer, or an integer tensor")
    ):
        rg.Prefix(1.5)  # pyright: ignore[reportArgumentType]


POSITIONS = "expected head(nq, nk), tail(nq, nk) or Positions(q, k)."
PADDING = "a padding mask (batch, nk) is Dense(mask[:, None, None, :])"
ROWS = zeros(13, 17)
ARGUMENTS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"mask": ROWS > 0}, TypeError, "mask is a Tensor of bool; write Dense(mask), True = may attend."),
    ({"mask": ROWS}, TypeError, "mask is a Tensor of float32; write score=ScaledDot() >> Bias(mask) if it is added"),
    ({"mask": ROWS.long()}, TypeError, "mask is a Tensor of int64; write Dense(mask != 0) if 1 means may attend"),
    ({"mask": np.zeros((13, 17), bool)}, TypeError, "mask is a ndarray of bool; write Dense(mask), True = may attend."),
    ({"mask": "causal"}, TypeError, "mask is a str; write Causal()."),
    ({"mask": rg.Causal}, TypeError, "mask is the class Causal, not one of its values; write Causal()."),
    ({"score": "dot"}, TypeError, "score is a str; expected a Score, such as ScaledDot(), or Custom(fn)."),
    ({"score": torch.dot}, TypeError, "a similarity fn(q, k) is Custom(fn)."),
    ({"score": rg.ScaledDot}, TypeError, "score is the class ScaledDot, not one of its values; write ScaledDot()."),
    ({"score": rg.SoftCap(2.0)}, TypeError, "score SoftCap(cap=2.0) begins with a modifier; begin with a similarity"),
    (
        {"score": rg.SoftCap(2.0) >> rg.Dot()},
        TypeError,
        "begins with a modifier; begin with a similarity, as in Dot() >> SoftCap(cap=2.0).",
    ),
    ({"mask": rg.Prefix}, TypeError, "mask is the class Prefix, not one of its values; write Prefix(...)."),
    (
        {"mask": rg.Where(lambda i, j: i >= j), "positions": rg.tail(13, 17)},
        TypeError,
        "Where.fn cannot be called as fn(b, h, i, j)",
    ),
    ({"score": rg.Dot() >> rg.Dot()}, TypeError, "has a second similarity, Dot(); only its first stage may be one."),
    ({"positions": (0, 1)}, TypeError, f"positions is a tuple; {POSITIONS}"),
    ({"positions": rg.head(12, 17)}, rg.ShapeError, "positions.q has shape (12,); expected (13,) or (5, 13)."),
    ({"positions": rg.head(13, 16)}, rg.ShapeError, "positions.k has shape (16,); expected (17,) or (5, 17)."),
    (
        {"positions": rg.Positions(zeros(4, 13).long(), zeros(17).long())},
        rg.ShapeError,
        "positions.q has shape (4, 13); expected (13,) or (5, 13).",
    ),
    ({"dropout": 0.1}, TypeError, "dropout is a float; write Dropout(0.1)."),
    ({"sink": zeros(5)}, rg.ShapeError, "sink has shape (5,); expected a logit a head, (6,), or (5, 6)."),
    ({"sink": zeros(6, device=META)}, ValueError, "sink is on meta, q on cpu; move it with .to(...)."),
    ({"sink": zeros(6).long()}, TypeError, "sink has dtype torch.int64; expected floating point."),
    ({"mask": rg.Dense(ROWS.to(META) > 0)}, ValueError, "mask Dense(allowed=bool[13, 17]) holds a tensor on meta"),
    ({"score": rg.Bilinear(zeros(8, 8, device=META))}, ValueError, "score Bilinear(m=float32[8, 8]) holds a tensor on"),
    ({"mask": rg.Dense(zeros(5, 17) > 0)}, rg.ShapeError, "expected one that broadcasts to (5, 6, 13, 17); " + PADDING),
    ({"mask": rg.Lengths(keys=torch.full((5,), 18))}, rg.ShapeError, "Lengths.keys holds 18 to 18; expected numbers"),
    (
        {"mask": rg.Lengths(keys=torch.full((4,), 7))},
        rg.ShapeError,
        "Lengths.keys has shape (4,); expected a number a sequence",
    ),
    ({"score": rg.ScaledDot() >> rg.Bias(zeros(16))}, rg.ShapeError, "Bias.bias has shape (16,); expected one that"),
]


@pytest.mark.parametrize(("given", "kind", "said"), ARGUMENTS)
def test_arguments(given: dict[str, Any], kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=re.escape(said)):
        rg.attention(Q, K, V, **given)
    if "dropout" not in given:
        with pytest.raises(kind, match=re.escape(said)):
            rg.attention_weights(Q, K, **given)


@pytest.mark.parametrize(
    "given",
    [
        {"mask": rg.Causal()},
        {"mask": ~rg.Window(3, 0) | rg.Lengths(keys=torch.full((5,), 7))},
        {"score": rg.ScaledDot() >> rg.Alibi(torch.ones(6))},
        {"mask": rg.Where(lambda b, h, i, j: i >= j)},
    ],
)
def test_positions_that_nobody_gave(given: dict[str, Any]) -> None:
    name = repr(next(iter(given.values())))
    said = (
        f"13 queries meet 17 keys under {name}, and their positions are not given. Pass\n"
        "  positions=tail(13, 17) if the queries are the last 13 tokens (decoding), or "
        "positions=head(13, 17) if they are the first."
    )
    for call in (rg.attention, rg.attention_state, rg.explain):
        with pytest.raises(rg.ShapeError) as raised:
            call(Q, K, V, **given)
        assert str(raised.value) == said


def test_what_compares_no_positions_needs_none() -> None:
    mask = rg.Lengths(keys=torch.full((5,), 7)) & rg.Dense(torch.ones(17, dtype=torch.bool))
    assert rg.attention(Q, K, V, mask=mask, score=rg.ScaledDot() >> rg.SoftCap(2.0)).shape == (5, 6, 13, 3)


def test_a_padding_mask_that_could_be_a_square() -> None:
    x, mask = zeros(13, 2, 13, 8), rg.Dense(torch.ones(13, 13, dtype=torch.bool))
    with pytest.warns(UserWarning, match="as many sequences as queries, so a padding mask .* would fit too"):
        rg.attention(x, x, x, mask=mask)
    for way in (mask.allowed[None, None], mask.allowed[:, None, None, :]):
        rg.attention(x, x, x, mask=rg.Dense(way))
    rg.attention(x[:5], x[:5], x[:5], mask=mask)


def test_a_bias_of_zeros_and_ones_warns() -> None:
    with pytest.warns(UserWarning, match=r"Bias holds only 0 and 1, .* write Dense\(bias.bool\(\)\)"):
        rg.Bias(torch.eye(13))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rg.Bias(torch.eye(13) * -1e9)


def test_a_custom_score_with_hidden_parameters() -> None:
    w = torch.ones(8, requires_grad=True)
    hidden = rg.Custom(lambda q, k: (q * w) @ k.mT)
    with pytest.raises(ValueError, match=r"fn uses a tensor that requires a gradient and that regard cannot see"):
        rg.attention(Q, K, V, score=hidden)
    with torch.no_grad():
        rg.attention(Q, K, V, score=hidden)
    told = rg.Custom(lambda q, k, w: (q * w) @ k.mT, tensors=(w,))
    assert rg.attention(Q, K, V, score=told).requires_grad


WEIGHT = torch.ones(6, requires_grad=True)


class NoDataclass(rg.Modifier):
    def __init__(self, w: torch.Tensor) -> None:
        self.w = w

    def modify(self, s: torch.Tensor, at: Region) -> torch.Tensor:
        return s * at.heads(self.w)


@dataclass(frozen=True)
class OfList(rg.Modifier):
    w: Any

    def modify(self, s: torch.Tensor, at: Region) -> torch.Tensor:
        return s * at.heads(self.w[0])


@dataclass(frozen=True)
class OfModule(rg.Similarity):
    layer: Any

    def compare(self, q: torch.Tensor, k: torch.Tensor, at: Region) -> torch.Tensor:
        return self.layer(q) @ k.mT


@dataclass(frozen=True)
class OfGlobal(rg.Modifier):
    def modify(self, s: torch.Tensor, at: Region) -> torch.Tensor:
        return s + at.heads(WEIGHT)


@pytest.mark.parametrize("backend", [None, rg.Tiled(), rg.Reference()], ids=repr)
@pytest.mark.parametrize(
    "score",
    [
        rg.ScaledDot() >> NoDataclass(WEIGHT),
        rg.ScaledDot() >> rg.SoftCap(5.0) >> OfList([WEIGHT]) >> rg.SoftCap(7.0),
        OfModule(torch.nn.Linear(8, 8)),
        rg.ScaledDot() >> OfGlobal(),
    ],
    ids=lambda score: type(score.stages[-1]).__name__ if len(score.stages) < 4 else "OfList",
)
def test_hidden_parameters_are_refused(score: rg.Score, backend: rg.Backend | None) -> None:
    """They would get no gradient, whether or not q requires one."""
    for q in (zeros(5, 6, 17, 8), zeros(5, 6, 17, 8, requires_grad=True)):
        with pytest.raises(ValueError, match=r"a tensor that requires a gradient and that regard cannot see.*a field"):
            rg.attention(q, K, V, score=score, backend=backend)
    with torch.no_grad():
        rg.attention(zeros(5, 6, 17, 8), K, V, score=score, backend=backend)


def test_fields_of_own_scores_get_gradients() -> None:
    @dataclass(frozen=True)
    class OfTensor(rg.Modifier):
        w: torch.Tensor

        def modify(self, s: torch.Tensor, at: Region) -> torch.Tensor:
            return s * at.heads(self.w)

    w, (q, k, v) = (
        torch.ones(6, requires_grad=True),
        (torch.randn(t.shape) for t in (Q, K[..., :13, :], V[..., :13, :])),
    )
    rg.attention(q, k, v, score=rg.ScaledDot() >> OfTensor(w)).sum().backward()
    assert w.grad is not None and w.grad.abs().min() > 0


@pytest.mark.parametrize(
    ("score", "said"),
    [
        (rg.Custom(lambda q, k: q @ k.mT[..., :1]), "Custom.fn returned (5, 6, 13, 1) for q (5, 6, 13, 8) and k"),
        (rg.Custom(lambda q, k: 0.0), "Custom.fn returned float for q"),
    ],
)
def test_a_custom_score_of_another_shape(score: rg.Score, said: str) -> None:
    with pytest.raises(TypeError, match=re.escape(said)):
        rg.attention(Q, K, V, score=score)


@pytest.mark.parametrize(
    ("rows", "kind", "said"),
    [
        ([13], IndexError, "rows holds [13]; there are 13 queries."),
        ([-14], IndexError, "rows holds [-14]; there are 13 queries."),
        ([0.5], TypeError, "rows has dtype torch.float32, shape (1,); expected integers, (r,)."),
        ([True], TypeError, "rows has dtype torch.bool"),
        (3, TypeError, "rows has dtype torch.int64, shape (); expected integers, (r,)."),
        ([[1]], TypeError, "rows has dtype torch.int64, shape (1, 1); expected integers, (r,)."),
    ],
)
def test_rows(rows: Any, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=re.escape(said)):
        rg.attention_weights(Q, K, rows=rows)


@pytest.mark.parametrize("p", [-0.1, 1.1, float("nan")])
def test_dropout_is_a_probability(p: float) -> None:
    with pytest.raises(ValueError, match=r"Dropout\(p=.*\): expected a probability from 0 to 1"):
        rg.Dropout(p)


def test_a_refused_call_changes_nothing() -> None:
    state, before = torch.get_rng_state(), Q.clone()
    with pytest.raises(rg.ShapeError):
        rg.attention(Q, K, V, mask=rg.Causal(), dropout=rg.Dropout(0.5))
    assert torch.equal(torch.get_rng_state(), state) and torch.equal(Q, before)


def test_tensors_of_a_problem_can_be_exchanged() -> None:
    at = testing.frame()
    case = testing.draw(at, score=testing.scores(at)["Pipeline"], mask=testing.masks(at)["And"])
    problem = build_problem(case.q, case.k, case.v, case.score, case.mask, case.positions, None)[0]
    own: tuple[Tensor, ...] = problem.tensors()
    twin = problem.with_tensors(tuple(t.clone() for t in own))
    assert all(a is not b and torch.equal(a, b) for a, b in zip(own, twin.tensors(), strict=True))
    assert twin.score == problem.score and twin.mask == problem.mask


def test_one_query_is_no_queries() -> None:
    said = (
        "1 query meets 17 keys under Causal(), and their positions are not given. Pass\n  positions=tail(1, 17) if the "
        "query is the last token (decoding), or positions=head(1, 17) if it is the first."
    )
    with pytest.raises(rg.ShapeError, match=re.escape(said)):
        rg.attention(Q[:, :, :1], K, V, mask=rg.Causal())
