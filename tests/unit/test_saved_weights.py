"""The arrays of a report, .npz: every weight of texts of up to 2,048 tokens; and what the documents say of them."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

import regard as rg
import sample_reports as reports
from regard.demo.model import load
from regard.demo.reading import read
from regard.inspect.report import layer
from regard_command import main

TEXT = (b"She sells sea shells by the sea shore, the shells that she sells. " * 10)[:601]


def saved(report: rg.Report, folder: Path) -> dict[str, np.ndarray]:
    report.save(folder / "a.npz")
    with np.load(folder / "a.npz", allow_pickle=False) as arrays:
        return dict(arrays)


def recorded(n: int, **options: object) -> tuple[rg.Report, torch.Tensor]:
    """A report on one layer with its queries and keys, and the weights of the second of two sequences."""
    module = rg.nn.MultiHeadAttention(16, heads=2)
    x = torch.randn(2, n, 16)
    with torch.no_grad(), rg.record(module, facts=(*rg.Report.FACTS, rg.facts.Inputs())) as tape:
        module(x, mask=rg.Causal())
        q, k, _ = module.project(x)
    report = rg.Report.of(tape.calls, title="one", model="Made", element=1, **options)
    return report, rg.attention_weights(q.double(), k.double(), mask=rg.Causal())[1]


@pytest.mark.parametrize("n", [23, 601])
def test_weights_are_exact_where_queries_and_keys_were_kept(n: int, tmp_path: Path) -> None:
    report, p = recorded(n)
    arrays = saved(report, tmp_path)
    assert arrays["weights/0"].dtype == np.float32 and arrays["weights_exact/0"]
    np.testing.assert_allclose(arrays["weights/0"], p, atol=1e-6)


def test_weights_are_those_of_the_page_where_they_were_not(tmp_path: Path) -> None:
    q, k = torch.randn(2, 1, 2, 23, 8)
    report = rg.Report.of([reports.call(q, k, rg.Causal())], title="one", model="Made")
    arrays, p = saved(report, tmp_path), rg.attention_weights(q.double(), k.double(), mask=rg.Causal())[0]
    assert arrays["weights/0"].dtype == np.float32 and not arrays["weights_exact/0"]
    assert (np.abs(arrays["weights/0"] - p.numpy()) <= p.numpy() ** 0.5 / 127 + 1.6e-5).all()
    assert (arrays["weights/0"][:, ~np.tri(23, dtype=bool)] == 0).all()


def test_longer_texts_have_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "SAVED", 22)
    assert not {"weights/0", "weights_exact/0"} & saved(recorded(23)[0], tmp_path).keys()
    monkeypatch.undo()
    assert layer.SAVED == 2048
    assert "weights/0" not in saved(reports.report(1, 1, 601), tmp_path)  # neither kept: a map alone


@pytest.mark.full
def test_a_model_that_reads_a_text_has_its_weights(tmp_path: Path) -> None:
    model, tokens = load(), torch.tensor(list(TEXT))
    for report in (read(model, TEXT), rg.look(model, tokens.tolist())):
        arrays = saved(report, tmp_path)
        assert arrays["weights/3"].shape == (report.layers[3].heads, 601, 601) and arrays["weights_exact/3"]
        np.testing.assert_allclose(arrays["weights/3"].sum(-1), 1, atol=1e-5)
        np.testing.assert_allclose(arrays["weights/3"][1, 400], report.row("L3H1", 400), atol=1e-6)


def test_the_command_keeps_what_the_weights_are_computed_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["look", "-t", "to be or not to be", "-o", str(tmp_path / "a.npz")]) == 0
    assert "q and k" in capsys.readouterr().out.replace("\n", " ")
    with np.load(tmp_path / "a.npz") as arrays:
        assert arrays["weights/3"].shape == (4, 18, 18) and arrays["weights_exact/3"]


def test_steps_of_generate_are_one_array(tmp_path: Path) -> None:
    module, cache, x = rg.nn.MultiHeadAttention(16, heads=2), rg.nn.GrowingCache(), torch.randn(1, 9, 16)
    with torch.no_grad(), rg.record(module, facts=(*rg.Report.FACTS, rg.facts.Inputs())) as tape:
        for start, end in ((0, 6), (6, 7), (7, 9)):
            module(x[:, start:end], mask=rg.Causal(), cache=cache)
        q, k, _ = module.project(x)
    arrays = saved(rg.Report.of(tape.calls, title="a cache", model="Made"), tmp_path)
    np.testing.assert_allclose(arrays["weights/0"], rg.attention_weights(q, k, mask=rg.Causal())[0], atol=1e-6)


def test_the_documents_name_each_array_and_its_dtype(tmp_path: Path) -> None:
    report = reports.report(2, 3, 23)
    arrays = saved(report.with_heads(*reports.results(report)), tmp_path)
    text = (Path(__file__).parents[2] / "docs" / "report.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ((?:`[\w/]+`,? ?)+) \| ([\w<]+) \| \(.* \|", text, re.MULTILINE)
    said = {name: dtype for names, dtype in rows for name in re.findall(r"`([\w/]+)`", names)}
    of_heads = {name for one in reports.results(report) for name in one.arrays}
    found = {name.replace("/1", "/0"): array.dtype for name, array in arrays.items()}
    named = {name: "str" if dtype.kind == "U" else str(dtype) for name, dtype in found.items()}
    assert {name: dtype for name, dtype in named.items() if name.split("/")[0] not in of_heads} == said
