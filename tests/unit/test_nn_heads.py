"""What layers have in common: masks, positions, sinks, norms, dropout, axes, copies and errors."""

from __future__ import annotations

import copy
import pickle
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import regard as rg

exact = partial(torch.testing.assert_close, rtol=0, atol=1e-12)
DOUBLE = {"dtype": torch.float64}
WIDTH, HEADS, NQ, NK, BATCH = 12, 3, 7, 11, 2


def layer_of(**options: object) -> rg.nn.MultiHeadAttention:
    return rg.nn.MultiHeadAttention(WIDTH, HEADS, **{**DOUBLE, **options})  # type: ignore[arg-type]


def sequence(*lead: int, n: int = NQ, width: int = WIDTH) -> Tensor:
    return torch.randn(*lead, n, width, **DOUBLE)


def composed(layer: rg.nn.MultiHeadAttention, x: Tensor, c: Tensor, **options: object) -> Tensor:
    """A layer without rotary and norm as calls of its parts, with the reference backend."""
    q, k, v = (
        p(t).unflatten(-1, (HEADS, -1)).transpose(-3, -2)
        for p, t in ((layer.q_proj, x), (layer.k_proj, c), (layer.v_proj, c))
    )
    out = rg.attention(q, k, v, backend=rg.Reference(), **options)  # type: ignore[arg-type]
    return layer.out_proj(out.transpose(-3, -2).flatten(-2))


MASKS = {
    "lengths": (rg.Lengths(torch.tensor([NK, 4])), None),
    "causal, queries last": (rg.Causal(), rg.tail(NQ, NK)),
    "window, queries first": (rg.Window(before=2, after=1), rg.head(NQ, NK)),
    "positions of each sequence": (rg.Causal(), rg.Positions(torch.randint(NK, (BATCH, NQ)), torch.arange(NK))),
    "dense": (rg.Dense(torch.rand(BATCH, HEADS, NQ, NK) < 0.5), None),
}


@pytest.mark.parametrize("name", MASKS)
def test_cross_attention_with_masks_and_positions(name: str) -> None:
    mask, positions = MASKS[name]
    layer, x, c = layer_of(d_context=5), sequence(BATCH), sequence(BATCH, n=NK, width=5)
    exact(layer(x, c, mask=mask, positions=positions), composed(layer, x, c, mask=mask, positions=positions))
    weights = layer.weights(x, c, mask=mask, positions=positions)
    assert weights.shape == (BATCH, HEADS, NQ, NK)
    hidden = ~mask.on(NQ, NK, positions=positions, batch=(BATCH,), heads=HEADS).dense()
    assert bool((weights.masked_select(hidden.expand_as(weights)) == 0).all())
    v = layer.v_proj(c).unflatten(-1, (HEADS, -1)).transpose(-3, -2)
    exact(weights @ v, layer.attend(x, c, mask=mask, positions=positions))


def test_weights_of_some_rows() -> None:
    layer, x, rows = layer_of(), sequence(BATCH), torch.tensor([5, 0, -1])
    exact(layer.weights(x, mask=rg.Causal(), rows=rows), layer.weights(x, mask=rg.Causal())[..., rows, :])


@pytest.mark.parametrize("kind", [rg.nn.Rotary, rg.nn.RotaryInterleaved])
def test_rotary_layers_see_differences_of_positions_alone(kind: type[rg.nn.Rotary]) -> None:
    layer, x = layer_of(rotary=kind(4)), sequence(BATCH)
    at = torch.arange(NQ)
    far = rg.Positions(at + 10_000, at + 10_000)
    exact(layer(x, mask=rg.Causal(), positions=far), layer(x, mask=rg.Causal()))
    stretched = layer(x, mask=rg.Causal(), positions=rg.Positions(at * 3, at * 3))
    assert bool((stretched - layer(x, mask=rg.Causal())).abs().max() > 1e-3)


def test_rotary_takes_positions_of_each_sequence() -> None:
    layer, x = layer_of(rotary=rg.nn.Rotary(2)), sequence(BATCH)
    at = torch.stack([torch.arange(NQ), torch.randperm(NQ) * 5])
    out = layer(x, mask=rg.Causal(), positions=rg.Positions(at, at))
    for b in range(BATCH):
        exact(out[b], layer(x[b], mask=rg.Causal(), positions=rg.Positions(at[b], at[b])))


def test_rotary_without_positions_is_refused_where_lengths_differ() -> None:
    layer = layer_of(rotary=rg.nn.Rotary(4))
    said = (
        r"7 queries meet 11 keys under Rotary\(4, base=10000\), and their positions are not given. Pass\n  positions="
    )
    for call in (layer, layer.weights, layer.per_head):
        with pytest.raises(rg.ShapeError, match=said):
            call(sequence(BATCH), sequence(BATCH, n=NK))
    assert layer(sequence(BATCH), sequence(BATCH, n=NK), positions=rg.tail(NQ, NK)).shape == (BATCH, NQ, WIDTH)


@pytest.mark.parametrize(
    "options", [{}, {"rotary": rg.nn.Rotary(4)}, {"rotary": rg.nn.Rotary(2), "key_heads": 1, "sink": 0.5}]
)
def test_decoding_with_cached_keys_equals_the_causal_pass(options: dict[str, object]) -> None:
    layer, x = layer_of(**options), sequence(BATCH)
    whole = layer(x, mask=rg.Causal())
    keys, values = [], []
    for t in range(NQ):
        here = torch.tensor([t])
        q, k, v = layer.project(x[:, t : t + 1], None, rg.Positions(here, here))
        keys.append(k)
        values.append(v)
        k, v, at = torch.cat(keys, -2), torch.cat(values, -2), rg.tail(1, t + 1)
        out = rg.attention(q, k, v, mask=rg.Causal(), positions=at, **layer.scoring())
        exact(layer.out_proj(out.transpose(-3, -2).flatten(-2))[:, 0], whole[:, t])


def test_qk_norm_normalises_each_head_before_the_rotation() -> None:
    layer, x = layer_of(qk_norm=nn.RMSNorm, rotary=rg.nn.Rotary(4)), sequence(BATCH)
    assert layer.q_norm is not layer.k_norm
    q, k, _ = layer.project(x)
    ones = torch.ones(BATCH, HEADS, NQ, **DOUBLE)
    for t in (q, k):
        torch.testing.assert_close(t.square().mean(-1), ones, rtol=0, atol=1e-5)  # RMSNorm has an eps of its own
    before = layer(x)
    nn.init.constant_(layer.q_norm.weight, 2.0)
    nn.init.constant_(layer.k_norm.weight, 3.0)
    exact(layer.project(x)[0], 2 * q)
    exact(layer.project(x)[1], 3 * k)
    layer(x).square().sum().backward()
    assert layer.q_norm.weight.grad is not None and bool((layer(x) - before).abs().max() > 1e-3)


@pytest.mark.parametrize("sink", [0.5, torch.tensor([0.5, -1.0, 2.0])])
def test_the_sink_is_learned(sink: float | Tensor) -> None:
    layer, x = layer_of(sink=sink), sequence(BATCH)
    assert isinstance(layer.sink, nn.Parameter) and layer.sink.shape == (HEADS,)
    exact(layer.sink.detach(), torch.as_tensor(sink, **DOUBLE).expand(HEADS))
    out = layer(x, mask=rg.Causal())
    exact(out, composed(layer, x, x, mask=rg.Causal(), sink=layer.sink))
    (g,) = torch.autograd.grad(out.square().sum(), layer.sink)
    step = 1e-6 * torch.eye(HEADS, **DOUBLE)
    for h in range(HEADS):
        up, down = (composed(layer, x, x, mask=rg.Causal(), sink=layer.sink + s * step[h]) for s in (1, -1))
        slope = (up.square().sum() - down.square().sum()) / 2e-6
        torch.testing.assert_close(g[h], slope, rtol=1e-7, atol=1e-7)  # a central difference is no better


def test_a_whole_number_is_a_sink_too() -> None:
    sink = rg.nn.MultiHeadAttention(WIDTH, HEADS, sink=0).sink
    assert sink is not None and sink.dtype == torch.float32 and sink.tolist() == [0.0] * HEADS


def test_a_context_of_another_dtype_is_named() -> None:
    layer, x = layer_of(), sequence(BATCH)
    with pytest.raises(TypeError, match=r"context has dtype torch.float32; expected torch.float64, as this layer's"):
        layer(x, x.float())


def test_dropout_acts_in_training_only_and_by_torchs_generator() -> None:
    layer, x = layer_of(dropout=0.5), sequence(BATCH)
    plain = layer_of()
    plain.load_state_dict(layer.state_dict())
    assert torch.equal(layer.eval()(x), plain(x))
    layer.train()
    torch.manual_seed(3)
    first, second = layer(x), layer(x)
    torch.manual_seed(3)
    assert torch.equal(layer(x), first) and not torch.equal(first, second)
    assert torch.equal(layer.weights(x), plain.weights(x)), "weights are those before dropout"


def test_dropout_is_the_same_under_checkpointing() -> None:
    layer, x = layer_of(dropout=0.5), sequence(BATCH).requires_grad_()
    results = []
    for run in (layer, partial(checkpoint, layer, use_reentrant=False)):
        torch.manual_seed(3)
        out = run(x, mask=rg.Causal())
        results.append((out, *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_sequence_without_batch_axis() -> None:
    layer, x, c = layer_of(rotary=rg.nn.Rotary(4)), sequence(), sequence(n=NK)
    calls = {"mask": rg.Causal() & rg.Lengths(torch.tensor(5)), "positions": rg.tail(NQ, NK)}
    for method in (layer, layer.attend, layer.weights, layer.per_head):
        exact(method(x, c, **calls), method(x[None], c[None], **calls)[0])
    assert layer(x).shape == (NQ, WIDTH) and layer.weights(x).shape == (HEADS, NQ, NQ)


def test_several_batch_axes_and_a_context_that_is_shared() -> None:
    layer, x, c = layer_of(), sequence(5, BATCH), sequence(1, BATCH, n=NK)
    out = layer(x, c)
    for a in range(5):
        exact(out[a], layer(x[a], c[0]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_every_parameter_changes_its_dtype(dtype: torch.dtype) -> None:
    layer = layer_of(rotary=rg.nn.Rotary(4), qk_norm=nn.RMSNorm, sink=0.5, score=rg.ScaledDot(torch.ones(HEADS)))
    layer.to(dtype)
    assert {t.dtype for t in (*layer.parameters(), *layer.buffers())} == {dtype}
    out = layer(sequence(BATCH).to(dtype), mask=rg.Causal())
    assert out.dtype == dtype and bool(out.isfinite().all())


def test_autocast_gives_its_dtype_and_trains() -> None:
    layer = layer_of(rotary=rg.nn.Rotary(4), qk_norm=nn.LayerNorm, sink=0.5, dtype=torch.float32)
    x = torch.randn(BATCH, NQ, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x, mask=rg.Causal())
        assert out.dtype == torch.bfloat16
        assert layer.weights(x).dtype == torch.bfloat16
    # four products in a row, each rounded to bfloat16's 8 bits
    assert bool(((out.float() - layer(x, mask=rg.Causal())).abs() <= 4 * 2**-8 * (1 + out.float().abs())).all())
    out.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in layer.parameters())


def test_copies_compute_the_same() -> None:
    options = {"rotary": rg.nn.Rotary(4), "qk_norm": nn.RMSNorm, "sink": 0.5, "dropout": 0.1, "backend": rg.Tiled(3, 2)}
    layer, x = layer_of(**options).eval(), sequence(BATCH)
    other = layer_of(**options).eval()
    assert not torch.equal(other(x), layer(x))
    other.load_state_dict(layer.state_dict())
    for twin in (other, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin(x, mask=rg.Causal()), layer(x, mask=rg.Causal()))
        assert repr(twin) == repr(layer)


def test_a_layer_can_be_built_on_meta_and_filled_later() -> None:
    options = {"qk_norm": nn.RMSNorm, "sink": torch.zeros(HEADS), "score": rg.nn.AdditiveScore(4, 4, 5, device="meta")}
    layer = layer_of(**options, device="meta")
    assert all(p.is_meta for p in layer.parameters())
    assert layer(torch.empty(BATCH, NQ, WIDTH, device="meta", **DOUBLE)).shape == (BATCH, NQ, WIDTH)
    layer.to_empty(device="cpu").reset_parameters()
    assert bool(layer.q_proj.weight.isfinite().all()) and bool((layer.q_proj.bias == 0).all())


def test_a_named_backend_is_the_one_that_runs() -> None:
    with pytest.raises(rg.Unsupported, match=r"backend Sdpa\(\) cannot run this call"):
        layer_of(backend=rg.Sdpa())(sequence(BATCH))


def test_the_printed_layer_shows_what_is_unusual() -> None:
    shown = repr(rg.nn.MultiHeadAttention(12, 4, key_heads=2, dropout=0.1, score=rg.Dot()))
    assert "heads=4, key_heads=2, score=Dot(), dropout=0.1, d_k=3, d_v=3" in shown


@pytest.mark.parametrize(
    ("options", "x", "c", "said"),
    [
        ({}, (BATCH, NQ, 13), None, r"x has shape \(2, 7, 13\); expected \(\*batch, n, 12\)"),
        ({}, (WIDTH,), None, r"x has shape \(12,\); expected"),
        (
            {"d_context": 5},
            (BATCH, NQ, WIDTH),
            None,
            r"this layer reads a context of width 5; pass it: layer\(x, context\)",
        ),
        (
            {"d_context": 5},
            (BATCH, NQ, WIDTH),
            (BATCH, NK, 6),
            r"context has shape \(2, 11, 6\); expected \(\*batch, m, 5\)",
        ),
        ({}, (BATCH, NQ, WIDTH), (NK, WIDTH), r"context has shape \(11, 12\); .* of x, which has shape \(2, 7, 12\)"),
        ({}, (BATCH, NQ, WIDTH), (3, NK, WIDTH), r"context has shape \(3, 11, 12\)"),
    ],
)
def test_wrong_input_gets_its_sentence(options: dict[str, object], x: tuple, c: tuple | None, said: str) -> None:
    with pytest.raises(rg.ShapeError, match=said):
        layer_of(**options)(torch.zeros(x, **DOUBLE), None if c is None else torch.zeros(c, **DOUBLE))


def test_a_sink_of_another_number_of_heads_is_refused() -> None:
    with pytest.raises(rg.ShapeError, match=r"sink has shape \(2,\); expected a number, or one logit a head, \(3,\)"):
        layer_of(sink=torch.zeros(2))
