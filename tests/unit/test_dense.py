"""Dense and Where: what they show, and what they refuse."""

from __future__ import annotations

import re
import warnings

import pytest
import torch

import regard as rg

TRIANGLE = torch.ones(3, 3, dtype=torch.bool).tril()


def test_dense_and_where_draw_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    rg.Dense(TRIANGLE).draw(3)
    rg.Where(lambda b, h, i, j: j <= i).draw(3)
    rg.Where(lambda b, h, i, j: TRIANGLE[i, j]).draw(3)
    assert capsys.readouterr().out.split() == ["■··", "■■·", "■■■"] * 3


def test_where_sees_batch_head_and_positions() -> None:
    at = rg.Positions(torch.tensor([10, 20]), torch.tensor([[1, 2, 3], [4, 5, 6]]))
    seen: dict[str, list[int]] = {}

    def fn(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        seen.update({name: x.flatten().tolist() for name, x in zip("bhij", (b, h, i, j), strict=True)})
        return (b == 1) & (h == 4) & (i == 20) & (j == 6)

    dense = rg.Where(fn).on(2, 3, positions=at, batch=(2,), heads=5).dense()
    assert seen == {"b": [0, 1], "h": list(range(5)), "i": [10, 20], "j": [1, 2, 3, 4, 5, 6]}
    assert dense.shape == (2, 5, 2, 3) and dense.nonzero().tolist() == [[1, 4, 1, 2]]


@pytest.mark.parametrize(
    "shape", [(3, 5), (1, 5), (3, 1), (5,), (), (4, 3, 5), (2, 1, 3, 5), (2, 4, 1, 1), (2, 4, 3, 5)]
)
def test_dense_broadcasts_from_every_rank(shape: tuple[int, ...]) -> None:
    allowed = torch.rand(shape) < 0.6
    got = rg.Dense(allowed).on(3, 5, batch=(2,), heads=4).dense()
    assert torch.equal(got.expand(2, 4, 3, 5), allowed.expand(2, 4, 3, 5))


def test_without_a_head_axis_three_axes_are_batch_rows_keys() -> None:
    q, k = torch.randn(2, 3, 7), torch.randn(2, 5, 7)
    allowed = torch.rand(2, 3, 5) < 0.6
    got = rg.attention_weights(q, k, mask=rg.Dense(allowed))
    expected = rg.attention_weights(q[:, None], k[:, None], mask=rg.Dense(allowed[:, None]))
    assert torch.equal(got, expected[:, 0]) and torch.equal(got > 0, allowed)


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        (
            torch.ones(3, 3),
            "has dtype torch.float32; expected torch.bool, True = may attend: a float mask .*added",
        ),
        (torch.ones(3, 3).half(), "0 and 1 become a mask by mask.bool()"),
        (
            torch.ones(3, 3).long(),
            r"torch.int64.* write mask.bool\(\) if 1 means may attend, mask == 0 if 1 means masked",
        ),
        (torch.ones(3, 3).byte(), r"torch.uint8.* write mask.bool\(\)"),
    ],
)
def test_numbers_are_refused(mask: torch.Tensor, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        rg.Dense(mask)


AMBIGUOUS = "two axes is read as \\(nq, nk\\)"


@pytest.mark.parametrize("headed", [True, False], ids=["four axes", "three axes"])
@pytest.mark.parametrize("batch", range(1, 7))
def test_two_axes_are_queries_and_keys_for_every_batch(batch: int, headed: bool) -> None:
    """Also where the batch happens to be as long as the queries: then with a warning, whose ways out are right."""
    q, k = torch.randn(batch, 3, 7), torch.randn(batch, 5, 7)
    q, k = (q[:, None], k[:, None]) if headed else (q, k)
    mask = torch.arange(5) < torch.tensor([[1], [3], [5]])
    if batch != 3:
        assert torch.equal(rg.attention_weights(q, k, mask=rg.Dense(mask)) > 0, mask.expand(*q.shape[:-1], 5))
        return
    with pytest.warns(UserWarning, match=AMBIGUOUS) as warned:
        weights = rg.attention_weights(q, k, mask=rg.Dense(mask))
    assert torch.equal(weights > 0, mask.expand(*q.shape[:-1], 5))
    said = str(warned[0].message)
    per_key = "Dense(mask[:, None, None, :])" if headed else "Dense(mask[:, None, :])"
    per_pair = "Dense(mask[None, None])" if headed else "Dense(mask[None])"
    assert f"(nq, nk) is {per_pair}; a padding mask (batch, nk) is {per_key}, or Lengths(keys=mask.sum(-1))" in said
    names = {"Dense": rg.Dense, "Lengths": rg.Lengths, "mask": mask}
    first, second, third = (
        rg.attention_weights(q, k, mask=eval(way, names)) for way in (per_key, "Lengths(keys=mask.sum(-1))", per_pair)
    )
    torch.testing.assert_close(first, second)
    assert ((first > 0) == mask.view(3, *[1] * (q.dim() - 2), 5)).all()
    assert torch.equal(third, weights)


def test_two_axes_warn_once_a_process() -> None:
    """Python's usual filter, which is set anew here, shows a text once for each line that says it."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        for n in (3, 4, 3):
            x, allowed = torch.ones(n, 2, n, 4), torch.ones(n, n, dtype=torch.bool)
            for _ in range(2):
                rg.attention(x, x, x, mask=rg.Dense(allowed))
            rg.explain(x, x, x, mask=rg.Dense(allowed) & rg.Causal())
    assert len(said) == 1 and re.search(AMBIGUOUS, str(said[0].message))


@pytest.mark.full
def test_two_axes_are_no_matter_under_transforms_and_compilers() -> None:
    q, mask = torch.randn(3, 2, 3, 4), rg.Dense(torch.ones(3, 3, dtype=torch.bool).tril())

    def call(q: torch.Tensor) -> torch.Tensor:
        return rg.attention(q, q, q, mask=mask)

    expected = call(q[:2])  # two sequences of three queries: nothing to say
    for road in (torch.vmap(call), torch.compile(call, backend="eager"), torch.func.functionalize(call)):
        torch.testing.assert_close(road(q)[:2], expected)


@pytest.mark.parametrize("shape", [(2, 5), (3, 2), (3, 4, 3, 5), (2, 3, 3, 5), (1, 2, 4, 3, 5)])
def test_what_does_not_broadcast_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(
        rg.ShapeError, match=r"Dense.allowed has shape .*; expected one that broadcasts to \(2, 4, 3, 5\)"
    ):
        rg.Dense(torch.ones(shape, dtype=torch.bool)).on(3, 5, batch=(2,), heads=4)


@pytest.mark.parametrize(("answer", "said"), [(torch.ones(3, 3), "torch.float32"), (True, "bool")])
def test_where_must_answer_in_booleans(answer: object, said: str) -> None:
    with pytest.raises(TypeError, match=f"Where.fn returned {said}; expected a boolean tensor, True = may attend"):
        rg.Where(lambda b, h, i, j: answer).dense(3)
