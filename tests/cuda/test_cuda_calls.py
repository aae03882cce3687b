"""The library on tensors of a GPU: each call answers there what it answers on the CPU, in float64.

test_pretended.py runs this file where there is no GPU too, on tests/pretended_device.py, to see that no operation has
tensors of two devices.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import regard as rg
from fact_checks import every
from pretended_device import begin
from regard import testing
from regard.compat import flash_attention as flash
from regard.compat import torch as like_torch
from regard.nn import FixedCache, GrowingCache, KVCache, PagedCache, RollingCache
from tiny_models import DECODERS

DEVICE = os.environ.get("REGARD_TEST_DEVICE", "cuda")
if DEVICE == "cuda":
    pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
else:
    begin()
needs_cuda = pytest.mark.skipif(DEVICE != "cuda", reason="the pretended device cannot")

F64 = torch.float64


def drawn(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape, dtype=F64) for shape in shapes]


def qkv(n: int = 37, heads: int = 6, key_heads: int = 2) -> list[Tensor]:
    return drawn((2, heads, n, 16), (2, key_heads, n, 16), (2, key_heads, n, 8))


def agrees(call: Callable[..., Any], *given: Any) -> None:
    """call(*given) with its tensors on the GPU, and on the CPU: the same results, on the device of what was given."""
    there = pytree.tree_map_only(Tensor, lambda t: t.to(DEVICE), given)
    expected, found = pytree.tree_leaves(call(*given)), pytree.tree_leaves(call(*there))
    assert len(expected) == len(found) > 0
    for a, b in zip(found, expected, strict=True):
        if isinstance(b, Tensor):
            assert a.device.type == DEVICE and b.device.type == "cpu"
            torch.testing.assert_close(a.cpu(), b, rtol=1e-9, atol=1e-9, equal_nan=True)
        else:
            assert a == b


def with_gradients(call: Callable[..., Tensor]) -> Callable[..., Any]:
    """The call's result, and the gradients of its tensors."""

    def both(*given: Tensor) -> Any:
        leaves = [t.detach().requires_grad_() for t in given]
        out = call(*leaves)
        return out, torch.autograd.grad((out * torch.linspace(-1, 1, out.shape[-1]).to(out)).sum(), leaves)

    return both


def additive(q: Tensor) -> rg.Score:
    w = torch.linspace(-1, 1, 16 * 5, dtype=q.dtype, device=q.device).reshape(16, 5)
    return rg.Additive(w, w * 0.7, w[0])


SCORES: dict[str, Callable[[Tensor], rg.Score]] = {
    "scaled": lambda q: rg.ScaledDot(),
    "slopes and cap": lambda q: rg.ScaledDot() >> rg.Alibi(torch.linspace(0.1, 1, 6).to(q)) >> rg.SoftCap(5.0),
    "additive": additive,
    "elementwise": lambda q: rg.Elementwise(lambda q, k: -(q - k).abs()),
    "custom": lambda q: rg.Custom(lambda q, k: torch.tanh(q @ k.mT)),
}


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("mask", [rg.Everything(), rg.Causal(), rg.Causal() & rg.Window(before=5, after=0)], ids=str)
def test_attention_with_gradients(mask: rg.Mask, score: str) -> None:
    agrees(with_gradients(lambda q, k, v: rg.attention(q, k, v, score=SCORES[score](q), mask=mask)), *qkv())


@pytest.mark.parametrize("mask", [rg.Everything(), rg.Causal()], ids=str)
@pytest.mark.parametrize("headed", [True, False])
def test_calls_of_a_structure_seen_before(mask: rg.Mask, headed: bool) -> None:
    q, k, v = qkv() if headed else [t[:, 0] for t in qkv()]
    for n in (37, 37, 12, 1):
        agrees(lambda q, k, v: rg.attention(q, k, v, mask=mask), *(t[..., :n, :] for t in (q, k, v)))
    v[..., 5, 0] = torch.nan  # what a query may not see does not reach it
    agrees(lambda q, k, v: rg.attention(q, k, v, mask=mask), q, k, v)


def test_lengths_in_lists_have_no_device() -> None:
    lists = rg.Causal() & rg.Lengths([30, 7], first=[2, 0])
    for _ in range(2):  # the second time somebody has looked at the mask
        agrees(with_gradients(lambda q, k, v: rg.attention(q, k, v, mask=lists)), *qkv())
        assert str(lists)

    def mixed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return rg.attention(q, k, v, mask=rg.Lengths([30, 7], first=torch.tensor([2, 0], device=q.device)))

    agrees(with_gradients(mixed), *qkv())


def test_dropout_has_the_bits_of_the_cpu() -> None:
    call = lambda q, k, v: rg.attention(q, k, v, dropout=rg.Dropout(0.3, seed=7))  # noqa: E731
    agrees(with_gradients(call), *qkv())


def test_seeds_come_from_torch_s_generator() -> None:
    q, k, v = (t.to(DEVICE) for t in qkv())
    outs = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        outs.append(rg.attention(q, k, v, dropout=rg.Dropout(0.3)))
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])


def test_states_merge() -> None:
    def halves(q: Tensor, k: Tensor, v: Tensor) -> Any:
        a = rg.attention_state(q, k[..., :20, :], v[..., :20, :])
        b = rg.attention_state(q, k[..., 20:, :], v[..., 20:, :])
        return (a | b).finish()

    agrees(halves, *qkv())


def test_weights_scores_and_numbers() -> None:
    q, k, _ = qkv()
    mask = rg.Causal()
    agrees(lambda q, k: rg.attention_weights(q, k, mask=mask), q, k)
    agrees(lambda q, k: rg.attention_scores(q, k, mask=mask), q, k)
    agrees(with_gradients(lambda q, k: rg.entropy(q, k, mask=mask)), q, k)
    agrees(lambda q, k: rg.max_score(q, k, mask=mask), q, k)


def moved(fact: Any) -> Any:
    """A fact whose tensors are on the GPU."""
    held = {field.name: getattr(fact, field.name) for field in fields(fact) if field.init}
    there = {name: x.to(DEVICE) for name, x in held.items() if isinstance(x, Tensor)}
    return replace(fact, **there, **{name: moved(x) for name, x in held.items() if isinstance(x, rg.facts.Fact)})


def test_facts() -> None:
    q, k, _ = qkv()
    wanted = every(testing.frame((2,), 6, 37, 37))
    expected = rg.look(q, k, facts=wanted, mask=rg.Causal())
    there = tuple(map(moved, wanted))
    found = rg.look(q.to(DEVICE), k.to(DEVICE), facts=there, mask=rg.Causal())
    for on_cpu, on_gpu in zip(wanted, there, strict=True):
        pairs = zip(pytree.tree_leaves(found[on_gpu]), pytree.tree_leaves(expected[on_cpu]), strict=True)
        for a, b in pairs:
            allowed = 1 if isinstance(on_cpu, rg.facts.Quantised) else 1e-9  # halfway between two levels
            same = torch.isclose(a.cpu().double(), b.double(), rtol=1e-9, atol=allowed, equal_nan=True)
            assert a.device.type == DEVICE and same.all(), repr(on_cpu)


def caches(name: str, device: str) -> KVCache:
    made = {
        "growing": lambda: GrowingCache(),
        "fixed": lambda: FixedCache(2, 2, 40, 16, 8, F64, device=device),
        "rolling": lambda: RollingCache(7),
        "paged": lambda: PagedCache(2, 2, 20, 5, 16, 8, F64, device=device),
    }
    return made[name]()


@pytest.mark.parametrize("name", ["growing", "fixed", "rolling", "paged"])
def test_caches(name: str) -> None:
    def decode(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache, parts = caches(name, str(q.device)), []
        for a, b in ((0, 20), (20, 21), (21, 22), (22, 37)):
            seen = cache.append(k[..., a:b, :], v[..., a:b, :])
            mask = rg.Causal() & cache.mask
            parts.append(rg.attention(q[..., a:b, :], *seen, mask=mask, positions=cache.positions))
        return torch.cat(parts, -2)

    agrees(decode, *qkv())


def test_caches_of_eight_bits() -> None:
    def decode(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache = FixedCache(2, 2, 40, 16, 8, torch.int8, device=q.device)
        seen = cache.append(k, v)
        return rg.attention(q, *seen, mask=rg.Causal() & cache.mask, positions=cache.positions)

    agrees(decode, *qkv())


@needs_cuda
def test_lists_of_sequences() -> None:
    lengths = [5, 17, 1, 9]
    q, k, v = ([t[0, :, :n].transpose(0, 1) for n in lengths] for t in qkv(heads=2))

    def packed(q: list[Tensor], k: list[Tensor], v: list[Tensor]) -> Any:
        several = [torch.nested.nested_tensor(x, layout=torch.jagged).transpose(1, 2) for x in (q, k, v)]
        return rg.attention(*several, mask=rg.Causal()).values()

    agrees(packed, q, k, v)


def test_layers() -> None:
    layer = rg.nn.MultiHeadAttention(24, 6, key_heads=2, rotary=rg.nn.Rotary(4), dtype=F64)
    there = rg.nn.MultiHeadAttention(24, 6, key_heads=2, rotary=rg.nn.Rotary(4), dtype=F64)
    there.load_state_dict(layer.state_dict())
    there.to(DEVICE)

    def run(x: Tensor) -> Any:
        return (there if x.device.type == DEVICE else layer)(x, mask=rg.Causal())

    agrees(with_gradients(run), *drawn((2, 19, 24)))
    agrees(lambda x: (there if x.device.type == DEVICE else layer).per_head(x), *drawn((2, 19, 24)))


def test_record_and_report() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 8, batch_first=True, dtype=F64), 2).eval()
    x = drawn((1, 30, 64))[0]
    facts = (rg.facts.Entropy(), rg.facts.Top(3), rg.facts.Received(), rg.facts.Inputs())
    with rg.record(model, facts=facts) as expected:
        out = model(x)
    model.to(DEVICE)
    with rg.record(model, facts=facts) as tape:
        found = model(x.to(DEVICE))
    torch.testing.assert_close(found.cpu(), out, rtol=1e-9, atol=1e-9)
    assert len(tape.calls) == len(expected.calls) == 2
    for ours, theirs in zip(tape.calls, expected.calls, strict=True):
        torch.testing.assert_close(ours[facts[0]].cpu(), theirs[facts[0]], rtol=1e-9, atol=1e-9)
        assert torch.equal(ours[facts[1]].keys.cpu(), theirs[facts[1]].keys)
    torch.testing.assert_close(rg.rollout(tape).cpu(), rg.rollout(expected).cpu(), rtol=1e-9, atol=1e-9)
    with rg.monitor(model) as numbers:
        model(x.to(DEVICE))
    assert numbers is not None


def test_torch_s_names() -> None:
    q, k, v = qkv(heads=2)
    v = torch.cat([v, v], -1)
    agrees(lambda *x: like_torch.scaled_dot_product_attention(*x, is_causal=True), q, k, v)
    agrees(lambda *x: like_torch.flex_attention(*x, score_mod=lambda s, b, h, i, j: s - (i - j).abs() * 0.1), q, k, v)
    x = [t.transpose(1, 2) for t in (q, k, v)]
    agrees(lambda *x: flash.flash_attn_func(*x, causal=True, window_size=(5, 0)), *x)
    starts = torch.tensor([0, 5, 22, 37], dtype=torch.int32)
    flat = [t[0] for t in x]
    agrees(lambda q, k, v, s: flash.flash_attn_varlen_func(q, k, v, s, s, 17, 17, causal=True), *flat, starts)


def test_patched_models() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 8, batch_first=True), 2).eval().to(DEVICE)
    x = torch.randn(2, 30, 64, device=DEVICE)
    out = model(x)
    with rg.patch():
        found = model(x)
    torch.testing.assert_close(found, out, rtol=1e-4, atol=1e-5)


@needs_cuda
def test_autocast() -> None:
    layer = rg.nn.MultiHeadAttention(64, 4).to(DEVICE)
    x = torch.randn(2, 33, 64, device=DEVICE)
    with torch.autocast("cuda", torch.bfloat16):
        out = layer(x, mask=rg.Causal())
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), layer(x, mask=rg.Causal()), rtol=0.05, atol=0.05)


@needs_cuda
def test_functions_that_draw_on_the_gpu_are_refused() -> None:
    """The generator of a GPU is another than the CPU's."""
    q = torch.randn(1, 2, 12, 8, device=DEVICE, requires_grad=True)
    drawn_there = rg.Where(lambda b, h, i, j: torch.rand(12, 12, device=DEVICE) > 0.3)
    with pytest.raises(rg.Unsupported, match="draws random numbers"):
        rg.attention(q, q, q, mask=drawn_there, backend=rg.Tiled())


@needs_cuda
@pytest.mark.parametrize("mask", [rg.Causal(), rg.Window(before=9, after=0)], ids=str)
def test_compiled(mask: rg.Mask) -> None:
    call = lambda q, k, v: rg.attention(q, k, v, mask=mask) * 2  # noqa: E731
    q, k, v = (t.float().to(DEVICE) for t in qkv(64))
    torch.testing.assert_close(torch.compile(call, fullgraph=True)(q, k, v), call(q, k, v), rtol=1e-4, atol=1e-5)


def test_models_of_transformers() -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    import regard.compat.transformers  # noqa: F401

    tiny = DECODERS["Llama"]
    x = torch.randint(3, 60, (2, 13))
    ours, theirs = (tiny.build(name).to(DEVICE) for name in ("regard", "eager"))
    seen = torch.ones(2, 13, dtype=torch.int64)
    seen[0, :4] = 0
    given = {"input_ids": x.to(DEVICE), "attention_mask": seen.to(DEVICE)}
    kept = seen.bool().to(DEVICE)
    torch.testing.assert_close(ours(**given).logits[kept], theirs(**given).logits[kept], rtol=1e-3, atol=1e-4)
    options = {"max_new_tokens": 12, "do_sample": False}
    assert torch.equal(ours.generate(**given, **options), theirs.generate(**given, **options))


def test_tensors_of_two_devices_are_refused() -> None:
    q, k, v = qkv()
    with pytest.raises(ValueError, match=rf"k is on cpu, q on {DEVICE}:0; expected one device"):
        rg.attention(q.to(DEVICE), k, v)
    slopes = rg.ScaledDot() >> rg.Alibi(torch.ones(6, dtype=F64))
    with pytest.raises(ValueError, match=rf"cpu.*{DEVICE}:0|{DEVICE}:0.*cpu"):
        rg.attention(*(t.to(DEVICE) for t in (q, k, v)), score=slopes)
    seen = rg.Dense(torch.ones(37, 37, dtype=torch.bool))
    with pytest.raises(ValueError, match=rf"cpu.*{DEVICE}:0|{DEVICE}:0.*cpu"):
        rg.attention(*(t.to(DEVICE) for t in (q, k, v)), mask=seen)
