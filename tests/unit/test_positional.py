"""Causal, Window, Prefix, Dilated: pictures drawn by hand, and what they refuse."""

from __future__ import annotations

import textwrap

import pytest
import torch

import regard as rg
from regard import Mask, Positions

PICTURES: list[tuple[Mask, str]] = [
    (
        rg.Causal(),
        """
        ■····
        ■■···
        ■■■··
        ■■■■·
        ■■■■■
        """,
    ),
    (
        rg.Window(before=1, after=2),
        """
        ■■■··
        ■■■■·
        ·■■■■
        ··■■■
        ···■■
        """,
    ),
    (
        rg.Window(before=None, after=1),
        """
        ■■···
        ■■■··
        ■■■■·
        ■■■■■
        ■■■■■
        """,
    ),
    (
        rg.Window(before=0, after=None),
        """
        ■■■■■
        ·■■■■
        ··■■■
        ···■■
        ····■
        """,
    ),
    (
        rg.Causal() | rg.Prefix(3),
        """
        ■■■··
        ■■■··
        ■■■··
        ■■■■·
        ■■■■■
        """,
    ),
    (
        rg.Causal() & (rg.Window(before=1, after=0) | rg.Prefix(1)),
        """
        ■····
        ■■···
        ■■■··
        ■·■■·
        ■··■■
        """,
    ),
    (
        rg.Dilated(3),
        """
        ■··■·
        ·■··■
        ··■··
        ■··■·
        ·■··■
        """,
    ),
    (
        rg.Window(before=4, after=0) & rg.Dilated(2),
        """
        ■····
        ·■···
        ■·■··
        ·■·■·
        ■·■·■
        """,
    ),
    (
        ~(rg.Causal() & rg.Window(before=1, after=0)),
        """
        ·■■■■
        ··■■■
        ■··■■
        ■■··■
        ■■■··
        """,
    ),
]


@pytest.mark.parametrize(("mask", "picture"), PICTURES, ids=[repr(mask) for mask, _ in PICTURES])
def test_pictures(mask: Mask, picture: str, capsys: pytest.CaptureFixture[str]) -> None:
    mask.draw(5)
    assert capsys.readouterr().out.strip() == textwrap.dedent(picture).strip()


def test_a_decoding_step_and_a_first_chunk(capsys: pytest.CaptureFixture[str]) -> None:
    rg.Causal().draw(2, 5, positions=rg.tail(2, 5))
    rg.Causal().draw(2, 5, positions=rg.head(2, 5))
    rg.Causal().draw(3, 2, positions=rg.tail(3, 2))
    assert capsys.readouterr().out.split() == ["■■■■·", "■■■■■", "■····", "■■···", "··", "■·", "■■"]


def test_batch_elements_are_drawn_apart(capsys: pytest.CaptureFixture[str]) -> None:
    rg.Prefix(torch.tensor([0, 2])).draw(2)
    rg.Causal().draw(2, positions=Positions(torch.tensor([[0, 1], [5, 5]]), torch.tensor([4, 1])))
    assert capsys.readouterr().out == "··\n··\n\n■■\n■■\n··\n·■\n\n■■\n■■\n"


def test_keys_in_any_order_and_more_than_once(capsys: pytest.CaptureFixture[str]) -> None:
    at = Positions(torch.tensor([1, 3]), torch.tensor([3, 0, 3, 1, 7]))
    rg.Causal().draw(2, 5, positions=at)
    rg.Window(before=2, after=None).draw(2, 5, positions=at)
    assert capsys.readouterr().out.split() == ["·■·■·", "■■■■·", "■■■■■", "■·■■■"]


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: rg.Window(before=-1, after=0), ValueError, r"Window\(before=-1\): expected .* keys besides"),
        (lambda: rg.Window(before=0, after=-2), ValueError, r"Window\(after=-2\)"),
        (lambda: rg.Window(before=1.0, after=0), TypeError, "Window.before is a float; expected an integer, or None"),
        (lambda: rg.Dilated(0), ValueError, r"Dilated\(step=0\): expected a step of 1 or more"),
        (lambda: rg.Dilated(1.5), TypeError, "Dilated.step is a float"),
        (lambda: rg.Prefix(2.5), TypeError, r"Prefix.n is 2\.5, a float; expected an integer"),
        (lambda: rg.Prefix(torch.tensor(2.5)), TypeError, "Prefix.n has dtype torch.float32; expected an integer"),
        (lambda: rg.Prefix(torch.tensor([True])), TypeError, "Prefix.n has dtype torch.bool"),
        (
            lambda: rg.Prefix(torch.tensor([1, 2])).on(5, batch=(3,)),
            rg.ShapeError,
            r"Prefix.n has shape \(2,\); expected the batch axes \(3,\)",
        ),
    ],
)
def test_refusals(make: object, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        make()


def test_small_integers_do_not_wrap() -> None:
    mask = rg.Prefix(torch.tensor([0, 3], dtype=torch.uint8))
    assert mask.on(4).counts().flatten(1).tolist() == [[0] * 4, [3] * 4]
