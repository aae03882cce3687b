"""The page of a long text, of which it holds a map and the heaviest keys: how the other tokens are coloured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import regard as rg
import sample_reports as reports
from regard.inspect.report.colours import palette

# A visit takes half a second: a plain run makes those of test_page.py and test_served_page.py alone.
pytestmark = pytest.mark.full


def diffuse(mask: rg.Mask, n: int = 3010) -> rg.Report:
    """A report on a head that looks at all tokens nearly alike."""
    random = torch.Generator().manual_seed(1)
    q, k = torch.randn(2, 1, 1, n, 8, generator=random) * 0.3
    return rg.Report.of([reports.call(q, k, mask)], title="diffuse", model="Made", tokens=[f"t{i}" for i in range(n)])


def levels(seen: Any) -> dict[int, int]:
    """Which colour of the palette each token has that is shown, by its number; -1 for none."""
    words = "words => words.map(w => [Number(w.dataset.n), w.style.background])"
    shown = seen.page.locator("#words > bdi").evaluate_all(words)
    colours = [f"rgb({red}, {green}, {blue})" for red, green, blue in palette()]
    return {n: colours.index(ground) if ground else -1 for n, ground in shown}


def off(seen: Any) -> set[int]:
    """The tokens that are shown as such that cannot be attended to."""
    words = "words => words.filter(w => w.classList.contains('off')).map(w => Number(w.dataset.n))"
    return set(seen.page.locator("#words > bdi").evaluate_all(words))


def test_the_keys_of_a_diffuse_row_have_the_means_of_their_cells(visit: Any, tmp_path: Path) -> None:
    report = diffuse(rg.Causal())
    report.save(tmp_path / "a.html")
    seen = visit(tmp_path / "a.html", address="#L0H0&query=1200&scale=linear")
    shown = levels(seen)
    seeing = [n for n in shown if n <= 1200]
    assert len(shown) == 2048 and {n for n in shown if shown[n] > 0} == set(seeing)
    assert off(seen) == {n for n in shown if n > 1200}
    layer = report.layers[0]
    cell = int((layer.row_edges <= 1200).sum()) - 1
    means = (layer.maps[0, cell] / layer.col_edges.diff()).repeat_interleave(layer.col_edges.diff())
    weights = means.scatter(0, layer.top_keys[0, 1200], layer.top_weights[0, 1200])
    wanted = weights[seeing] / weights.max() * 254
    # A map's cell has one of 255 levels, 3.7 % apart.
    torch.testing.assert_close(torch.tensor([float(shown[n]) for n in seeing]), wanted, rtol=0.02, atol=1)
    assert set(seen.listed()) == set(layer.top_keys[0, 1200].tolist())  # the list holds exact weights alone
    assert "the mean of their cell of the map" in seen.page.inner_text("#text-scale")
    assert seen.page.inner_text("#text-scale .off") == "cannot attend"


def test_the_logarithmic_scale_begins_below_the_means(visit: Any, tmp_path: Path) -> None:
    diffuse(rg.Everything()).save(tmp_path / "a.html")
    seen = visit(tmp_path / "a.html", address="#L0H0&query=1200&scale=log")
    assert seen.page.inner_text("#text-scale .least") == "0.0004 %"
    assert min(levels(seen).values()) > 0.3 * 254
    assert seen.page.inner_text("#map-scale .least") == "0.01 %"


def test_the_readers_of_a_key_have_the_means_of_their_cells(visit: Any, tmp_path: Path) -> None:
    diffuse(rg.Window(before=900, after=0)).save(tmp_path / "a.html")
    seen = visit(tmp_path / "a.html", address="#L0H0&key=500&by=keys&scale=linear")
    shown = levels(seen)
    assert {n for n in shown if shown[n] > 0} == set(range(500, 1401))
    seen.page.locator("[value='lines']").click()
    seen.settle()
    reads, does_not = (seen.page.locator(f"#left [data-n='{n}']").get_attribute("style") for n in (1300, 1500))
    assert reads and "background" in reads and not does_not
