"""Every line of docs/how-to/migrate.md runs; both sides agree where the other library is there and runs on a CPU."""

from __future__ import annotations

import importlib
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import regard as rg
from regard.demo.model import load
from regard.demo.reading import read
from regard.masks.convert import from_blocked, from_key_padding

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "how-to" / "migrate.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| `(?P<before>[^`]+)` \| `(?P<after>[^`]+)` \|$", re.MULTILINE)
SECTIONS = dict(re.findall(r"^## (.+)\n((?:(?!## ).*\n)+)", PAGE, re.MULTILINE))
COMPARED = ("Torch's scaled_dot_product_attention", "FlexAttention", "torch.nn.MultiheadAttention", "Keras")
# Drawn numbers differ, and so do the weights of a new layer.
DRAWN = ("dropout", "keras.layers.MultiHeadAttention")
LINES = [(name, *row) for name, text in SECTIONS.items() for row in ROW.findall(text)]


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """What the lines use: 9 tokens, 4 heads of width 2."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 9, 8).unbind(0)
    found: dict[str, Any] = {"torch": torch, "rg": rg, "q": q, "k": k, "v": v, "q3": q[:, :, :3]}
    found |= {"k2": k[:, :2], "v2": v[:, :2], "q1": q[:, 0], "k1": k[:, 0], "v1": v[:, 0]}
    found |= {f"{name}t": found[name].transpose(1, 2) for name in "qkv"}
    found |= {"allowed": torch.rand(9, 9) > 0.3, "bias": torch.randn(9, 9), "slopes": torch.rand(4)}
    found["allowed"] |= torch.eye(9).bool()
    found["cache"] = rg.nn.GrowingCache()
    found["cache"].append(k[:, :, :2], v[:, :, :2])
    found |= {"hidden": ~found["allowed"], "causal": torch.ones(9, 9).tril().bool()}
    found |= {"table": torch.randn(4, 17), "ids": torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2])}
    found |= {"padding": torch.arange(9) >= torch.tensor([[5], [9]]), "tokens": torch.randn(9, 8)}
    found["cu_seqlens"] = torch.tensor([0, 4, 9], dtype=torch.int32)
    found |= {"sdpa": torch.nn.functional.scaled_dot_product_attention, "flex": flex_attention}
    found["block_mask"] = lambda fn: create_block_mask(fn, None, None, 9, 9, device="cpu")
    found |= {"from_blocked": from_blocked, "from_key_padding": from_key_padding}
    found["layer"] = torch.nn.MultiheadAttention(8, 4, batch_first=True).requires_grad_(False)
    found["own"] = rg.nn.MultiHeadAttention.from_torch(found["layer"])
    found |= {"x": torch.randn(2, 9, 8), "c": torch.randn(2, 7, 8)}
    found["model"], text = load(), b"She sells sea shells. " * 9
    found["report"] = read(found["model"], text)
    with torch.no_grad(), rg.record(found["model"], (rg.facts.Inputs(), rg.facts.Top(3))) as tape:
        found["model"](torch.tensor([list(text)]))
    found["call"] = tape.calls[0]
    found["given"] = tape.calls[0][rg.facts.Inputs()]
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "before", "after"), LINES, ids=lambda text: text)
def test_a_line_runs_and_agrees(
    name: str, before: str, after: str, names: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if "report.save" in after:
        pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'regard[plot]'")
    given = names
    if name == "FlashAttention" and "tokens" in after:
        given = names | {"x": names["tokens"]}
    found = eval(after, dict(given))
    if name not in COMPARED or any(word in before for word in DRAWN):
        return
    if name == "Keras":
        os.environ.setdefault("KERAS_BACKEND", "torch")
        given = given | {"keras": pytest.importorskip("keras")}
        importlib.import_module("keras.layers")
    expected = eval(before, dict(given))
    np.testing.assert_allclose(found.detach().numpy(), np.asarray(expected.tolist()), atol=2e-6)


def test_the_page_has_every_library() -> None:
    assert set(SECTIONS) == {*COMPARED, "FlashAttention", "BertViz", "TransformerLens"}
    assert all(len(ROW.findall(text)) >= 5 for text in SECTIONS.values())
    # a row that the pattern overlooks would be tested by nobody
    assert len(LINES) == sum(line.startswith("| `") for line in PAGE.splitlines())
