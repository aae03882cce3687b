"""Repeated calls of flex_attention: equal functions share what was made for them, changed ones never do."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import and_masks, create_block_mask

from needed import needs_kernels
from regard.compat.torch import flex_attention, function_copies, translations
from regard.core.functions import Unknown, function_key
from regard.runtime import plan_cache

pytestmark = needs_kernels

HEADS, N = 4, 37
RATE, TABLE = 2.0, torch.linspace(-1, 1, HEADS)
Mod = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    plan_cache.clear()
    translations._kept.clear()
    function_copies._copies.clear()
    with torch.no_grad():
        yield


def drawn(nq: int = N, nk: int = N) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(2, HEADS, nq, 8), torch.randn(2, HEADS, nk, 8), torch.randn(2, HEADS, nk, 8)


def definition(q: Tensor, k: Tensor, v: Tensor, score_mod: Mod | None, mask_mod: Mod | None) -> Tensor:
    b, h = torch.arange(2)[:, None, None, None], torch.arange(HEADS)[:, None, None]
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    s = q.double() @ k.double().mT / 8**0.5
    s = s if score_mod is None else score_mod(s, b, h, i, j)
    s = s if mask_mod is None else s.masked_fill(~mask_mod(b, h, i, j), -math.inf)
    return torch.softmax(s, -1) @ v.double()


def compare(score_mod: Mod | None = None, mask_mod: Mod | None = None, given: Any = None) -> None:
    q, k, v = given or drawn()
    mask = None if mask_mod is None else create_block_mask(mask_mod, 2, HEADS, q.shape[2], k.shape[2], device="cpu")
    right = definition(q, k, v, score_mod, mask_mod)
    found = flex_attention(q, k, v, score_mod, mask)
    assert (found - right).abs().max() < 2e-5
    again, lse = flex_attention(q, k, v, score_mod, mask, return_lse=True)
    assert (again - right).abs().max() < 2e-5 and lse.shape == (2, HEADS, q.shape[2])


def by_number(factor: float) -> Mod:
    return lambda s, b, h, i, j: torch.tanh(s * factor) * s


def by_head(table: Tensor) -> Mod:
    return lambda s, b, h, i, j: torch.tanh(s * table[h]) + table[h] * (i - j).abs()


def near(reach: Tensor) -> Mod:
    return lambda b, h, i, j: ((i // 7 - j // 7).abs() <= reach[h]) & ((i % 7 - j % 7).abs() <= reach[h])


def alibi(slopes: Tensor) -> Mod:
    return lambda s, b, h, i, j: s + slopes[h] * (j - i)


def test_equal_functions_are_translated_once_and_planned_once() -> None:
    with patch.object(translations, "_translated", side_effect=translations._translated) as made:
        for n in range(4):
            compare(by_number(2.0))
            compare(by_head(torch.ones(HEADS)))
            compare(None, near(torch.tensor([1, 2, 1, 3])))
            compare(by_head(torch.ones(HEADS)), near(torch.tensor([1, 2, 1, 3])))
            if n == 0:
                plans = len(plan_cache.plans())
    assert made.call_count == 4
    assert len(plan_cache.plans()) == plans > 0


def test_lengths_share_the_plan_of_a_function() -> None:
    for nk in range(20, 40):
        compare(by_head(torch.ones(HEADS)), given=drawn(3, nk))
    assert len(plan_cache.plans()) == 2  # with gradients and without


def test_tensors_that_are_replaced_or_changed_in_place() -> None:
    table, reach = torch.linspace(-1, 1, HEADS), torch.tensor([1, 2, 3, 1])
    changes: list[Callable[[], Any]] = [
        lambda: None,
        lambda: table.add_(1),
        lambda: table.data.mul_(-2),
        lambda: table.numpy().__setitem__(1, 3.5),
        lambda: reach.add_(1),
        lambda: reach.numpy().__setitem__(0, 5),
        lambda: table.sub_(2),
    ]
    score, mask = by_head(table), near(reach)
    for change in changes:
        change()
        compare(score, mask)
        compare(alibi(table))
    for other in (table.clone(), table + 1, table[:1].expand(HEADS), table.double(), table.bfloat16()):
        compare(by_head(other), mask)


def test_a_kept_translation_reads_none_of_the_callers_tensors() -> None:
    """Another tensor with the numbers of long ago gets them, not those that the first tensor has now."""
    for of in (by_head, alibi, lambda t: lambda s, b, h, i, j: s + t[h], lambda t: lambda s, b, h, i, j: s * t[h]):
        table = torch.linspace(-1, 1, HEADS)
        before = table.clone()
        compare(of(table))
        table.mul_(7)
        compare(of(before))
        compare(of(table))


def test_a_method_of_a_tensor_is_not_known_by_identity() -> None:
    read = TABLE.clone().take
    with pytest.raises(Unknown):
        function_key(lambda s, b, h, i, j: s + read(h))


def test_an_attribute_is_no_name_of_the_module() -> None:
    """A modifier reads self.TABLE, and its module has a TABLE of its own: what is made for the modifier is kept."""
    by_attribute: Any = lambda self, s: s * self.TABLE  # noqa: E731
    assert function_key(by_attribute) == function_key(by_attribute)
    with pytest.raises(Unknown):
        function_key(lambda s: s * TABLE)  # type: ignore[arg-type, return-value]


def test_a_function_with_attributes_is_unknown() -> None:
    """What reads helper.scale finds another number after helper.scale = 5."""

    def helper() -> None: ...

    helper.scale = 2.0  # type: ignore[attr-defined]
    with pytest.raises(Unknown):
        function_key(lambda s, b, h, i, j: s * helper.scale)  # type: ignore[attr-defined]


@pytest.mark.parametrize("code", ["globals()['TABLE']", "eval('TABLE')", "vars()['TABLE']"])
def test_what_asks_for_any_name_is_unknown(code: str) -> None:
    with pytest.raises(Unknown):
        function_key(eval(f"lambda s: s * {code}"))


def test_tensors_of_many_numbers() -> None:
    bias = torch.randn(2, HEADS, 50, 50)
    score: Mod = lambda s, b, h, i, j: s + bias[b, h, i, j]  # noqa: E731
    other: Mod = lambda s, b, h, i, j: torch.tanh(s) + bias[b, h, i, j]  # noqa: E731
    assert bias.nbytes > 1 << 16
    for _ in range(2):
        compare(score)
        compare(other)
        bias.numpy()[:] *= -2


def test_numbers_that_change() -> None:
    for factor in (2.0, 3.0, 2, True, 0.0, -0.0, 2.0):
        compare(by_number(factor))
    rate = 1.0

    def cell(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.tanh(s) * rate

    for rate in (1.0, 2.0, 1.0):  # noqa: B007
        compare(cell)


def test_names_of_the_module_that_change(monkeypatch: pytest.MonkeyPatch) -> None:
    def inside(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return sum((torch.tanh(s * (RATE + x)) * TABLE[h] for x in range(2)), start=s)

    for rate, table in ((2.0, TABLE), (3.0, TABLE), (3.0, TABLE + 1), (2.0, TABLE)):
        monkeypatch.setitem(globals(), "RATE", rate)
        monkeypatch.setitem(globals(), "TABLE", table)
        compare(inside)


def test_a_function_that_rebinds_what_it_reads_is_called_each_time() -> None:
    count = 0.0

    def counted(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return torch.tanh(s) * s

    compare(counted)
    before = count
    compare(counted)
    assert count > before + 1  # once by the definition


def test_functions_inside_of_functions() -> None:
    def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i >= j

    for reach in (1, 2, 1):
        compare(None, and_masks(causal, near(torch.full((HEADS,), reach))))
    assert len(function_copies._copies) == 2


def test_a_tensor_that_comes_to_require_a_gradient() -> None:
    """The translation that is kept serves the calls in which it requires none."""
    table = torch.ones(HEADS)
    compare(by_head(table))
    q, k, v = drawn()
    for _ in range(2):
        table.requires_grad_()
        with torch.enable_grad():
            found, right = (
                torch.autograd.grad(out.square().sum(), table)[0]
                for out in (flex_attention(q, k, v, by_head(table)), definition(q, k, v, by_head(table), None))
            )
        assert (found - right).abs().max() < 1e-4 * right.abs().max()
        compare(by_head(table.requires_grad_(False)))


def test_gradients_of_queries() -> None:
    q, k, v = drawn()
    for table in (torch.ones(HEADS), torch.ones(HEADS), torch.zeros(HEADS)):
        with torch.enable_grad():
            x = q.clone().requires_grad_()
            found = torch.autograd.grad(flex_attention(x, k, v, by_head(table)).square().sum(), x)[0]
            right = torch.autograd.grad(definition(x, k, v, by_head(table), None).square().sum(), x)[0]
        assert (found - right).abs().max() < 1e-4


@pytest.mark.full
def test_threads_with_functions_of_one_code() -> None:
    given = drawn()

    def one(n: int) -> None:
        with torch.no_grad():
            compare(by_head(torch.full((HEADS,), float(n % 3))), near(torch.full((HEADS,), n % 2 + 1)), given)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(one, range(48)))


def test_a_tensor_that_a_thread_changes_all_the_time() -> None:
    """Whatever a call saw, later calls with known numbers are right."""
    table, given, stop = torch.ones(HEADS), drawn(), []

    def change() -> None:
        n = 0
        while not stop:
            n += 1
            table.fill_(float(n % 2))

    with ThreadPoolExecutor(1) as pool:
        pool.submit(change)
        for _ in range(200):
            flex_attention(*given, by_head(table))
        stop.append(True)
    for number in (0.0, 1.0):
        compare(by_head(torch.full((HEADS,), number)), given=given)
