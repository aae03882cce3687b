"""regard.compat.torch: torch's functions and layers, by torch's own samples and side by side with torch."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import regard as rg
from needed import needs_kernels
from regard.compat.torch import scaled_dot_product_attention


def torchs_samples(which: str, script: str = "torch_samples.py") -> list[str]:
    """What a script says about regard's function or module, or about torch's under patch, a line for each check."""
    pytest.importorskip("expecttest", reason="needs expecttest: pip install 'regard[test]'")
    command = [sys.executable, Path(__file__).with_name(script), which]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.full
def test_torchs_samples_of_its_function_pass() -> None:
    lines = torchs_samples("function")
    assert [line for line in lines if not line.startswith("ok ")] == []
    assert len(lines) == 177


@pytest.mark.full  # a quarter of a minute
def test_torchs_samples_of_its_module_pass() -> None:
    lines = torchs_samples("module")
    assert [line for line in lines if not line.startswith("ok ")] == []
    assert len(lines) == 534


@pytest.mark.full  # a minute
@needs_kernels
@pytest.mark.parametrize(("which", "checks", "calls"), [("operators", 319, 170), ("modules", 103, 414)])
def test_torchs_samples_pass_under_patch(which: str, checks: int, calls: int) -> None:
    *lines, last = torchs_samples(which, "torch_patched.py")
    assert [line for line in lines if not line.startswith("ok ")] == []
    assert len(lines) >= checks and int(last.split()[0]) >= calls  # so many at least


def qkv(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def check(tensors: list[Tensor], *, dtype: torch.dtype = torch.float32, **options: Any) -> None:
    """The same output and gradients as torch's function, those of a floating-point mask included."""
    mask = options.get("attn_mask")
    leaves = [*tensors, *([mask] if mask is not None and mask.requires_grad else [])]
    results = []
    for function in (scaled_dot_product_attention, F.scaled_dot_product_attention):
        out = function(*tensors, **options)
        seed = torch.linspace(-1, 1, out.numel(), dtype=dtype).view_as(out)
        results.append((out, *(torch.autograd.grad(out, leaves, seed) if out.numel() else ())))
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-5)


SHAPES = {
    "one head": ((5, 8), (7, 8), (7, 3)),
    "batch": ((3, 5, 8), (3, 7, 8), (3, 7, 3)),
    "heads": ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 11)),
    "two batch axes": ((2, 1, 3, 5, 8), (2, 5, 3, 7, 8), (1, 5, 1, 7, 8)),
    "heads shared like batch axes": ((3, 5, 8), (2, 1, 7, 8), (2, 3, 7, 8)),
    "no query": ((2, 3, 0, 8), (2, 3, 7, 8), (2, 3, 7, 8)),
    "no key": ((2, 3, 5, 8), (2, 3, 0, 8), (2, 3, 0, 8)),
    "no batch": ((0, 3, 5, 8), (0, 3, 7, 8), (0, 3, 7, 8)),
    "no width": ((2, 3, 5, 0), (2, 3, 7, 0), (2, 3, 7, 8)),
}


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES.keys())
def test_shapes(shapes: tuple[tuple[int, ...], ...]) -> None:
    check(qkv(*shapes))
    check(qkv(*shapes), is_causal=True)
    check(qkv(*shapes), scale=-0.3)


@pytest.mark.parametrize("key_heads", [1, 2, 6])
@pytest.mark.parametrize("lead", [(), (3,), (2, 3)], ids=str)
def test_grouped_queries(lead: tuple[int, ...], key_heads: int) -> None:
    tensors = qkv((*lead, 6, 5, 8), (*lead, key_heads, 7, 8), (*lead, key_heads, 7, 3))
    mask = torch.rand(6, 5, 7) < 0.6
    check(tensors, enable_gqa=True)
    check(tensors, enable_gqa=True, attn_mask=mask)
    check(tensors, enable_gqa=True, is_causal=True)


def test_grouped_queries_with_other_heads_for_values_and_shared_batches() -> None:
    check(qkv((2, 6, 5, 8), (2, 3, 7, 8), (2, 2, 7, 8)), enable_gqa=True)
    check(qkv((2, 6, 5, 8), (3, 7, 8), (1, 3, 7, 8)), enable_gqa=True)
    check(qkv((6, 5, 8), (2, 7, 8), (2, 7, 8)), enable_gqa=True)


@pytest.mark.parametrize(
    "shape", [(5, 7), (1, 7), (5, 1), (3, 5, 7), (2, 1, 5, 7), (2, 3, 5, 7), (2, 1, 1, 7)], ids=str
)
def test_masks_of_every_shape(shape: tuple[int, ...]) -> None:
    tensors = qkv((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8))
    check(tensors, attn_mask=torch.rand(shape) < 0.6)
    added = torch.randn(shape).masked_fill(torch.rand(shape) < 0.3, -torch.inf)
    check(tensors, attn_mask=added)
    check(tensors, attn_mask=torch.randn(shape, requires_grad=True))


def test_as_many_sequences_as_queries_and_a_mask_of_two_axes() -> None:
    """No warning: two axes are (L, S) to torch, whatever the batch."""
    check(qkv((5, 2, 5, 8), (5, 2, 7, 8), (5, 2, 7, 8)), attn_mask=torch.rand(5, 7) < 0.6)
    check(qkv((5, 5, 8), (5, 7, 8), (5, 7, 8)), attn_mask=torch.rand(5, 7) < 0.6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_row_that_sees_nothing_is_zero(dtype: torch.dtype) -> None:
    mask = torch.rand(5, 7) < 0.6
    mask[2] = False
    for given in (mask, torch.zeros(5, 7, dtype=dtype).masked_fill(~mask, -torch.inf)):
        tensors = qkv((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8), dtype=dtype)
        out = scaled_dot_product_attention(*tensors, attn_mask=given)
        out.sum().backward()
        assert (out[:, :, 2] == 0).all()
        assert tensors[0].grad is not None and (tensors[0].grad[:, :, 2] == 0).all()
        assert all(t.grad is not None and t.grad.isfinite().all() for t in tensors)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mask_dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_autocast_takes_a_mask_of_any_dtype_that_it_casts(mask_dtype: torch.dtype, dtype: torch.dtype) -> None:
    """Queries that a norm left in float32, beside a mask that was made in the model's dtype."""
    q, mask = torch.randn(2, 3, 5, 8), torch.randn(5, 5).to(mask_dtype)
    with torch.autocast("cpu", dtype):
        expected = F.scaled_dot_product_attention(q, q, q, mask)
        out = scaled_dot_product_attention(q, q, q, mask)
        with pytest.raises(RuntimeError, match=r"attn_mask has dtype torch\.float64"):
            scaled_dot_product_attention(q, q, q, mask.double())
    assert out.dtype == dtype
    torch.testing.assert_close(out, expected, atol=0.03, rtol=0.03)


def test_a_float32_mask_of_halves_and_autocast() -> None:
    tensors = [t.detach() for t in qkv((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8))]
    halves, mask = [t.bfloat16() for t in tensors], torch.randn(5, 7)
    expected = F.scaled_dot_product_attention(*halves, attn_mask=mask)
    rounding = {"atol": torch.finfo(torch.bfloat16).eps, "rtol": 0.016}
    torch.testing.assert_close(scaled_dot_product_attention(*halves, attn_mask=mask), expected, **rounding)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(scaled_dot_product_attention(*tensors, attn_mask=mask), expected, **rounding)


def test_dropout_is_torchs_by_seed_and_on_average() -> None:
    q, k = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 7, 8)
    eye = torch.eye(7).expand(2, 3, 7, 7)
    drawn = []
    for _ in range(2):
        torch.manual_seed(3)
        drawn.append(torch.stack([scaled_dot_product_attention(q, k, eye, dropout_p=0.25) for _ in range(400)]))
    assert drawn[0].equal(drawn[1])
    torch.testing.assert_close(drawn[0].mean(0), F.scaled_dot_product_attention(q, k, eye), atol=0.08, rtol=0)
    assert (scaled_dot_product_attention(q, k, eye, dropout_p=1.0) == 0).all()


def test_jagged_sequences() -> None:
    rows = [torch.randn(n, 3, 8) for n in (5, 2, 7)]
    x = torch.nested.nested_tensor(rows, layout=torch.jagged).transpose(1, 2)
    for causal in (False, True):
        ours = scaled_dot_product_attention(x, x, x, is_causal=causal)
        for one, row in zip(ours.unbind(), rows, strict=True):
            t = row.transpose(0, 1)
            torch.testing.assert_close(one, F.scaled_dot_product_attention(t, t, t, is_causal=causal))


def test_strides() -> None:
    q, k, v = (torch.randn(2, n, 3, 2 * 8)[..., ::2].transpose(1, 2).requires_grad_() for n in (5, 7, 7))
    check([q, k, v])
    check([q, k[:, :1].expand(-1, 3, -1, -1), v.detach().requires_grad_()], is_causal=True)


@pytest.mark.full
def test_compiled() -> None:
    tensors, mask = qkv((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)), torch.rand(5, 7) < 0.6
    compiled = torch.compile(scaled_dot_product_attention, fullgraph=True, backend="aot_eager")
    for options in ({"attn_mask": mask}, {"is_causal": True}, {"scale": 0.5}):
        out, expected = compiled(*tensors, **options), F.scaled_dot_product_attention(*tensors, **options)
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


X, Y, Z = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 7, 8), torch.randn(2, 3, 7, 8)
WRONG: dict[str, tuple[Callable[[Any], Tensor], str]] = {
    "dtypes": (lambda f: f(X, Y.half(), Z), "dtype"),
    "integers": (lambda f: f(X.int(), Y.int(), Z.int()), "int32"),
    "one axis": (lambda f: f(X[0, 0, 0], Y, Z), "axes"),
    "heads": (lambda f: f(X, Y[:, :2], Z[:, :2]), "broadcast"),
    "grouped heads": (lambda f: f(X, Y[:, :2], Z[:, :2], enable_gqa=True), "multiples"),
    "widths": (lambda f: f(X, Y[..., :5], Z), "width"),
    "an integer mask": (lambda f: f(X, Y, Z, torch.ones(5, 7).long()), "attn_mask has dtype"),
    "a mask of a third dtype": (lambda f: f(X, Y, Z, torch.ones(5, 7).double()), "attn_mask has dtype"),
    "a mask too large": (lambda f: f(X, Y, Z, torch.ones(11, 1, 5, 7).bool()), "attn_mask has shape"),
    "a mask of another length": (lambda f: f(X, Y, Z, torch.ones(4, 7).bool()), "attn_mask has shape"),
    "a probability": (lambda f: f(X, Y, Z, dropout_p=1.5), "probability"),
    "two masks": (lambda f: f(X[0], Y[0], Z[0], torch.ones(5, 7).bool(), is_causal=True), "both given"),
}


@pytest.mark.parametrize(("call", "said"), WRONG.values(), ids=WRONG.keys())
def test_what_torch_refuses_is_refused_with_its_error(call: Callable[[Any], Tensor], said: str) -> None:
    with pytest.raises(RuntimeError):
        call(F.scaled_dot_product_attention)
    with pytest.raises(RuntimeError, match=said):
        call(scaled_dot_product_attention)


def test_what_is_no_tensor_is_a_type_error() -> None:
    for given in ((X.tolist(), Y, Z), (X, Y, Z, [[True]])):
        for function in (F.scaled_dot_product_attention, scaled_dot_product_attention):
            with pytest.raises(TypeError):
                function(*given)  # type: ignore[arg-type]


def test_it_runs_natively() -> None:
    """Every option of the function is one that the kernels have."""
    native = rg.Native()
    for score, mask in (
        (rg.ScaledDot(0.3), rg.Causal()),
        (rg.ScaledDot(), rg.Dense(torch.rand(1, 1, 5, 7) < 0.6)),
        (rg.ScaledDot() >> rg.Bias(torch.randn(5, 7)), rg.Everything()),
    ):
        at = rg.head(5, 7)
        plan = rg.explain(X, Y, Z, score=score, mask=mask, positions=at, dropout=rg.Dropout(0.1, seed=1))
        assert plan.backend == native


def test_the_signature_is_torchs() -> None:
    said = (F.scaled_dot_product_attention.__doc__ or "").partition(") -> Tensor")[0]
    names = [part.split("=")[0].strip() for part in said.partition("(")[2].split(",")]
    assert [*inspect.signature(scaled_dot_product_attention).parameters] == names
