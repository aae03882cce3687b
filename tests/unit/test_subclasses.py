"""A subclass of one of regard's own masks and scores that means something else is computed as it says, everywhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import regard as rg
from regard.call.of_part import mask_of_part, score_of_part
from regard.call.part import QueriesAndKeys
from regard.core.region import Frame, Region
from regard.masks.intervals import Interval
from regard.masks.to_peers import to_flash

N = 40


@dataclass(frozen=True)
class Strict(rg.Causal):
    """Earlier keys alone; says nothing of tiles and rows."""

    def visible(self, at: Region) -> Tensor:
        return at.i > at.j


@dataclass(frozen=True)
class Near(rg.Window):
    def visible(self, at: Region) -> Tensor:
        return (at.i - at.j).abs() < 3


@dataclass(frozen=True)
class Even(rg.Everything):
    def visible(self, at: Region) -> Tensor:
        return (at.col % 2 == 0) | (at.row < 0)


@dataclass(frozen=True)
class Behind(rg.Prefix):
    def visible(self, at: Region) -> Tensor:
        return at.j >= self.n


@dataclass(frozen=True)
class Absolute(rg.ScaledDot):
    def compare(self, q: Tensor, k: Tensor, at: Region) -> Tensor:
        return super().compare(q, k, at).abs()


@dataclass(frozen=True)
class Halved(rg.Additive):
    def compare(self, q: Tensor, k: Tensor, at: Region) -> Tensor:
        return super().compare(q, k, at) / 2 + at.row - at.row


@dataclass(frozen=True)
class Twice(rg.Bias):
    def modify(self, s: Tensor, at: Region) -> Tensor:
        return s + 2 * at.pairs(self.bias) + 0.01 * at.col


@dataclass(frozen=True)
class Weighed(rg.Bias):
    """With a second tensor."""

    weights: Tensor

    def modify(self, s: Tensor, at: Region) -> Tensor:
        return s + at.keys(self.weights) * at.pairs(self.bias)


@dataclass(frozen=True)
class Falling(rg.Alibi):
    def modify(self, s: Tensor, at: Region) -> Tensor:
        return s - at.heads(self.slopes) * (at.i - at.j).abs() ** 0.5


@dataclass(frozen=True)
class Kept(rg.SoftCap):
    def modify(self, s: Tensor, at: Region) -> Tensor:
        return s + self.cap


@dataclass(frozen=True)
class EvenKeys(rg.Mask):
    def visible(self, at: Region) -> Tensor:
        return (at.col % 2 == 0) | (at.row < 0)


@dataclass(frozen=True)
class EvenCausal(EvenKeys, rg.Causal):
    """`visible` of one parent, and nothing of what the other says of tiles and rows."""


class Squared:
    """A mixin."""

    def compare(self, q: Tensor, k: Tensor, at: Region) -> Tensor:
        return -((q[..., :, None, :] - k[..., None, :, :]) ** 2).sum(-1)


@dataclass(frozen=True)
class SquaredAdditive(Squared, rg.Additive):
    pass


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


BIAS, SCALED = drawn(N, N), rg.ScaledDot()
SCORES: dict[str, rg.Score] = {
    "absolute": Absolute(),
    "halved": Halved(drawn(8, 5), drawn(8, 5), drawn(5)),
    "squared": SquaredAdditive(drawn(8, 5), drawn(8, 5), drawn(5)),
    "twice": SCALED >> Twice(BIAS),
    "a bias, twice": SCALED >> rg.Bias(drawn(N)) >> Twice(BIAS),
    "weighed": SCALED >> Weighed(BIAS, drawn(N)),
    "falling": SCALED >> Falling(torch.tensor([0.5, 1.0], dtype=torch.float64)),
    "kept": SCALED >> Kept(2.0) >> rg.SoftCap(3.0),
}
MASKS: dict[str, rg.Mask] = {
    "strict": Strict(),
    "near": Near(5, 5),
    "even": Even(),
    "even of two parents": EvenCausal(),
    "even & causal": Even() & rg.Causal(),
    "causal & even": rg.Causal() & Even(),
    "behind": Behind(7),
}
AT = rg.head(N, N)


def definition(q: Tensor, k: Tensor, v: Tensor, score: str, mask: str) -> Tensor:
    """Written out, in float64."""
    i, j = torch.arange(N)[:, None], torch.arange(N)
    s: dict[str, Any] = {"": (q @ k.mT) / 8**0.5}
    s["absolute"] = s[""].abs()
    if score == "halved":
        w_q, w_k, w = (t for t in SCORES["halved"].tensors())
        s["halved"] = torch.tanh((q @ w_q)[..., :, None, :] + (k @ w_k)[..., None, :, :]) @ w / 2
    if score == "squared":  # of what Additive prepares
        w_q, w_k, _ = SCORES["squared"].tensors()
        s["squared"] = -(((q @ w_q)[..., :, None, :] - (k @ w_k)[..., None, :, :]) ** 2).sum(-1)
    s["twice"] = s[""] + 2 * BIAS + 0.01 * j
    s["a bias, twice"] = s["twice"] + drawn(N)
    s["weighed"] = s[""] + drawn(N) * BIAS
    s["falling"] = s[""] - torch.tensor([0.5, 1.0])[:, None, None] * (i - j).abs() ** 0.5
    s["kept"] = 3 * torch.tanh((s[""] + 2) / 3)
    seen = {
        "": i >= i.new_zeros(N),
        "strict": i > j,
        "near": (i - j).abs() < 3,
        "even": (j % 2 == 0).expand(N, N),
        "even of two parents": (j % 2 == 0).expand(N, N),
        "even & causal": (j % 2 == 0) & (i >= j),
        "causal & even": (j % 2 == 0) & (i >= j),
        "behind": (j >= 7).expand(N, N),
    }[mask]
    p = torch.softmax(s[score].masked_fill(~seen, -torch.inf), -1).nan_to_num(0)
    return p @ v


BACKENDS: dict[str, rg.Backend | None] = {
    "chosen": None,
    "tiled": rg.Tiled(rows=16, keys=16),
    "reference": rg.Reference(),
    "flex": rg.Flex(devices=("cpu",)),
    "sdpa": rg.Sdpa(devices=("cpu",)),
}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("score", "mask"), [*((s, "") for s in SCORES), *(("", m) for m in MASKS)])
def test_every_backend_computes_it_or_refuses(score: str, mask: str, backend: str) -> None:
    for dtype in (torch.float32, torch.float64):
        q, k, v = (drawn(2, 2, N, 8).roll(n).to(dtype) for n in range(3))
        given: dict[str, Any] = {"score": SCORES.get(score, SCALED), "mask": MASKS.get(mask, rg.Everything())}
        with torch.compiler.set_stance("force_eager"):
            try:
                out = rg.attention(q, k, v, **given, positions=AT, backend=BACKENDS[backend])
            except rg.Unsupported:
                assert backend in ("flex", "sdpa")
                return
        wanted = definition(q.double(), k.double(), v.double(), score, mask)
        torch.testing.assert_close(out.double(), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("score", "mask"), [*((s, "") for s in SCORES), *(("", m) for m in MASKS)])
def test_weights_and_facts_of_it(score: str, mask: str) -> None:
    q, k, v = (drawn(2, 2, N, 8).roll(n) for n in range(3))
    given: dict[str, Any] = {"score": SCORES.get(score, SCALED), "mask": MASKS.get(mask, rg.Everything())}
    p = rg.attention_weights(q, k, **given, positions=AT)
    torch.testing.assert_close(p @ v, definition(q, k, v, score, mask))
    torch.testing.assert_close(
        rg.look(q, k, facts=(rg.facts.Received(),), **given, positions=AT)[rg.facts.Received()], p.sum(-2)
    )


@pytest.mark.parametrize("score", [name for name in SCORES if name not in ("halved", "squared")])
def test_its_tensors_have_gradients(score: str) -> None:
    q, k, v = (drawn(2, 2, N, 8).roll(n).requires_grad_() for n in range(3))
    given = SCORES[score]
    tensors = [t.clone().requires_grad_() for t in given.tensors()]
    learned = given.with_tensors(iter(tensors))
    found, wanted = (
        torch.autograd.grad(rg.attention(q, k, v, score=learned, positions=AT, backend=b).square().sum(), [q, *tensors])
        for b in (None, rg.Reference())
    )
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(("score", "mask"), [*((s, "") for s in SCORES), *(("", m) for m in MASKS)])
def test_a_part_of_a_call(score: str, mask: str) -> None:
    q, k, v = (drawn(2, 2, N, 8).roll(n) for n in range(3))
    part = QueriesAndKeys(range(20, 40), range(0, 40), N, N)
    given: dict[str, Any] = {"score": SCORES.get(score, SCALED), "mask": MASKS.get(mask, rg.Everything())}
    own = {"score": score_of_part(given["score"], part), "mask": mask_of_part(given["mask"], part)}
    out = rg.attention(q[:, :, 20:], k, v, **own, positions=rg.tail(20, N))
    torch.testing.assert_close(out, definition(q, k, v, score, mask)[:, :, 20:])


@pytest.mark.parametrize("mask", [Strict(), Near(5, 5), Even()], ids=repr)
def test_flash_attention_has_no_argument_for_it(mask: rg.Mask) -> None:
    with pytest.raises(rg.Unsupported, match="has no argument for"):
        to_flash(mask)


def test_what_a_class_says_of_tiles_and_rows_itself_is_kept() -> None:
    @dataclass(frozen=True)
    class Own(rg.Causal):
        def visible(self, at: Region) -> Tensor:
            return at.i >= at.j

        def rows(self, frame: Frame) -> Interval:
            return super().rows(frame)

    assert Own().rows(Frame.of(4)) is not None and Own().rule() is None and rg.Causal().rule() is not None
    assert Strict().rows(Frame.of(4)) is None and not Strict().starts_at_first_key()
