"""The page's measures: weights, the norm carried, the mean of heads, rollout; each held to the numbers of Python."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import regard as rg
import sample_reports as reports
from regard.demo.model import load
from regard.demo.reading import read

pytestmark = pytest.mark.full

TEXT = b"Sally sells seashells by the seashore; Sally sells"
LONG = TEXT * 13  # more than 512 tokens: cells and the heaviest keys


def saved(folder: Path, name: str, report: rg.Report) -> Path:
    report.save(folder / name, head=(3, 1))
    return folder / name


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder, model = tmp_path_factory.mktemp("measures"), load()
    found: dict[str, Any] = {}
    for name, text in (("short", TEXT), ("long", LONG)):
        report = read(model, text, facts=(*rg.Report.FACTS, rg.facts.Inputs()))
        carried = rg.heads.carried(model, list(text))
        path = saved(folder, f"{name}.html", report.with_heads(carried))
        found[name] = (path, report, carried, saved(folder, f"{name}-plain.html", report))
    return found


def choose(seen: Any, measure: str) -> None:
    seen.page.click(f"[data-choice='measure'][value='{measure}']")
    seen.page.wait_for_selector(f"[value='{measure}'][aria-pressed='true']")


def exact(report: rg.Report, layer: int) -> Tensor:
    return report.layers[layer].every_weight()


@pytest.mark.parametrize(("layer", "head", "far"), [(0, 1, False), (3, 1, True)])
def test_the_scale_of_the_mass_that_keys_receive_is_told(
    made: Any, visit: Any, layer: int, head: int, far: bool
) -> None:
    path, report, *_ = made["short"]
    received = report.layers[layer].received[head]
    ratio = float(received.max() / received.min())
    assert far == (ratio > 1000)
    said = visit(path, address=f"#L{layer}H{head}").page.inner_text("#received-scale")
    found = re.fullmatch(r"logarithmic: the highest is (more than )?([\d.,]+) times the lowest", said)
    assert found is not None, said
    assert bool(found[1]) == far
    assert float(found[2].replace(",", "")) == (1000 if far else pytest.approx(ratio, rel=0.06))


def test_the_norm_carried_is_that_of_python(made: Any, visit: Any) -> None:
    path, report, carried, _ = made["short"]
    seen = visit(path, address="#L3H1&query=45")
    choose(seen, "carried")
    layer = carried.carried[3]
    expected = 100 * exact(report, 3)[1, 45] * layer.norms[1] / layer.norms[1].max()
    for key, share in seen.listed().items():
        assert share == pytest.approx(float(expected[key]), rel=0.1, abs=0.2)
    assert next(iter(seen.listed())) == int(expected.argmax()) == int(layer.top.keys[1, 45, 0])
    assert f"largest norm of this head, {layer.norms[1].max():.3g}" in seen.page.inner_text("#measured")
    best = seen.page.locator("#best .bar-line .share").all_inner_texts()
    assert float(best[0]) == pytest.approx(float(layer.received[1].max()), rel=0.01)
    assert "norms that add up to" in seen.page.inner_text("#mass") and not seen.said


def test_the_mean_of_heads_and_rollout(made: Any, visit: Any) -> None:
    path, report, *_ = made["short"]
    seen = visit(path, address="#L3H1&query=45")
    choose(seen, "mean")
    mean = 100 * exact(report, 3)[:, 45].mean(0)
    for key, share in seen.listed().items():
        assert share == pytest.approx(float(mean[key]), rel=0.05, abs=0.9)
    assert seen.page.inner_text("#name").startswith("L3, mean of heads") and not seen.page.is_visible("#numbers")
    choose(seen, "rollout")
    calls = [layer.calls[0].call for layer in report.layers]
    shares = 100 * rg.rollout(calls, row=45)[0]
    for key, share in seen.listed().items():
        assert share == pytest.approx(float(shares[key]), rel=0.05, abs=0.9)
    choose(seen, "weights")
    assert seen.name() == "L3H1" and seen.page.is_visible("#numbers") and not seen.said


def test_heads_of_unlike_masks_have_a_mean(visit: Any, tmp_path: Path) -> None:
    """A pair that one head may not see has a weight of 0 there."""
    q, k = torch.randn(2, 1, 2, 12, 8, generator=torch.Generator().manual_seed(2)) * 2
    seen = torch.ones(1, 2, 12, 12, dtype=torch.bool).tril()
    seen[0, 0, :, 3], seen[0, 1, :, 1], seen[0, :, 3, 3], seen[0, :, 1, 1] = False, False, True, True
    tokens = [f"t{n}" for n in range(12)]
    report = rg.Report.of([reports.call(q, k, rg.Dense(seen))], title="unlike", model="Made", tokens=tokens)
    opened = visit(saved_at(tmp_path, report), address="#L0H0&query=9")
    choose(opened, "mean")
    mean = 100 * rg.attention_weights(q, k, mask=rg.Dense(seen))[0, :, 9].mean(0)
    listed = opened.listed()
    assert {1, 3} & set(listed)
    for key, share in listed.items():
        assert share == pytest.approx(float(mean[key]), rel=0.05, abs=0.9)


def saved_at(folder: Path, report: rg.Report) -> Path:
    report.save(folder / "unlike.html")
    return folder / "unlike.html"


def test_an_address_names_the_measure(made: Any, visit: Any) -> None:
    path = made["short"][0]
    seen = visit(path, address="#L2H0&query=9&measure=carried")
    assert seen.page.inner_text("#name").startswith("L2H0 carried norm")
    assert "share of the largest norm, " in seen.page.inner_text("#text-scale")
    seen.press("ArrowRight")
    assert "measure=carried" in seen.page.url and seen.page.inner_text("#name").startswith("L2H1 carried norm")


def test_a_long_text_has_the_keys_that_carry_most(made: Any, visit: Any) -> None:
    path, _, carried, _ = made["long"]
    seen = visit(path, address="#L3H1&query=600")
    choose(seen, "carried")
    layer = carried.carried[3]
    top = dict(zip(layer.top.keys[1, 600].tolist(), layer.top.weights[1, 600].tolist(), strict=True))
    found = seen.listed()
    assert set(found) == set(top)
    for key, share in found.items():
        assert share == pytest.approx(100 * top[key] / float(layer.norms[1].max()), rel=0.03, abs=0.02)
    assert seen.page.locator("[value='rollout']").is_disabled()
    choose(seen, "mean")
    assert seen.page.inner_text("#name").startswith("L3, mean of heads") and not seen.said


def test_a_page_without_it_says_how_to_get_it(made: Any, visit: Any) -> None:
    seen = visit(made["short"][3], address="#L3H1&measure=carried")
    button = seen.page.locator("[value='carried']")
    assert button.is_disabled() and "rg.heads.carried" in button.get_attribute("title")
    assert seen.page.inner_text("#name").startswith("L3H1 blocks")
