"""The fuzz's surroundings find the errors that they are there for: each is planted here, and seen to be found.

The call runs on the reference, and the error is put around it, so that these tests say the same of every state of
regard's kernels.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import regard as rg
from fuzz import __main__ as command
from fuzz import check
from fuzz.__main__ import kept_as
from fuzz.call import Call, Part
from fuzz.draw import draw
from fuzz.subclasses import KINDS
from fuzz.surroundings import DTYPES, GRAD_MODES, Surroundings, draw_surroundings
from fuzz.tensors import Source
from fuzz.variations import with_fewer_tokens, with_other_numbers

CALL = Call(
    *(Source.of(n).normal(2, 3, 7, 5).float() for n in range(3)),
    score=(Part("scaled dot", numbers={"scale": None}), Part("bias", {"bias": Source.of(3).normal(7, 7).float()})),
    mask=Part("lengths", {"keys": torch.tensor([[7, 0], [3, 0]])[:, 0]}),
    needs=("q",),
    backend=("reference",),
)
RIGHT = rg.attention


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def findings(around: Surroundings, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the fuzz says of the attention of the call in surroundings."""
    call = replace(CALL, needs=()) if around.grad_mode else CALL
    monkeypatch.setattr(check, "draw_surroundings", lambda s, given: (around, given))
    monkeypatch.setattr(check, "WAYS", check.WAYS[:1])
    monkeypatch.setattr(check, "ADDED", ())
    return check.surrounded(call, Source.of(0)).findings


def by_default_dtype(*tensors: Tensor, **given: Any) -> Tensor:
    """Sums in whatever dtype torch.empty has."""
    return RIGHT(*tensors, **given).to(torch.empty(0).dtype).to(tensors[0].dtype)


class KeepsTheFirst:
    """A plan that keeps the mask of the first call of a shape."""

    def __init__(self) -> None:
        self.masks: dict[Any, rg.Mask] = {}

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
        given["mask"] = self.masks.setdefault(q.shape, given["mask"])
        return RIGHT(q, k, v, **given)


def dropped_without_memory(*tensors: Tensor, **given: Any) -> Tensor:
    """An address that is null, read as "no operand"."""
    bias = given["score"].stages[1].bias
    if "Wrapper" in type(bias).__name__:
        given["score"] = rg.ScaledDot()
    return RIGHT(*tensors, **given)


def on_the_default_device(*tensors: Tensor, **given: Any) -> Tensor:
    return RIGHT(*tensors, **given) + torch.zeros(1)


class NotAlone:
    """A buffer that all threads share."""

    def __init__(self) -> None:
        self.shared = 0

    def __call__(self, *tensors: Tensor, **given: Any) -> Tensor:
        self.shared += 1
        return RIGHT(*tensors, **given) * (1 + self.shared * 2**-20)


def only_contiguous(*tensors: Tensor, **given: Any) -> Tensor:
    """Reads lengths as if they had no gaps."""
    keys = given["mask"].keys
    wrong = torch.as_strided(keys, keys.shape, (1,))
    return RIGHT(*tensors, **{**given, "mask": rg.Lengths(keys=wrong)})


WRAPPER = next(kind for kind in KINDS if kind.name == "wrapper without memory")
PLANTED: dict[str, tuple[Callable[[], Any], Surroundings]] = {
    "default dtype": (lambda: by_default_dtype, Surroundings(default_dtype=torch.bfloat16)),
    "earlier calls": (KeepsTheFirst, Surroundings(earlier=1)),
    "inference mode": (KeepsTheFirst, Surroundings(earlier=1, grad_mode="inference_mode")),
    "no memory": (lambda: dropped_without_memory, Surroundings(earlier=1, kind=WRAPPER, dressed=("bias 1 bias",))),
    "device": (lambda: on_the_default_device, Surroundings(device="meta")),
    "threads": (NotAlone, Surroundings(threads=3, earlier=1)),
    "strides": (lambda: only_contiguous, Surroundings()),
}


@pytest.mark.full
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_error_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong, around = PLANTED[name]
    assert not findings(around, monkeypatch)
    monkeypatch.setattr(rg, "attention", wrong())
    assert findings(around, monkeypatch)


def test_a_result_without_numbers_is_not_compared() -> None:
    """Nor are gradients, which may be plain zeros beside it: of no query, say."""
    fake = next(kind for kind in KINDS if kind.name == "FakeTensor")
    results = {"weights": fake.of(torch.zeros(2, 0)), "gradient of k": torch.zeros(2, 3)}
    assert Surroundings(kind=fake, dressed=("q",)).ask(CALL, lambda *_: results) == {}


@pytest.mark.full
def test_every_surrounding_is_drawn() -> None:
    drawn = [draw_surroundings(Source.of(seed + 4), draw(seed))[0] for seed in range(400)]
    assert {around.default_dtype for around in drawn} == {None, *DTYPES}
    assert {around.grad_mode for around in drawn} == {None, *GRAD_MODES}
    assert {around.device for around in drawn} == {None, "cpu", "meta"}
    assert {around.kind for around in drawn} == {None, *KINDS}
    assert {around.threads for around in drawn} == {1, 2, 3, 4}
    assert {around.earlier for around in drawn} == {0, 1, 2, 3}
    assert {around.outside for around in drawn} == {True, False}


def test_every_position_and_mask_of_a_decoding_caller_is_drawn() -> None:
    calls = [draw_surroundings(Source.of(seed + 4), draw(seed))[1] for seed in range(400)]
    assert {"head", "tail", "given"} == {call.placed for call in calls} and any(call.by_length for call in calls)
    masks = [part for call in calls for part in call.mask.every()]
    assert {"lengths", "causal", "window", "documents"} <= {part.kind for part in masks}
    lengths = [part for part in masks if part.kind == "lengths"]
    assert any(part.numbers for part in lengths)
    assert any(not t.is_contiguous() for part in lengths for t in part.tensors.values())


def test_other_numbers_are_of_the_same_structure() -> None:
    """Each tensor has the dtype, shape and strides that it had, and most hold something else."""
    same = different = 0
    for seed in range(100):
        call = draw_surroundings(Source.of(seed + 4), draw(seed))[1]
        other = with_other_numbers(call, Source.of(seed))
        for name, t in call.tensors().items():
            got = other.tensors()[name]
            assert (got.dtype, got.shape, got.stride()) == (t.dtype, t.shape, t.stride()), name
            same += torch.equal(t.nan_to_num(), got.nan_to_num())
            different += not torch.equal(t.nan_to_num(), got.nan_to_num())
    assert different > 4 * same


def test_fewer_tokens_are_taken_of_some_calls() -> None:
    calls = [draw_surroundings(Source.of(seed + 4), draw(seed))[1] for seed in range(200)]
    fewer = [with_fewer_tokens(with_other_numbers(call, Source.of(0)), Source.of(1)) for call in calls]
    sizes = [((a.nq, a.nk), (b.nq, b.nk)) for a, b in zip(fewer, calls, strict=True)]
    assert all(a <= b for few, all_ in sizes for a, b in zip(few, all_, strict=True))
    assert sum(few < all_ for few, all_ in sizes) > 20


def test_the_state_of_torch_comes_back_when_a_call_raises() -> None:
    before = torch.get_default_dtype(), torch.get_default_device(), torch.is_inference_mode_enabled()

    def raises(*_: object) -> dict[str, Tensor]:
        assert torch.get_default_dtype() == torch.float16 and torch.is_inference_mode_enabled()
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        Surroundings(default_dtype=torch.float16, device="meta", grad_mode="inference_mode").ask(CALL, raises)
    assert before == (torch.get_default_dtype(), torch.get_default_device(), torch.is_inference_mode_enabled())


def test_it_says_how_keys_are_kept() -> None:
    """What `python -m tests.fuzz` counts."""
    assert {kept_as(seed) for seed in range(60)} == {"", "int8", "pages", "int8 in pages"}


class Here:
    """In the place of the process that makes the calls."""

    def submit(self, run: Callable[..., check.Outcome], seed: int, **how: bool) -> Here:
        self.outcome = run(seed, **how)
        return self

    def result(self) -> check.Outcome:
        return self.outcome


@pytest.mark.parametrize("kinds", [["int8"], ["int8", "int8 in pages"], ["pages"]])
def test_only_calls_that_are_kept_so(
    kinds: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--kept`: so many of them, each in its surroundings alone; what is refused or wrong there is counted."""
    asked: list[int] = []

    def surrounded(call: Call, s: Source) -> check.Outcome:
        asked.append(len(asked))
        return check.Outcome("it is refused" if len(asked) == 2 else None, ["it is wrong"] if len(asked) == 3 else [])

    monkeypatch.setattr(check, "surrounded", surrounded)
    monkeypatch.setattr(check, "ways_of", lambda s, call: pytest.fail("the call is asked about without them"))
    monkeypatch.setattr(command, "new_process", lambda threads: Here())
    monkeypatch.setattr("sys.argv", ["fuzz", "--calls", "6", "--first", "10", "--kept", *kinds])
    assert command.main() == 1
    told = capsys.readouterr().out
    counts = ast.literal_eval(told[told.rindex("{") :])
    assert counts.pop("calls") == len(asked) == 6 and counts.pop("refused") == counts.pop("findings") == 1
    assert counts.keys() <= set(kinds) and sum(counts.values()) == 5
    assert kept_as(int(told.split()[1])) in kinds and "it is wrong" in told
