"""record, where nothing can be seen: an error that says why, and everything as it was afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard as rg
from recorded_models import FACTS, Plain, measure, model, world, x


class SelfAttention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x @ x.mT, -1) @ x


def on_another_thread(made: nn.Module) -> None:
    thread = threading.Thread(target=made, args=(x(),))
    thread.start()
    thread.join()


@pytest.mark.parametrize(
    ("made", "run", "said"),
    [
        (
            SelfAttention(),
            lambda made: made(x()),
            r"SelfAttention ran, but made no .* Its SelfAttention most likely",
        ),
        (nn.Linear(12, 12), lambda made: made(x()), r"Linear ran, but made no .* If it has attention at all"),
        (Plain(), lambda made: None, r"no module of Plain ran in the block, on the thread that opened it\. Call the"),
        (Plain(), on_another_thread, r"no module of Plain ran in the block, on the thread that opened it"),
        (Plain(), lambda made: Plain()(x()), r"no module of Plain ran .*; 1 attention call was made by others"),
    ],
)
def test_nothing_recorded_is_an_error_that_says_why(made: nn.Module, run: Callable[[Any], Any], said: str) -> None:
    before = world()[:-1]
    with pytest.raises(LookupError, match="nothing was recorded: " + said), rg.record(made):
        run(made)
    assert world()[:-1] == before


def test_no_layer_of_those_asked_for_is_an_error() -> None:
    made = model()
    said = "nothing was recorded: `layers` names none of the layers that were called; they are 0.attention, 1.attention"
    with pytest.raises(LookupError, match=said), rg.record(made, layers="*.norm"):
        made(x())


def test_an_error_of_the_block_is_not_hidden_by_that_of_nothing_recorded() -> None:
    with pytest.raises(ZeroDivisionError), rg.record(Plain()):
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (lambda made: torch.func.vmap(made)(x()[:, None]), "a torch.func transform .* is under way"),
        (lambda made: torch.func.grad(lambda t: made(t).sum())(x()), "a torch.func transform .* is under way"),
        (lambda made: made.to("meta")(x().to("meta")), "have no values of their own"),
        (lambda made: torch.jit.trace(made, (x(),)), "have no values of their own"),
    ],
    ids=["vmap", "grad", "meta", "trace"],
)
@pytest.mark.filterwarnings(
    "ignore:.*torch.jit.* is deprecated", "ignore::torch.jit.TracerWarning", "ignore:There is a perf:UserWarning"
)
def test_what_has_no_values_is_refused_with_a_sentence(run: Callable[[nn.Module], Any], said: str) -> None:
    torch.compiler.reset()
    before = world()[:-1]
    made = Plain()
    with pytest.raises(rg.Unsupported, match=rf"record cannot look at \w+: .*{said}"), rg.record(made):
        run(made)
    assert world()[:-1] == before


@pytest.mark.parametrize("compile", [torch.compile, lambda made, backend: (made.compile(backend=backend), made)[1]])
def test_a_compiled_model_is_recorded_where_it_runs_eagerly(compile: Callable[..., nn.Module]) -> None:
    made = Plain()
    compiled = compile(made, backend="eager")
    before = world()
    said = r"record cannot look at \w+: record a compiled model under torch.compiler.set_stance"
    with pytest.raises(rg.Unsupported, match=said), rg.record(compiled):
        raise AssertionError("the block must not run")
    assert world() == before
    with torch.compiler.set_stance("force_eager"), rg.record(made, FACTS) as tape:
        made(given := x())
    q, k, _ = made.project(given)
    measure(tape.calls[0], rg.attention_weights(q, k).detach())
