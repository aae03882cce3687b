"""Files of keys and values: read and never mapped, and named where they are foreign, cut short, or change."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import regard as rg
from regard.sources import Arrays, Safetensors

Drawn = tuple[Tensor, Tensor, Tensor]


@pytest.fixture
def drawn() -> Drawn:
    return torch.randn(2, 4, 3, 8), torch.randn(2, 2, 29, 8), torch.randn(2, 2, 29, 5)


def saved(folder: Path, k: Tensor, v: Tensor) -> Path:
    torch_files = pytest.importorskip("safetensors.torch", reason="needs safetensors: pip install 'regard[hf]'")
    torch_files.save_file({"k": k.clone(), "v": v.clone()}, folder / "kv.safetensors")
    return folder / "kv.safetensors"


BECOMES_SHORTER = """
import os, sys, numpy as np, torch, regard as rg
from regard.sources import Arrays, Safetensors

folder = sys.argv[1]
k, v = torch.randn(2, 1, 2, 40_000, 16).unbind(0)
for name, x in (("k", k), ("v", v)):
    np.save(f"{folder}/{name}.npy", x.numpy())
sources = [(Arrays(f"{folder}/k.npy", f"{folder}/v.npy", size=1000), f"{folder}/v.npy")]
try:
    from safetensors.torch import save_file
except ImportError:
    pass
else:
    save_file({"k": k, "v": v}, f"{folder}/kv.safetensors")
    sources.append((Safetensors(f"{folder}/kv.safetensors", size=1000), f"{folder}/kv.safetensors"))
for source, file in sources:
    def shorten(done, total):
        if done == 3000:
            os.truncate(file, 100_000)
    try:
        rg.attention_over(torch.randn(1, 2, 1, 16), source, progress=shorten)
    except RuntimeError as error:
        print(type(error.__cause__).__name__, file in str(error), "has 100000 bytes" in str(error))
"""


@pytest.mark.full
def test_a_file_that_becomes_shorter_is_an_error(tmp_path: Path) -> None:
    """A process that has mapped it ends by SIGBUS, so this one runs by itself."""
    script = [sys.executable, "-c", BECOMES_SHORTER, str(tmp_path)]
    done = subprocess.run(script, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.splitlines()) == {"EOFError True True"}


def mapped_at(address: int) -> bool:
    ranges = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(first, 16) <= address < int(end, 16) for first, end in ranges)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
@pytest.mark.parametrize("kind", ["paths", "safetensors", "mapped"])
def test_the_memory_of_a_part_goes_back_to_the_system(kind: str, tmp_path: Path) -> None:
    """Through malloc it would not: it keeps blocks of the size of one that was freed before."""
    k, v = torch.zeros(2, 1, 2, 3000, 64).unbind(0)
    paths = [tmp_path / f"{name}.npy" for name in "kv"]
    for path, x in zip(paths, (k, v), strict=True):
        np.save(path, x.numpy())
    mapped = [np.load(path, mmap_mode="r") for path in paths]
    source = {"paths": Arrays(*paths, size=1000), "mapped": Arrays(*mapped, size=1000)}.get(kind)
    for part in (source or Safetensors(saved(tmp_path, k, v), size=1000)).parts():
        read = [torch.as_tensor(x) for x in part.read()]
        addresses = [x.data_ptr() for x in read]
        assert all(map(mapped_at, addresses))
        del read
        assert not any(map(mapped_at, addresses))


@pytest.mark.parametrize("kept", [0, 5, 60, 400, -1])
@pytest.mark.parametrize("kind", ["npy", "safetensors"])
def test_a_file_that_was_cut_short_is_named(drawn: Drawn, kind: str, kept: int, tmp_path: Path) -> None:
    file = saved(tmp_path, *drawn[1:]) if kind == "safetensors" else tmp_path / "k.npy"
    if kind == "npy":
        np.save(file, drawn[1].numpy())
    whole = file.read_bytes()
    file.write_bytes(whole[:kept])
    with pytest.raises(ValueError, match=f"^{re.escape(str(file))} (is no .* file|has .* cut short)"):
        Safetensors(file) if kind == "safetensors" else Arrays(file, drawn[2])


FOREIGN = {
    "text": b"These are no tensors, and there is more text here than a header of a few bytes would have.",
    "a long header": (1 << 62).to_bytes(8, "little") + b"{}",
    "no table": (2).to_bytes(8, "little") + b"[]",
    "no text": (2).to_bytes(8, "little") + b"\xff\xfe",
}


@pytest.mark.parametrize("what", list(FOREIGN))
def test_foreign_files_are_named(what: str, tmp_path: Path) -> None:
    file = tmp_path / "foreign"
    file.write_bytes(FOREIGN[what])
    with pytest.raises(ValueError, match=f"^{re.escape(str(file))} is no safetensors file.* save_file"):
        Safetensors(file)
    with pytest.raises(ValueError, match=f"^{re.escape(str(file))} is no .npy file.* numpy.save"):
        Arrays(file, file)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (
            {"dtype": "I64", "shape": [2, 2], "data_offsets": [0, 32]},
            "has dtype I64; expected one of F64, F32, F16, BF16",
        ),
        ({"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 12]}, "expected dtype, shape and data_offsets that"),
        ({"dtype": "F32", "shape": [2, 2]}, "expected dtype, shape and data_offsets that"),
        ({"dtype": "F32", "shape": [2, 2], "data_offsets": [-8, 8]}, "expected dtype, shape and data_offsets that"),
        ([], "expected dtype, shape and data_offsets that"),
    ],
)
def test_tensors_that_a_header_describes_wrongly(entry: object, said: str, tmp_path: Path) -> None:
    header = json.dumps({"k": entry}).encode()
    file = tmp_path / "damaged.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(32))
    with pytest.raises(ValueError, match=said) as raised:
        Safetensors(file, "k", "k")
    assert str(file) in str(raised.value)


def test_a_file_that_was_written_anew_is_an_error(drawn: Drawn, tmp_path: Path) -> None:
    """Its tensors lie elsewhere, or are others."""
    q, k, v = drawn
    file = saved(tmp_path, k, v)
    for name in "kv":
        np.save(tmp_path / f"{name}.npy", k.numpy())
    sources = [Safetensors(file), Arrays(tmp_path / "k.npy", tmp_path / "v.npy")]
    saved(tmp_path, k[..., 1:, :].contiguous(), v[..., 1:, :].contiguous())
    np.save(tmp_path / "v.npy", k.double().numpy())
    for source in sources:
        with pytest.raises(RuntimeError, match=r"was written anew since this source was made.* Make the source again"):
            rg.attention_over(q, source)


def test_numpy_files_in_any_order_of_axes_and_bytes(drawn: Drawn, tmp_path: Path) -> None:
    q, k, v = drawn
    np.save(tmp_path / "k.npy", np.asfortranarray(k.numpy()))
    np.save(tmp_path / "v.npy", v.numpy().astype(">f4"))
    out = rg.attention_over(q, Arrays(tmp_path / "k.npy", tmp_path / "v.npy", size=7))
    torch.testing.assert_close(out, rg.attention(q, k, v), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("kind", ["tensors", "npy", "safetensors"])
def test_no_keys_give_nothing(kind: str, tmp_path: Path) -> None:
    q, none = torch.randn(2, 4, 3, 8), torch.zeros(2, 2, 0, 8)
    np.save(tmp_path / "none.npy", none.numpy())
    sources = {
        "tensors": lambda: Arrays(none, none),
        "npy": lambda: Arrays(tmp_path / "none.npy", tmp_path / "none.npy"),
        "safetensors": lambda: Safetensors(saved(tmp_path, none, none)),
    }
    for mask in (rg.Everything(), rg.Causal()):
        out = rg.attention_over(q, sources[kind](), mask=mask, positions=torch.arange(3))
        assert out.shape == (2, 4, 3, 8) and not out.any()
