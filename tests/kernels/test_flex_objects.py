"""score_mods and mask_mods that are methods, modules and other callable objects: shared across calls, never stale."""

from __future__ import annotations

import gc
import types
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask

from needed import needs_kernels
from pair_definition import BATCH, HEADS, Mod, N, definition
from regard.compat.torch import flex_attention, function_copies, translations
from regard.core.functions import Unknown, callable_key
from regard.runtime import plan_cache

pytestmark = needs_kernels

RATE = 0.5


@pytest.fixture(autouse=True)
def _forgotten() -> None:
    plan_cache.clear()
    translations._kept.clear()
    function_copies._copies.clear()
    function_copies._templates.clear()


def compare(score: Mod | None = None, mask: Mod | None = None, learned: tuple[Tensor, ...] = ()) -> None:
    """Output and gradients of a call and of the definition in float64, both of what the functions are now."""
    q, k, v, g = torch.randn(4, BATCH, HEADS, N, 8)
    seen = None if mask is None else create_block_mask(mask, BATCH, HEADS, N, N, device="cpu")
    results: list[tuple[Tensor, ...]] = []
    for dtype in (torch.float64, torch.float32):
        x = [t.to(dtype).requires_grad_() for t in (q, k, v)]
        out = flex_attention(*x, score, seen) if dtype == torch.float32 else definition(*x, score, mask)
        results.append((out, *torch.autograd.grad(out, (*x, *learned), g.to(dtype))))
    for right, mine in zip(*results, strict=True):
        assert (mine - right).abs().max() <= 5e-5 * right.abs().max()
    with torch.no_grad():
        right = definition(q.double(), k.double(), v.double(), score, mask)
        assert (flex_attention(q, k, v, score, seen) - right).abs().max() <= 5e-5 * right.abs().max()


class Config:
    def __init__(self, rate: float) -> None:
        self.rate = rate


class Scores:
    """A method that reads numbers, tensors, another object, another method and what its class has."""

    power: ClassVar[float] = 0.25

    def __init__(self, rate: float = 1.0) -> None:
        self.table, self.config, self.steps = torch.linspace(-1, 1, HEADS), Config(rate), (1, 2)

    def gate(self, s: Tensor, h: Tensor) -> Tensor:
        return torch.tanh(s * self.table[h]) * self.power

    def mod(self, s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s + self.gate(s, h) * self.config.rate + RATE * self.steps[1]

    def __call__(self, s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.sin(s) * self.config.rate + self.table[h] * (i - j).abs() * 0.01

    def mask(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return ((i // 14 - j // 14).abs() <= self.steps[0]) & ((i % 14 - j % 14).abs() <= self.config.rate * 4)


def masked_by(x: Scores) -> Mod:
    """torch takes a function of four arguments for a mask_mod, which no method is."""
    return lambda b, h, i, j: x.mask(b, h, i, j)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.rand(HEADS) + 0.5), 1.0

    def forward(self, s: Tensor, h: Tensor) -> Tensor:
        return torch.tanh(s * self.weight[h]) * self.scale


class Learned(nn.Module):
    """A module with parameters, a buffer, a module of one's own and one of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.by_query, self.inner = nn.Parameter(torch.randn(HEADS, N)), Inner()
        self.distances = nn.Embedding(33, HEADS)
        self.register_buffer("shift", torch.linspace(0, 1, HEADS))
        self.rate = 0.5

    def forward(self, s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        near = self.distances((i - j).clamp(-16, 16) + 16)[h]
        return self.inner(s, h) + near * self.rate + self.shift[h] * s * torch.sigmoid(self.by_query[h, i])


def test_equal_objects_share_a_translation_and_a_plan() -> None:
    plans = 0
    with patch.object(translations, "_translated", side_effect=translations._translated) as made:
        for n in range(3):
            with torch.no_grad():
                q = torch.randn(BATCH, HEADS, N, 8)
                mask = create_block_mask(masked_by(Scores()), BATCH, HEADS, N, N, device="cpu")
                for score in (Scores().mod, Scores(), partial(Scores.mod, Scores()), Scores(2.0).mod):
                    flex_attention(q, q, q, score, mask)
            plans = plans or len(plan_cache.plans())
            assert n or plans
    assert len(plan_cache.plans()) == plans
    assert made.call_count == 4


def test_parameters_that_a_module_reads_are_traced_once() -> None:
    module = Learned()
    with patch.object(function_copies, "_new_template", side_effect=function_copies._new_template) as made:
        for _ in range(3):
            compare(module, None, tuple(module.parameters()))
            with torch.no_grad():
                for p in module.parameters():
                    p.mul_(0.9)
    assert made.call_count == 1


CHANGES: dict[str, Callable[[Scores], Any]] = {
    "nothing": lambda x: None,
    "a tensor in place": lambda x: x.table.add_(1),
    "its memory": lambda x: x.table.numpy().__setitem__(1, 3.5),
    "the tensor": lambda x: setattr(x, "table", torch.linspace(2, 0, HEADS)),
    "the dtype of the tensor": lambda x: setattr(x, "table", x.table.double()),
    "a number of another object": lambda x: setattr(x.config, "rate", 0.5),
    "the other object": lambda x: setattr(x, "config", Config(0.75)),
    "a tuple": lambda x: setattr(x, "steps", (2, 4)),
    "an attribute that hides the class's": lambda x: setattr(x, "power", 2.0),
    "its dictionary": lambda x: vars(x).update(power=0.5),
    "a method of its own": lambda x: setattr(x, "gate", lambda s, h: torch.cos(s)),
    "a bound method": lambda x: setattr(x, "gate", types.MethodType(lambda self, s, h: s * self.table[h], x)),
    "the first again": lambda x: vars(x).update(vars(Scores())),
}


@pytest.mark.parametrize("which", ["mod", "__call__", "mask"])
def test_each_change_of_an_object_is_seen(which: str) -> None:
    x = Scores()
    for change in CHANGES.values():
        change(x)
        given: Any = x if which == "__call__" else masked_by(x) if which == "mask" else x.mod
        compare(*((None, given) if which == "mask" else (given, None)))


def test_a_change_of_the_class_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    x = Scores()
    compare(x.mod)
    for power in (0.5, 0.25):
        monkeypatch.setattr(Scores, "power", power)
        compare(x.mod)
    monkeypatch.setattr(Scores, "gate", lambda self, s, h: torch.sin(s) * self.table[h])
    compare(x.mod)
    monkeypatch.setitem(globals(), "RATE", 3.0)
    compare(x.mod)
    monkeypatch.undo()
    compare(x.mod)


def test_each_change_of_a_module_is_seen() -> None:
    module = Learned()

    def hook(*args: Any) -> Tensor:
        return args[-1] * 2

    changes: list[Callable[[], Any]] = [
        lambda: None,
        lambda: module.shift.add_(1),
        lambda: setattr(module, "rate", 0.25),
        lambda: setattr(module.inner, "scale", 2.0),
        lambda: setattr(module.inner, "weight", nn.Parameter(torch.rand(HEADS))),
        lambda: setattr(module, "inner", Inner()),
        lambda: setattr(module, "distances", nn.Embedding(40, HEADS)),
        lambda: module.distances.weight.data.mul_(3),
        lambda: module.by_query.requires_grad_(False),
        lambda: module.by_query.data.mul_(-1),
        lambda: module.register_forward_hook(hook),
        lambda: module.inner.register_forward_hook(hook),
        lambda: setattr(module, "forward", lambda s, b, h, i, j: s + module.by_query[h, i] * s),
    ]
    for change in changes:
        change()
        used = [p for p in module.parameters() if p.requires_grad] if "forward" not in vars(module) else []
        compare(module, None, tuple(used))


def test_a_backward_reads_what_the_forward_read() -> None:
    """What an object holds may change between the two; a parameter's gradient is that of the forward's number."""
    q, g = torch.randn(2, BATCH, HEADS, N, 8)
    grads: list[Tensor] = []
    for changed in (False, True):
        x, own = q.clone().requires_grad_(), Scores()
        out = flex_attention(x, q, q, own.mod)
        if changed:
            own.config.rate, own.power = 5.0, 7.0
            own.table.mul_(3)
        grads += torch.autograd.grad(out, x, g)
    assert grads[0].equal(grads[1])


@dataclass
class Slotted:
    __slots__ = ("rate", "table")
    rate: float
    table: Tensor

    def __call__(self, s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.tanh(s * self.rate) + self.table[h] * s


def test_slots_closures_and_partial_functions() -> None:
    x, held = Slotted(0.5, torch.ones(HEADS)), Scores()

    def inside(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.tanh(s) * held.config.rate + held.table[h] * s

    def given(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, rate: float, table: Tensor) -> Tensor:
        return torch.tanh(s * rate) + table[h] * s

    bound = partial(given, rate=0.5, table=torch.ones(HEADS))
    for mod in (x, inside, bound):
        callable_key(mod, lambda t: id(t))
        for n in range(3):
            compare(mod)
            x.rate, held.config.rate, bound.keywords["rate"] = (0.5 + n,) * 3
            x.table.add_(1)
            held.table.add_(1)
            bound.keywords["table"].add_(1)


class Counted(Scores):
    """Everything that no key can hold: a method that writes, one that hands its object on, attributes that change."""

    calls = 0

    def writes(self, s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        self.calls += 1
        return torch.tanh(s) * s

    def hands_on(self, s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.tanh(s) * rate_of(self)

    def by_name(self, s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.tanh(s) * getattr(self, "config").rate  # noqa: B009

    def in_a_dictionary(self, s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.tanh(s) * self.__dict__["config"].rate

    def of_the_parent(self, s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return super().mod(s, b, h, i, j)

    def renamed(self, s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        x = self
        return torch.tanh(s) * x.config.rate

    @property
    def computed(self) -> float:
        return self.config.rate * 2

    def by_property(self, s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.tanh(s) * self.computed

    def in_a_list(self, s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.tanh(s) * self.listed[0]

    def __init__(self) -> None:
        super().__init__()
        self.listed = [1.0]


class Answering(Scores):
    def __getattr__(self, name: str) -> float:
        return RATE

    def mod(self, s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.tanh(s) * self.anything


def rate_of(x: Scores) -> float:
    return x.config.rate


NAMES = ("writes", "hands_on", "by_name", "in_a_dictionary", "of_the_parent", "renamed", "by_property", "in_a_list")


@pytest.mark.parametrize("name", NAMES)
def test_what_no_key_can_hold_is_called_each_time(name: str) -> None:
    x = Counted()
    with pytest.raises(Unknown):
        callable_key(getattr(x, name), lambda t: id(t))
    for rate in (1.0, 2.0, 1.0):
        x.config.rate, x.listed[0] = rate, rate
        compare(getattr(x, name))


def test_attributes_that_an_object_makes_up(monkeypatch: pytest.MonkeyPatch) -> None:
    x = Answering()
    for rate in (0.5, 2.0):
        monkeypatch.setitem(globals(), "RATE", rate)
        compare(x.mod)


def test_threads_with_objects_of_one_class() -> None:
    q = torch.randn(BATCH, HEADS, N, 8)
    right = [definition(q.double(), q.double(), q.double(), Scores(float(n)).mod, None) for n in range(3)]

    def one(n: int) -> float:
        with torch.no_grad():
            return float((flex_attention(q, q, q, Scores(float(n % 3)).mod) - right[n % 3]).abs().max())

    with ThreadPoolExecutor(4) as pool:
        assert max(pool.map(one, range(24))) < 1e-4


def test_attributes_that_somebody_set_on_a_tensor() -> None:
    q, k, v = (torch.randn(1, 2, 12, 8) for _ in range(3))
    t = torch.zeros(12)
    t.gain = 3.0  # pyright: ignore[reportAttributeAccessIssue]

    def gained(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s * t.gain + t[j]  # pyright: ignore[reportAttributeAccessIssue]

    for gain in (3.0, 5.0):
        t.gain = gain  # pyright: ignore[reportAttributeAccessIssue]
        expected = (q @ k.mT * gain * 8**-0.5).softmax(-1) @ v
        torch.testing.assert_close(flex_attention(q, k, v, score_mod=gained), expected)


def test_the_key_of_a_function_of_torch_keeps_the_function() -> None:
    """Its id alone could be that of another one later."""
    around: dict[str, Any] = {"__name__": "torch.made_here"}
    exec("def twice(x): return 2 * x", around)
    alive = weakref.ref(around["twice"])
    key = callable_key(around.pop("twice"), id)
    gc.collect()
    assert alive() is not None
    del key
    assert alive() is None
