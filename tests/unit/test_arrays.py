"""Arrays are taken over the same memory and answered in kind."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import regard as rg
from regard.core.arrays import answer_like, tensor


class Foreign:
    """An array of some other library: DLPack and the array namespace alone."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data

    def __dlpack__(self, **kwargs: object) -> object:
        return self.data.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.data.__dlpack_device__()

    def __array_namespace__(self) -> type[Foreign]:
        return Foreign

    @staticmethod
    def from_dlpack(x: torch.Tensor) -> Foreign:
        return Foreign(torch.from_dlpack(x))


def address(x: np.ndarray) -> int:
    return x.__array_interface__["data"][0]


def test_a_tensor_is_itself() -> None:
    x = torch.zeros(2)
    assert tensor(x, "x") is x and answer_like(x)(x) is x


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.int64, np.int8, np.bool_])
def test_numpy_shares_memory(dtype: type) -> None:
    x = np.arange(30).reshape(5, 6).astype(dtype)
    for view in (x, x.T, x[1:, ::2], x[2], x[:0]):
        t = tensor(view, "x")
        assert t.data_ptr() == address(view) or not view.size
        np.testing.assert_array_equal(t.numpy(), view)


def test_read_only_memory_is_shared_without_a_warning(tmp_path: Path) -> None:
    x = np.arange(6.0)
    x.flags.writeable = False
    x.tofile(tmp_path / "x")
    for array in (x, np.broadcast_to(x, (3, 6)), np.memmap(tmp_path / "x", mode="r", dtype=x.dtype)):
        t = tensor(array, "x")
        assert t.data_ptr() == address(array)
        np.testing.assert_array_equal(t.numpy(), array)
        assert not array.flags.writeable


def test_a_view_keeps_its_memory_alive() -> None:
    def make() -> torch.Tensor:
        x = np.full(100_000, 7.0)
        x.flags.writeable = False
        return tensor(x, "x")

    t = make()
    junk = [np.zeros(100_000) for _ in range(4)]
    assert (t == 7).all() and len(junk) == 4


def test_a_scalar_keeps_its_number_while_others_are_made() -> None:
    held = [tensor(np.float64(n), "x") for n in range(50)]
    junk = [np.full((), -1.0) for _ in range(200)]
    assert [float(t) for t in held] == list(range(50)) and len(junk) == 200


@pytest.mark.parametrize(
    "x",
    [
        np.arange(12.0).reshape(3, 4)[::-1],
        np.arange(12.0).reshape(3, 4)[:, ::-1],
        np.arange(6, dtype=">f8"),
        np.arange(6, dtype=">i4")[::-1],
        np.frombuffer(b"\0" + np.arange(3.0).tobytes(), dtype=np.float64, offset=1),
        np.zeros(3, dtype=[("a", "i1"), ("b", "f8")])["b"],
        np.float64(3.5),
    ],
    ids=["reversed", "mirrored", "big-endian", "both", "unaligned", "a field", "a scalar"],
)
def test_what_torch_cannot_view_is_copied(x: np.ndarray) -> None:
    np.testing.assert_array_equal(tensor(x, "x").numpy(), x)


@pytest.mark.parametrize(
    ("x", "said"),
    [
        ([1.0], "x is a list; expected a torch tensor or an array"),
        (None, "x is None"),
        (np.array(["a"]), "x has NumPy dtype <U1, which torch does not know"),
        (np.array([object()]), "x has NumPy dtype object"),
        (np.ma.masked_array([1.0, 2.0], [True, False]), "x is a masked array, whose mask would be lost"),
    ],
)
def test_what_is_no_array_is_refused(x: object, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        tensor(x, "x")


def test_answers_are_in_kind() -> None:
    x = np.random.default_rng(0).normal(size=(2, 3, 5, 7)).astype(np.float32)
    out = rg.attention(x, x[:, :, ::-1], x)
    assert type(out) is np.ndarray and out.dtype == np.float32
    expected = rg.attention(*(torch.from_numpy(a.copy()) for a in (x, x[:, :, ::-1], x)))
    np.testing.assert_array_equal(out, expected.numpy())
    assert not np.shares_memory(out, x)

    t = torch.randn(2, 3, 5, 7)
    foreign = Foreign(t)
    assert tensor(foreign, "x").data_ptr() == t.data_ptr()
    answer = rg.attention(foreign, foreign, foreign)
    assert isinstance(answer, Foreign) and torch.equal(answer.data, rg.attention(t, t, t))


def test_masks_and_scores_take_arrays() -> None:
    allowed = np.tri(4, dtype=bool)
    assert rg.Dense(allowed) == rg.Dense(torch.from_numpy(allowed))
    assert rg.Lengths(keys=np.array([3, 2])) == rg.Lengths(keys=torch.tensor([3, 2]))
    assert rg.Bias(np.full((2, 2), 0.5)) == rg.Bias(torch.full((2, 2), 0.5, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64, np.uint8])
@pytest.mark.parametrize("backend", [None, rg.Reference()], ids=str)
def test_numbers_of_numpy_are_numbers(dtype: type, backend: rg.Backend | None) -> None:
    x = torch.randn(2, 1, 5, 8)
    out = rg.attention(x, x, x, dropout=rg.Dropout(np.float32(0.5), seed=dtype(7)), backend=backend)
    assert torch.equal(out, rg.attention(x, x, x, dropout=rg.Dropout(0.5, seed=7), backend=backend))
    assert rg.Dropout(torch.tensor(0.5), dtype(7)) == rg.Dropout(0.5, 7)
    for lengths in ([dtype(5), dtype(3)], np.array([5, 3], dtype)):
        assert torch.equal(rg.tail(2, lengths).q, rg.tail(2, [5, 3]).q)
        assert rg.Lengths(lengths) == rg.Lengths([5, 3])
