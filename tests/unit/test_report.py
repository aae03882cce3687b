"""Report: what is made of a model's calls, and what it is written as."""

from __future__ import annotations

import errno
import json
import re
from html import unescape
from pathlib import Path

import numpy as np
import pytest
import torch

import regard as rg
import sample_reports as reports
from regard.inspect.report import heads, page, save
from selection import few

BEGINS = {
    ".png": b"\x89PNG\r\n",
    ".svg": b"<?xml",
    ".pdf": b"%PDF-",
    ".html": b"<!DOCTYPE html>",
    ".npz": b"PK\x03\x04",
}


def test_a_report_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="calls is empty; a report needs one attention call or more"):
        rg.Report.of([], title="none", model="None")


def test_the_first_line_counts_both_sequences() -> None:
    q, k = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 6, 8)
    cross = rg.Report.of([reports.call(q, k)], title="dates", model="Made", cross="*")
    assert str(cross).splitlines()[0] == "dates (Made)  4–6 tokens, 1 × 2 heads   kept 1.0 kB"
    last = rg.Report.of([reports.call(q, k, positions=rg.tail(4, 6))], title="dates", model="Made", cross=())
    assert " 6 tokens," in str(last)


def test_a_head_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="there is no head L1H3; this model has layers 0 to 1, heads 0 to 2"):
        reports.report(2, 3).shown((1, 3))
    assert reports.report(2, 3).shown((1, 2))[1] == "L1H2: layers.1.attention"


def test_positions_that_all_batch_elements_share() -> None:
    """(1, n), as the position_ids of models often are."""
    layer, ids = rg.nn.MultiHeadAttention(8, heads=2), torch.arange(5)[None] + 3
    with rg.record(layer, facts=rg.Report.FACTS) as tape:
        layer(torch.randn(2, 5, 8), mask=rg.Causal(), positions=rg.Positions(ids, ids))
    reports = [rg.Report.of(tape.calls, title="", model="", element=n) for n in (0, 1)]
    assert [report.layers[0].counts.tolist() for report in reports] == [[[1, 2, 3, 4, 5]] * 2] * 2


def test_a_tape_is_enough() -> None:
    model = torch.nn.Sequential(rg.nn.MultiHeadAttention(8, heads=2), rg.nn.MultiHeadAttention(8, heads=4))
    with rg.record(model, facts=rg.Report.FACTS) as tape:
        model(torch.randn(3, 7, 8))
    report = rg.Report.of(tape.calls, title="two", model="Sequential", tokens="abcdefg", element=2)
    assert [layer.heads for layer in report.layers] == [2, 4] and [layer.name for layer in report.layers] == ["0", "1"]
    p = rg.attention_weights  # the dense definition, on what the first layer saw
    x = torch.randn(3, 7, 8)
    q, k, _ = model[0].project(x)
    with rg.record(model[0], facts=rg.Report.FACTS) as tape:
        model[0](x)
    layer = rg.Report.of(tape.calls, title="", model="", element=1).layers[0]
    torch.testing.assert_close(layer.received, p(q, k)[1].sum(-2))
    assert report.dense == 4 * 6 * 49


@pytest.mark.parametrize("suffix", few(BEGINS, ".html", ".npz"))
def test_the_suffix_says_what_is_written_and_the_same_report_gives_the_same_bytes(suffix: str, tmp_path: Path) -> None:
    first, second = tmp_path / f"a{suffix}", tmp_path / f"b{suffix.upper()}"
    reports.nasty().save(first, head=(1, 2))
    reports.nasty().save(str(second), head=(1, 2))
    assert first.read_bytes().startswith(BEGINS[suffix])
    assert first.read_bytes() == second.read_bytes()
    assert len(list(tmp_path.iterdir())) == 2


def test_another_suffix_names_the_known_ones(tmp_path: Path) -> None:
    for name in ("a.xyz", "a", "a.html.bak"):
        with pytest.raises(ValueError, match=r"none of \.png \.svg \.pdf \.html \.json \.npz"):
            reports.report().save(tmp_path / name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("head", [None, (9, 9)])
def test_a_file_is_never_half(head: tuple[int, int] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaking(report: rg.Report, file: object, head: object) -> None:
        file.write(b"half")  # type: ignore[attr-defined]
        raise ValueError("full")

    path = tmp_path / "a.json"
    path.write_text("whole")
    monkeypatch.setitem(save.WRITERS, ".json", breaking)
    with pytest.raises(ValueError, match="full" if head is None else "no head L9H9"):
        reports.report().save(path, head)
    assert path.read_text() == "whole" and list(tmp_path.iterdir()) == [path]


def test_a_save_that_was_killed_leaves_the_next_one_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of a container often have one number all, and threads always do."""
    path, parts = tmp_path / "a.json", list[list[Path]]()

    def nested(report: rg.Report, file: object, head: object) -> None:
        parts.append(list(tmp_path.iterdir()))
        if len(parts) < 3:  # as another thread would
            reports.report().save(path)
        file.write(b"{}")  # type: ignore[attr-defined]

    monkeypatch.setitem(save.WRITERS, ".json", nested)
    reports.report().save(path)
    assert [len(found) for found in parts] == [1, 2, 3] and list(tmp_path.iterdir()) == [path]


def test_a_full_disk_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(report: rg.Report, file: object, head: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")  # as write says it: without a file's name

    monkeypatch.setitem(save.WRITERS, ".json", full)
    with pytest.raises(OSError, match="No space left on device") as refused:
        reports.report().save(tmp_path / "a.json")
    assert refused.value.filename == str(tmp_path / "a.json")


def test_packed_sequences_have_their_own_keys() -> None:
    """Their positions begin anew in each sequence."""
    n = 11
    packed = rg.pack([torch.randn(4, 2), torch.randn(7, 2)])
    x = torch.eye(n)
    before = torch.cat([x[:1], x[:-1]])  # each query is the key before it
    mask = packed.mask & rg.Causal()
    call = reports.call(9 * before[None, None], 9 * x[None, None], mask, positions=packed.positions)
    layer = rg.Report.of([call], title="packed", model="Made").layers[0]
    assert layer.own.tolist() == list(range(n))
    share, _, rows = heads.looks_by(layer, -1)
    assert rows == 10 and float(share[0]) == pytest.approx(9 / 10)  # the second sequence's first token has none


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as refused:
        reports.report().save(tmp_path / "no" / "a.json")
    assert refused.value.filename == str(tmp_path / "no" / "a.json")


def test_json_has_what_is_shown(tmp_path: Path) -> None:
    report = reports.nasty()
    report.save(tmp_path / "a.json", head=(1, 0))
    content = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    assert content["schema"] == "regard-report-1" and content["shown"]["layer"] == 1
    assert [one["said"] for one in content["findings"]] == [one.said for one in report.findings]
    for found, layer in zip(content["layers"], report.layers, strict=True):
        assert found["name"] == layer.name and found["keys"]["tokens"] == list(layer.keys.tokens)
        for name in content["arrays"]:
            mine, wanted = torch.tensor(found[name]).double(), getattr(layer, name).double()
            torch.testing.assert_close(mine, wanted, rtol=1e-3, atol=1e-12, msg=lambda said, n=name: f"{n}: {said}")


def test_json_has_no_infinity(tmp_path: Path) -> None:
    inner = torch.ones(5, 5, dtype=torch.bool)
    inner[2] = False
    reports.report(n=5, mask=rg.Dense(inner)).save(tmp_path / "a.json")
    text = (tmp_path / "a.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail)["layers"][0]["max_score"][0][2] is None


def test_arrays_are_the_layers_own(tmp_path: Path) -> None:
    report = reports.report(2, (2, 3))
    report.save(tmp_path / "a.npz")
    with np.load(tmp_path / "a.npz", allow_pickle=False) as arrays:
        assert arrays["names"].tolist() == ["layers.0.attention", "layers.1.attention"]
        assert arrays["entropy/1"].shape == (3, 23)
        np.testing.assert_array_equal(arrays["maps/0"], report.layers[0].maps.numpy())
        assert arrays["keys/0"][3] == "t3"


def test_a_notebook_shows_the_page_in_a_frame() -> None:
    report = reports.nasty()
    cell = report._repr_html_()
    assert cell.startswith('<iframe sandbox="allow-scripts allow-downloads" ') and cell.count("<") == 2
    assert page.html(report, None) == unescape(re.search(r'srcdoc="([^"]*)"', cell)[1])
