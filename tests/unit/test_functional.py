"""attention, attention_state, attention_weights, explain: what they take and give back, whatever the layout or mode."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import regard as rg
from regard import testing
from regard.backends.base import Backend

AT = testing.frame()
BACKENDS = [rg.Reference(), rg.Tiled(rows=4, keys=5)]
F64 = torch.float64
each_backend = pytest.mark.parametrize("backend", BACKENDS, ids=repr)


def laid_out(t: Tensor, how: str) -> Tensor:
    """The same numbers by other strides."""
    if how == "transposed":
        return t.mT.contiguous().mT
    if how == "heads last":
        return t.transpose(-2, -3).contiguous().transpose(-2, -3)
    if how == "gaps":
        wide = torch.full((*t.shape[:-1], 2 * t.shape[-1] + 1), torch.nan, dtype=t.dtype)
        wide[..., 1::2] = t
        return wide[..., 1::2]
    raise AssertionError(how)


@each_backend
@pytest.mark.parametrize("how", ["transposed", "heads last", "gaps"])
def test_strides_of_every_kind(backend: Backend, how: str) -> None:
    case = testing.draw(AT, mask=rg.Causal(), sink=True)
    other = replace(case, **{name: laid_out(getattr(case, name), how) for name in "qkv"})
    a, b = (rg.attention(c.q, c.k, c.v, mask=c.mask, positions=c.positions, backend=backend) for c in (case, other))
    assert testing.error(a, b) < 1e-15


@each_backend
def test_expanded_inputs_and_their_gradients(backend: Backend) -> None:
    case = testing.draw(AT)
    k = torch.randn(1, 1, 17, 7, dtype=F64, requires_grad=True)
    a, b = (rg.attention(case.q, x, case.v, backend=backend) for x in (k.expand(5, 2, 17, 7), k.repeat(5, 2, 1, 1)))
    assert testing.error(a, b) < 1e-15
    assert testing.error(*(torch.autograd.grad(t.sin().sum(), k)[0] for t in (a, b))) < 1e-14


ARRAYS = {
    "plain": lambda x: x,
    "transposed": lambda x: np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2),
    "reversed": lambda x: np.ascontiguousarray(x[..., ::-1])[..., ::-1],
    "gaps": lambda x: np.repeat(x, 2, -1)[..., ::2],
    "expanded": lambda x: np.broadcast_to(x[:1], x.shape),
    "big endian": lambda x: x.astype(x.dtype.newbyteorder(">")),
}


def unaligned(x: Any) -> Any:
    memory = bytearray(x.nbytes + 1)
    moved = np.ndarray(x.shape, x.dtype, memory, offset=1)
    moved[...] = x
    return moved


def read_only(x: Any) -> Any:
    x = x.copy()
    x.flags.writeable = False
    return x


@pytest.mark.parametrize("how", [*ARRAYS, "unaligned", "read-only"])
def test_numpy_in_numpy_out(how: str) -> None:
    make = {**ARRAYS, "unaligned": unaligned, "read-only": read_only}[how]
    arrays = [make(np.random.randn(2, 3, n, 4)) for n in (5, 7, 7)]
    before = [x.tobytes() for x in arrays]
    out = rg.attention(*arrays, mask=rg.Dense(np.arange(7) < 5), sink=np.zeros(3))
    tensors = [torch.from_numpy(np.array(x, "=f8")) for x in arrays]
    want = rg.attention(*tensors, mask=rg.Dense(torch.arange(7) < 5), sink=torch.zeros(3, dtype=F64))
    assert type(out) is np.ndarray and out.flags.writeable and out.dtype == np.float64
    assert testing.error(torch.from_numpy(out), want) < 1e-15
    assert [x.tobytes() for x in arrays] == before
    assert not any(np.shares_memory(out, x) for x in arrays)
    assert type(rg.attention_weights(*arrays[:2], rows=np.array([1, -1]))) is np.ndarray


def test_numpy_dtypes_and_parameters() -> None:
    x = np.random.randn(3, 4)
    for dtype in (np.float16, np.float32, np.float64):
        assert rg.attention(*[x.astype(dtype)] * 3).dtype == dtype
    learned = rg.Bilinear(torch.eye(4, dtype=F64, requires_grad=True))
    assert type(rg.attention(x, x, x, score=learned)) is np.ndarray
    with pytest.raises(TypeError, match=r"q has dtype torch.int64; expected float16, bfloat16, float32 or float64"):
        rg.attention(x.astype(int), x, x)


def test_memory_past_two_to_the_31_elements() -> None:
    far = (1 << 31) + 13
    storage = torch.from_numpy(np.zeros(far + 100, np.float16))  # of which the system commits what is touched
    x = storage.as_strided((2, 3, 4), (far, 4, 1))
    x.copy_(torch.randn(2, 3, 4))
    for backend in BACKENDS:
        assert torch.equal(*(rg.attention(t, t, t, mask=rg.Causal(), backend=backend) for t in (x, x.clone())))


@pytest.mark.full
@each_backend
def test_autocast(backend: Backend) -> None:
    """Inputs take its dtype, as torch's own attention does; sums stay in float32; float64 stays."""
    q, k, v = (torch.randn(n, 8) for n in (3, 4099, 4099))
    halves = [t.bfloat16() for t in (q, k, v)]
    score = rg.Additive(torch.randn(8, 5), torch.randn(8, 5), torch.randn(5))
    for s in (rg.ScaledDot(), score):
        with torch.autocast("cpu", torch.bfloat16):
            out = rg.attention(q, k, v, score=s, backend=backend)
            lse = rg.attention_state(q, k, v, score=s, backend=backend).finish()[1]
            assert rg.attention(q.double(), k.double(), v.double(), backend=backend).dtype == F64
        assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
        assert torch.equal(out, rg.attention(*halves, score=s, backend=backend))
        assert torch.equal(lse, rg.attention_state(*halves, score=s, backend=backend).finish()[1])


def test_backward_under_autocast_is_the_same() -> None:
    """Reference is plain torch, which autocast also reaches in backward."""
    backend = rg.Tiled(rows=4, keys=5)
    q, k, v = (torch.randn(n, 8, dtype=torch.bfloat16, requires_grad=True) for n in (3, 5, 5))
    out = rg.attention(q, k, v, backend=backend).float().sin().sum()
    want = torch.autograd.grad(out, (q, k, v), retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        got = torch.autograd.grad(out, (q, k, v))
    assert all(map(torch.equal, got, want))


@each_backend
@pytest.mark.parametrize("mask", ["Everything", "Causal", "Lengths", "Documents", "Prefix 2", "Where"])
def test_meta_tensors_have_the_right_shape(backend: Backend, mask: str) -> None:
    case = testing.draw(AT)
    at = rg.Positions(*(p.to("meta") for p in (case.positions.q, case.positions.k)))
    example = testing.masks(AT)[mask]
    example = example.with_tensors(iter([t.to("meta") for t in example.tensors()]))
    q, k, v = (t.to("meta") for t in (case.q, case.k, case.v))
    out = rg.attention(q, k, v, mask=example, positions=at, backend=backend)
    assert out.is_meta and out.shape == (5, 6, 13, 3) and out.dtype == F64
    assert rg.attention_weights(q, k, mask=example, positions=at).shape == (5, 6, 13, 17)


# torch.compile asks for the .grad of what crosses a graph break
@pytest.mark.full
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("whole", [True, False])
def test_compiled_calls_are_right(whole: bool) -> None:
    """As one graph; where the mask holds lengths, which are checked by value, with breaks."""
    torch.compiler.reset()
    mask = rg.Causal() if whole else rg.Causal() & rg.Lengths(keys=torch.tensor([17, 3, 0, 9, 12]))
    case, score = testing.draw(AT, mask=mask), rg.ScaledDot() >> rg.SoftCap(2.0)

    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return rg.attention(q, k, v, score=score, mask=case.mask, positions=case.positions)

    leaves = case.leaves(F64)
    given = (leaves.q, leaves.k, leaves.v)
    got, want = torch.compile(f, backend="eager", fullgraph=whole)(*given), f(*given)
    assert testing.error(got, want) < 1e-14
    for a, b in zip(*(torch.autograd.grad(t.sin().sum(), given) for t in (got, want)), strict=True):
        assert testing.error(a, b) < 1e-14


def test_weights_of_some_rows() -> None:
    case = testing.draw(AT, score=testing.scores(AT)["Pipeline"], mask=testing.masks(AT)["Or"], sink=True).leaves(F64)
    given = {"score": case.score, "mask": case.mask, "positions": case.positions, "sink": case.sink}
    leaves = tuple(t for name, t in case.differentiable.items() if name != "v")
    whole = rg.attention_weights(case.q, case.k, **given)
    cotangent = torch.randn(5, 6, 4, 17, dtype=F64)
    for rows in ([7, 0, -1, 7], torch.tensor([7, 0, 12, 7]), np.array([7, 0, -1, 7], np.int8)):
        some = rg.attention_weights(case.q, case.k, rows=rows, **given)
        assert testing.error(some, whole[..., [7, 0, 12, 7], :]) < 1e-15
        a = torch.autograd.grad(some, leaves, cotangent)
        b = torch.autograd.grad(whole[..., [7, 0, 12, 7], :], leaves, cotangent, retain_graph=True)
        assert all(testing.error(x, y) < 1e-13 for x, y in zip(a, b, strict=True))
    assert rg.attention_weights(case.q, case.k, rows=[], **given).shape == (5, 6, 0, 17)


def test_weights_sum_to_one_to_zero_or_to_what_the_sink_leaves() -> None:
    case = testing.draw(AT, mask=rg.Prefix(3))
    mask = rg.Prefix(3) & rg.Lengths(queries=torch.full((5,), 9))
    sums = rg.attention_weights(case.q, case.k, mask=mask, positions=case.positions).sum(-1)
    assert testing.error(sums, (torch.arange(13) < 9).double().expand(5, 6, 13)) < 1e-15
    zeros = torch.zeros_like(case.q)
    sums = rg.attention_weights(zeros, case.k, mask=mask, positions=case.positions, sink=0.0).sum(-1)
    assert testing.error(sums, 0.75 * (torch.arange(13) < 9).double().expand(5, 6, 13)) < 1e-15


def test_parts_of_the_keys_merge() -> None:
    case = testing.draw(AT, sink=True, mask=rg.Causal())
    q, k, v, at = case.q, case.k, case.v, case.positions
    state = rg.attention_state(q, k[..., :0, :], v[..., :0, :])
    for cut, sink in ((slice(9, 17), None), (slice(0, 4), case.sink), (slice(4, 9), None)):
        place = rg.Positions(at.q, at.k[cut])
        state = state | rg.attention_state(
            q, k[..., cut, :], v[..., cut, :], mask=rg.Causal(), positions=place, sink=sink
        )
    want = rg.attention_state(q, k, v, mask=rg.Causal(), positions=at, sink=case.sink).finish()
    assert all(testing.error(a, b) < 1e-14 for a, b in zip(state.finish(), want, strict=True))


@pytest.mark.parametrize("twin", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_arguments_copy_and_pickle(twin: Any) -> None:
    masks, scores = testing.masks(AT), testing.scores(AT)
    for value in [
        *masks.values(),
        *scores.values(),
        *BACKENDS,
        rg.Sdpa(),
        rg.Flex(),
        rg.Dropout(0.5, 3),
        rg.tail(3, 5),
    ]:
        if "lambda" not in repr(value):
            assert twin(value) == value and hash(twin(value)) == hash(value)


def test_explain_prints_the_plan() -> None:
    x = torch.zeros(2, 3, 64, 8, dtype=F64)
    shown = str(rg.explain(x, x, x, mask=rg.Causal())).splitlines()
    assert shown[0].split("  ")[0] == "backend" and "Tiled(" in shown[0]
    assert any(line.startswith("not Sdpa()") and "cuda" in line for line in shown)
    assert any(line.startswith("not Reference()") and line.endswith(" is preferred") for line in shown)
    assert "64 queries × 64 keys, batch (2,), 3 heads on 3, float64 on cpu" in "\n".join(shown)
