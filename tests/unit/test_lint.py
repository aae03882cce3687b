"""lint: each finding with a call that has the defect and one that has not; no false alarm over ordinary calls."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import regard as rg
from regard import testing
from regard.inspect.lint.defect import Defect, Lint
from regard.masks.convert import from_blocked, from_key_padding

B, H, N, D = 3, 2, 40, 16


def qkv(batch: int = B, heads: int = H, n: int = N, d: int = D) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = torch.randn(3, batch, heads, n, d).unbind(0)
    return q, k, v


def linted(**given: Any) -> Lint:
    return rg.lint(*qkv(), **given)


def only(found: Lint, name: str) -> Defect:
    assert found.names == (name,), str(found)
    return found[0]


def real(*lengths: int) -> Tensor:
    """A padding mask (batch, N): True where a token is real."""
    return torch.arange(N) < torch.tensor(lengths)[:, None]


SOUND = {
    "nothing": {},
    "causal": {"mask": rg.Causal()},
    "causal, dense": {"mask": rg.Dense(torch.ones(N, N).tril().bool())},
    "strictly causal but for the first": {"mask": rg.Dense(torch.ones(N, N).tril(-1).bool() | torch.eye(N)[:1].bool())},
    "no query sees itself": {"mask": rg.Dense(~torch.eye(N).bool())},
    "window": {"mask": rg.Window(before=7, after=0)},
    "both sides, dense": {"mask": rg.Dense((torch.arange(N)[:, None] - torch.arange(N)).abs() < 5)},
    "ahead, said so": {"mask": rg.Window(before=None, after=1)},
    "prefix": {"mask": rg.Causal() | rg.Prefix(5)},
    "prefix, dense": {"mask": rg.Dense(torch.ones(N, N).tril().bool() | (torch.arange(N) < 5))},
    "prefixes, dense": {
        "mask": rg.Dense(
            torch.ones(N, N).tril().bool() | (torch.arange(N) < torch.tensor([1, 5, 9])[:, None, None, None])
        )
    },
    "blocks both ways": {"mask": rg.Causal() | rg.Documents(torch.arange(N) // 4)},
    "documents": {"mask": rg.Documents(torch.arange(N) // 9) & rg.Causal()},
    "documents, dense": {"mask": rg.Dense((torch.arange(N) // 9)[:, None] == torch.arange(N) // 9)},
    "every second": {"mask": rg.Where(lambda b, h, i, j: (i - j) % 2 == 0)},
    "lengths": {"mask": rg.Lengths(keys=torch.tensor([40, 7, 21]))},
    "padded queries": {"mask": rg.Lengths(keys=torch.tensor([40, 7, 21]), queries=torch.tensor([40, 7, 21]))},
    "padding, dense": {"mask": rg.Dense(real(40, 7, 21)[:, None, None, :])},
    "padding in front, dense": {"mask": rg.Dense(real(40, 7, 21).flip(-1)[:, None, None, :])},
    "padding longer than any": {"mask": rg.Dense(real(39, 7, 21)[:, None, None, :])},
    "padding, of torch": {"mask": from_key_padding(~real(40, 7, 21))},
    "causal, of torch": {"mask": from_blocked(torch.ones(N, N).triu(1).bool())},
    "bias": {"score": rg.ScaledDot() >> rg.Bias(torch.randn(N, N))},
    "bias that hides": {
        "score": rg.ScaledDot() >> rg.Bias(torch.zeros(N, N).masked_fill(torch.ones(N, N).triu(1) > 0, -math.inf))
    },
    "sink": {"sink": torch.zeros(H)},
    "alibi": {"score": rg.ScaledDot() >> rg.Alibi(rg.Alibi.geometric(H)), "mask": rg.Causal()},
    "within": {"mask": rg.Window(before=3, after=0), "within": rg.Causal()},
    "within, dense": {"mask": rg.Dense(torch.ones(N, N).tril().bool()), "within": rg.Causal()},
}


@pytest.mark.parametrize("name", SOUND)
def test_nothing_is_found_in_a_sound_call(name: str) -> None:
    found = linted(**SOUND[name])
    assert not found, str(found)
    assert str(found) == "nothing found"


def test_no_false_alarm_in_the_matrix() -> None:
    """Every mask, and every score, of the matrix: what is found is so by the dense definition."""
    frame = testing.frame()
    masks, scores = testing.masks(frame), testing.scores(frame)
    for name, mask in masks.items():
        call = testing.draw(frame, mask=mask, sink=True)
        found = rg.lint(call.q, call.k, call.v, mask=mask, positions=call.positions, sink=call.sink)
        empty = ~mask.visible(frame.region()).expand(frame.shape).any(-1)
        said = set(found.names) - ({"empty rows"} if empty.any() else set())
        assert not said, f"{name}: {found}"
    for name, score in scores.items():
        call = testing.draw(frame, score=score)
        found = rg.lint(call.q, call.k, call.v, score=score, positions=call.positions)
        p = rg.attention_weights(call.q, call.k, score=score, positions=call.positions)
        sharp = (p.square().sum(-1) > 0.99).double().mean(-1)
        assert set(found.names) <= ({"saturated scores"} if (sharp >= 0.5).any() else set()), f"{name}: {found}"


def test_axes_and_kinds_of_arrays() -> None:
    np = pytest.importorskip("numpy")
    q, k, v = torch.randn(3, 12, 8).unbind(0)
    assert not rg.lint(q, k, v, mask=rg.Causal())
    assert not rg.lint(*(np.asarray(t) for t in (q, k, v)), mask=rg.Causal())
    assert not rg.lint(*(t.expand(2, 12, 8) for t in (q, k, v)))
    assert not rg.lint(q.expand(2, 4, 12, 8), k.expand(2, 2, 12, 8), v.expand(1, 2, 12, 8), mask=rg.Causal())
    assert not rg.lint(*(t.to(torch.bfloat16) for t in (q, k, v)))
    for n, nk in ((0, 5), (5, 0), (0, 0)):
        assert not rg.lint(q[:n], k[:nk], v[:nk], mask=rg.Dense(torch.ones(n, nk) > 0))


def test_empty_rows() -> None:
    mask = torch.ones(N, N).tril().bool()
    mask[5] = mask[9] = False
    found = only(linted(mask=rg.Dense(mask)), "empty rows")
    assert found.number == 2 * B
    assert "6 of 120 queries see no key (first: batch 0, query 5)" in found.said
    assert "Lengths(queries=lengths)" in found.cure
    assert not linted(mask=rg.Dense(mask) | rg.Prefix(1))


def test_positions_that_differ_between_sequences() -> None:
    """As in decoding with a cache of ragged lengths: nothing is found in a call that is right."""
    q, (k, v) = torch.randn(2, 4, 1, 16), torch.randn(2, 2, 4, 7, 16)
    real = torch.arange(7) < torch.tensor([7, 3])[:, None]
    mask, at = rg.Causal() & rg.Dense(real[:, None, None, :]), rg.tail(1, [7, 3])
    assert not rg.lint(q, k, v, mask=mask, positions=at)
    late = rg.Dense(torch.ones(2, 1, 5, 7) > 0) & rg.Window(before=None, after=1)
    at = rg.Positions(torch.stack([torch.arange(5), torch.arange(5) + 1]), torch.arange(7))
    found = rg.lint(torch.randn(2, 4, 5, 16), k, v, mask=late, positions=at, within=rg.Causal())
    assert found.names == ("future leak", "beyond Causal()")
    assert [defect.number for defect in found] == [10, 10]  # a pair that any sequence shows, of 5 in each


def test_empty_rows_by_a_bias_in_one_head() -> None:
    bias = torch.zeros(H, N, N)
    bias[1, 3] = -math.inf
    found = only(linted(score=rg.ScaledDot() >> rg.Bias(bias)), "empty rows")
    assert found.number == B and "(first: batch 0, head 1, query 3)" in found.said


def test_a_sequence_without_a_key() -> None:
    found = only(linted(mask=rg.Lengths(keys=torch.tensor([40, 0, 7]))), "empty rows")
    assert found.number == N and "1 of 3 sequences or heads sees nothing at all" in found.said


def test_queries_before_every_key() -> None:
    q, k, v = qkv()
    found = rg.lint(q, k[..., :30, :], v[..., :30, :], mask=rg.Causal(), positions=rg.tail(N, 30))
    assert only(found, "empty rows").number == 10 * B
    assert not rg.lint(q, k[..., :30, :], v[..., :30, :], mask=rg.Causal(), positions=rg.head(N, 30))


BLOCKED = torch.ones(N, N).triu(1).bool()  # True = masked


@pytest.mark.parametrize(
    ("mask", "names", "said"),
    [
        (rg.Dense(BLOCKED), ("empty rows", "inverted mask"), "only keys after their own position"),
        (rg.Dense(BLOCKED.expand(B, 1, N, N)), ("empty rows", "inverted mask"), "only keys after their own position"),
        (~rg.Causal(), ("empty rows", "inverted mask"), "only keys after their own position"),
        (~rg.Window(before=5, after=5), ("inverted mask",), "only distant keys"),
        (rg.Where(lambda b, h, i, j: i // 9 != j // 9), ("inverted mask",), "only distant keys"),
    ],
)
def test_inverted_masks(mask: rg.Mask, names: tuple[str, ...], said: str) -> None:
    found = linted(mask=mask)
    assert found.names == names, str(found)
    assert found[-1].number == N and said in found[-1].said and "from_blocked" in found[-1].cure
    assert not linted(mask=~mask)


@pytest.mark.parametrize("low", [-math.inf, torch.finfo(torch.float32).min, -1e9, -1e4])
def test_an_inverted_mask_as_a_bias(low: float) -> None:
    found = linted(score=rg.ScaledDot() >> rg.Bias(torch.zeros(N, N).masked_fill(~BLOCKED, low)))
    assert "inverted mask" in found.names
    assert not linted(score=rg.ScaledDot() >> rg.Bias(torch.zeros(N, N).masked_fill(BLOCKED, low)))


@pytest.mark.parametrize("flip", [False, True])
def test_an_inverted_padding_mask(flip: bool) -> None:
    mask = real(40, 7, 21).flip(-1) if flip else real(40, 7, 21)
    found = linted(mask=rg.Dense(~mask[:, None, None, :]))
    assert found.names == ("empty rows", "inverted mask"), str(found)
    assert found[1].number == 1 and "from_key_padding" in found[1].cure
    assert f"the others see only the {'first' if flip else 'last'} keys" in found[1].said
    assert not linted(mask=rg.Dense(mask[:, None, None, :]))


def test_a_sequence_without_a_key_is_no_inverted_mask() -> None:
    for mask in (
        real(40, 0, 21)[:, None, None],
        real(30, 0, 21)[:, None, None] & ~BLOCKED,
        torch.zeros(B, 1, 1, N) > 0,
    ):
        only(linted(mask=rg.Dense(mask)), "empty rows")


def test_cross_attention_has_no_diagonal() -> None:
    """Queries and keys of two sequences, positions not given: the mask is not compared with positions."""
    q, k, v = qkv()
    k, v = k[..., :25, :], v[..., :25, :]
    ahead = torch.arange(25) - torch.arange(N)[:, None]
    for mask, name in ((ahead.abs() > 3, "inverted mask"), (ahead <= 1, "future leak")):
        assert not rg.lint(q, k, v, mask=rg.Dense(mask))
        only(rg.lint(q, k, v, mask=rg.Dense(mask), positions=rg.head(N, 25)), name)


def test_future_leaks() -> None:
    late = only(linted(mask=rg.Dense(torch.ones(N, N).tril(1).bool())), "future leak")
    assert late.number == N - 1 and "every query sees 1 ahead" in late.said
    late = only(linted(mask=rg.Where(lambda b, h, i, j: j <= i + 3)), "future leak")
    assert "every query sees 3 ahead" in late.said
    few = torch.ones(N, N).tril().bool()
    few[7, 30] = few[8, 31] = True
    found = only(linted(mask=rg.Dense(few)), "future leak")
    assert found.number == 2 and "2 pairs look ahead, beside 780 that look back; the first is of query 7" in found.said
    assert not linted(mask=rg.Dense(few) & rg.Causal())
    in_one = few.expand(B, H, N, N).clone()
    in_one[:, 0] = in_one[1:] = torch.ones(N, N).tril().bool()
    assert only(linted(mask=rg.Dense(in_one)), "future leak").number == 2


def test_a_leak_as_a_bias() -> None:
    leaky = torch.zeros(N, N).masked_fill(torch.ones(N, N).triu(2).bool(), -math.inf)
    assert only(linted(score=rg.ScaledDot() >> rg.Bias(leaky)), "future leak").number == N - 1


def test_beyond_what_a_mask_should_stay_within() -> None:
    found = only(linted(mask=rg.Window(before=3, after=2), within=rg.Causal()), "beyond Causal()")
    assert found.number == 39 + 38 and "(first: query 0, key 1)" in found.said
    found = only(linted(within=rg.Lengths(keys=torch.tensor([40, 40, 39]))), "beyond Lengths(keys=int64[3])")
    assert found.number == N and "key 39" in found.said
    q, k, v = qkv()
    decoding = {"mask": rg.Causal(), "within": rg.Window(before=9, after=0)}
    found = rg.lint(q[..., :2, :], k, v, positions=rg.tail(2, N), **decoding)
    assert only(found, "beyond Window(before=9, after=0)").number == 29 + 30
    with pytest.raises(rg.ShapeError, match=r"Dense\.allowed"):
        linted(within=rg.Dense(torch.ones(3, 4) > 0))
    with pytest.raises(rg.ShapeError, match="positions are not given"):
        rg.lint(q[..., :1, :], k, v, within=rg.Causal())
    with pytest.raises(TypeError, match=r"within is a Tensor of .*; write Dense"):
        linted(within=torch.ones(N, N) > 0)


def test_a_mask_as_a_bias() -> None:
    ones = torch.ones(N, N).tril()
    with pytest.warns(UserWarning, match="only 0 and 1"):
        score = rg.ScaledDot() >> rg.Bias(ones)
    found = only(linted(score=score), "mask as a bias")
    assert found.number == int(ones.sum()) and "Dense(bias.bool())" in found.cure
    assert not linted(score=rg.ScaledDot() >> rg.Bias(2 * ones))


def test_padding_that_hides_queries() -> None:
    mask = real(40, 7, 21)
    found = linted(mask=rg.Dense(mask[:, None, :, None]))
    assert found.names == ("empty rows", "padding on the wrong axis"), str(found)
    assert found[1].number == 33 + 19 and "mask[:, None, None, :]" in found[1].cure
    assert not linted(mask=rg.Dense(mask[:, None, None, :]))


def test_a_batch_read_as_queries() -> None:
    q, k, v = (torch.randn(5, H, n, D) for n in (5, N, N))
    mask = real(40, 7, 21, 3, 30)
    with pytest.warns(UserWarning, match="as many sequences as queries"):
        found = rg.lint(q, k, v, mask=rg.Dense(mask))
    only(found, "padding on the wrong axis")
    assert "read as (nq, nk)" in found[0].said and "3 to 40 keys" in found[0].said
    assert not rg.lint(q, k, v, mask=rg.Dense(mask[:, None, None, :]))
    q, k, v = qkv(4, H, 4)
    with pytest.warns(UserWarning, match="as many sequences as queries"):
        found = rg.lint(q, k, v, mask=rg.Dense(torch.ones(4, 4).tril().bool()))
    assert not found  # lengths of 1 to 4 are causal


def test_padding_at_the_other_end() -> None:
    q, k, v = qkv()
    for n, length in enumerate((40, 7, 21)):
        k[n, :, : N - length] = v[n, :, : N - length] = 0
    lengths = torch.tensor([40, 7, 21])
    found = rg.lint(q, k, v, mask=rg.Lengths(keys=lengths))
    assert found.names == ("padding in the wrong place", "constant scores")  # two sequences see zeros alone
    assert found[0].number == 7 + 19 and "(first seen: batch 1, key 0)" in found[0].said
    assert not rg.lint(q, k, v, mask=rg.Dense(real(40, 7, 21).flip(-1)[:, None, None, :]))
    assert not rg.lint(q, k.flip(-2), v.flip(-2), mask=rg.Lengths(keys=lengths))
    k, v = (torch.randn(B, H, N, D) for _ in range(2))
    k[..., :5, :] = v[..., :5, :] = 0
    assert not rg.lint(q, k, v)  # nothing is hidden instead
    k[:, 0], v[:, 0] = torch.randn(2, B, N, D)
    assert not rg.lint(q, k, v, mask=rg.Lengths(keys=lengths + (lengths < 30) * 10))  # of one head alone


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_where_what_is_not_finite_comes_from(name: str, bad: float) -> None:
    given = dict(zip("qkv", qkv(), strict=True))
    given[name][1, 0, 20, 3] = given[name][2, 1, 30, 4] = bad
    found = rg.lint(**given, mask=rg.Causal())
    assert found[0].name == "not finite" and found[0].number == 2
    assert f"the first is {name}[1, 0, 20, 3]" in found[0].said
    assert ("2 NaN and 0 infinite" if math.isnan(bad) else "0 NaN and 2 infinite") in found[0].said
    assert "scores not finite" not in found.names
    keys = torch.tensor([40, 20, 30])
    hidden = rg.Lengths(queries=keys) if name == "q" else rg.Lengths(keys=keys)
    assert not rg.lint(**given, mask=hidden)  # it leaks nowhere


def test_what_is_not_finite_in_grouped_heads_and_fewer_axes() -> None:
    q, k, v = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8), torch.randn(1, 2, 6, 8)
    v[0, 1, 5] = math.nan
    mask = rg.Dense(torch.ones(2, 4, 6, 6).bool())
    mask.allowed[:, 2:, :, 5] = False
    assert not rg.lint(q, k, v, mask=mask)
    mask.allowed[1, 3, 0, 5] = True
    assert "v[0, 1, 5, 0]" in only(rg.lint(q, k, v, mask=mask), "not finite").said
    flat = torch.randn(3, 6, 8)
    flat[1, 2, 3] = math.nan
    assert "k[2, 3]" in rg.lint(*flat.unbind(0))[0].said


def test_where_it_comes_from_in_a_score() -> None:
    bias, slopes = torch.zeros(N, N), torch.ones(H)
    bias[3, 4] = math.nan
    bias[3, 5] = -math.inf
    found = linted(score=rg.ScaledDot() >> rg.Bias(bias))
    assert found[0].number == 1 and "Bias.bias holds 1 NaN" in found[0].said and "Bias.bias[3, 4]" in found[0].said
    slopes[1] = math.inf
    assert "Alibi.slopes[1]" in linted(score=rg.ScaledDot() >> rg.Alibi(slopes), mask=rg.Causal())[0].said
    assert "ScaledDot.scale" in linted(score=rg.ScaledDot(torch.tensor(math.nan)))[0].said
    w = torch.tensor([1.0, math.nan])
    custom = rg.Custom(lambda q, k, w: (q * w.sum()) @ k.mT, tensors=(w,))
    assert "Custom.inputs[0][1]" in linted(score=custom)[0].said
    assert "sink" in linted(sink=torch.tensor([0.0, math.nan]))[0].said
    assert not linted(sink=torch.tensor([0.0, -math.inf]))


def test_a_bias_is_looked_at_where_the_mask_shows_it() -> None:
    future = torch.zeros(H, N, N)
    future[1, 0, 5] = math.nan
    score = rg.ScaledDot() >> rg.Bias(future)
    assert not linted(score=score, mask=rg.Causal())
    assert "Bias.bias[1, 0, 5]" in only(linted(score=score), "not finite").said
    future[0, 7, 2] = math.inf
    found = only(linted(score=score, mask=rg.Causal()), "not finite")
    assert found.number == 1 and "0 NaN and 1 infinite" in found.said and "Bias.bias[0, 7, 2]" in found.said
    of_keys = torch.zeros(N)
    of_keys[N - 1] = math.nan
    padded = rg.Lengths(keys=torch.full((3,), N - 1))
    assert not linted(score=rg.ScaledDot() >> rg.Bias(of_keys), mask=padded)
    assert "Bias.bias[" in only(linted(score=rg.ScaledDot() >> rg.Bias(of_keys)), "not finite").said


def test_no_queries_are_within_every_mask() -> None:
    x = torch.zeros(1, 1, 0, 8)
    assert not rg.lint(x, x, x, mask=rg.Causal(), within=rg.Causal())


def test_a_score_that_makes_nan() -> None:
    score = rg.Custom(lambda q, k: (q @ k.mT - 2).sqrt())
    found = only(linted(score=score), "scores not finite")
    assert found.number > 0 and "are finite" in found.said
    assert not linted(score=rg.Custom(lambda q, k: (q @ k.mT).abs().sqrt()))


def test_saturated_scores() -> None:
    q, k, v = qkv(d=64)
    found = only(rg.lint(40 * q, k, v), "saturated scores")
    assert found.number > 0.5 * B * H * N
    assert f"the largest score there is {float(rg.attention_scores(40 * q, k).amax()):.4g}" in found.said
    one = q.clone()
    one[1, 1] *= 20
    assert "in 1 of 6 heads (first: batch 1, head 1)" in only(rg.lint(one, k, v), "saturated scores").said
    assert not rg.lint(q, k, v)
    assert not rg.lint(40 * q, k, v, score=rg.ScaledDot() >> rg.SoftCap(3.0))
    assert not rg.lint(40 * q, k, v, mask=rg.Window(before=0, after=0))  # one key is no choice


@pytest.mark.parametrize("sink", [None, 1.0])
def test_constant_scores(sink: float | None) -> None:
    q, k, v = qkv()
    found = only(rg.lint(torch.zeros_like(q), k, v, mask=rg.Causal(), sink=sink), "constant scores")
    assert found.number == B * H * (N - 1)
    assert only(rg.lint(q, k[..., :1, :].expand_as(k), v, sink=sink), "constant scores").number == B * H * N
    one = q.clone()
    one[2, 0] = 0
    assert "in 1 of 6 heads (first: batch 2, head 0)" in only(rg.lint(one, k, v), "constant scores").said
    one[2, 0, 20:] = torch.randn(20, D)
    assert not rg.lint(one, k, v, sink=sink)  # half of its rows
    assert not rg.lint(q, k, v, sink=sink)


def test_how_it_prints() -> None:
    found = Lint((Defect("empty rows", 3, "3 of 9 queries see no key.", "Look."), Defect("x", 1, "y.", "z.")))
    assert repr(found) == "empty rows: 3 of 9 queries see no key.\n  -> Look.\nx: y.\n  -> z."
    assert found and len(found) == 2 and list(found) == [found[0], found[1]]
    assert all(len(line) <= 110 for line in str(linted(mask=~rg.Causal())).splitlines())


def test_a_graph_is_refused() -> None:
    q = torch.zeros(1, 1, 3, 4, device="meta")
    with pytest.raises(rg.Unsupported, match="lint looks at numbers"):
        rg.lint(q, q, q)


def test_arguments_are_those_of_attention() -> None:
    with pytest.raises(TypeError, match=r"mask is a Tensor of torch.bool|mask is a Tensor of bool"):
        linted(mask=torch.ones(N, N) > 0)
    q, k, v = qkv()
    with pytest.raises(rg.ShapeError, match="positions are not given"):
        rg.lint(q, k[..., :5, :], v[..., :5, :], mask=rg.Causal())
