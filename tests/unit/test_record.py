"""record: names, choices, other threads and modes, and everything as it was afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import regard as rg
from recorded_models import FACTS, NAMES, Block, Plain, measure, model, weights, world, x
from regard.call.hooks import AttentionCall


def test_names_are_module_paths_in_the_order_of_calls() -> None:
    made = model()
    with rg.record(made) as tape:
        made(x())
    assert tape.names == NAMES
    assert [call.layer for call in tape] == ["Plain", "MultiheadAttention", "MultiHeadAttention"]
    assert len(tape) == 3 and tape["0.attention"] == (tape.calls[0],)
    assert all(set(call.seen.facts) == set(tape.facts) for call in tape)
    with pytest.raises(KeyError, match=r"'attention' is no layer that was called; these were: 0.attention, 1\."):
        tape["attention"]


def test_shared_layers_and_several_runs_are_counted() -> None:
    layer = Plain()
    made = nn.Sequential(Block(layer), Block(layer))
    with rg.record(made) as tape:
        made(x())
        made(x())
    assert [(call.name, call.number) for call in tape] == [("0.attention", n) for n in range(4)]


@pytest.mark.parametrize(
    ("layers", "found"),
    [
        ("*", NAMES),
        ("*.attention", ("0.attention", "2.attention")),
        ("2.*", NAMES[2:]),
        (("0.*", "1.*"), NAMES[:2]),
        (lambda name: name.endswith("layer"), NAMES[1:2]),
    ],
)
def test_layers_are_chosen_by_pattern_or_function(layers: Any, found: tuple[str, ...]) -> None:
    made = model()
    with rg.record(made, layers=layers) as tape:
        made(x())
    assert tape.names == found


def test_a_choice_of_no_module_is_an_error_at_once() -> None:
    with (
        pytest.raises(ValueError, match=r"layers='\*.attn' fits no module of this model; it has Sequential, 0, 0.norm"),
        rg.record(model(), layers="*.attn"),
    ):
        raise AssertionError("the block must not run")


def test_facts_are_checked_at_once() -> None:
    with pytest.raises(TypeError, match="the class Entropy, not one"), rg.record(model(), (rg.facts.Entropy,)):
        raise AssertionError("the block must not run")


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_outputs_keep_their_bits(context: Callable[[], Any]) -> None:
    padding = torch.tensor([[False] * 7, [False] * 4 + [True] * 3])
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 2, 16, batch_first=True), 2).eval()
    made, given = model().eval(), x()
    with context():
        plain = made(given), encoder(given), encoder(given, src_key_padding_mask=padding)
        with rg.record(nn.ModuleList([made, encoder])):
            seen = made(given), encoder(given), encoder(given, src_key_padding_mask=padding)
    assert all(torch.equal(one, other) for one, other in zip(plain, seen, strict=True))


def test_training_keeps_its_gradients_and_random_numbers() -> None:
    made, given = model(), x()
    made.append(Block(Plain(dropout_p=0.5)))
    gradients = list[list[Tensor]]()
    for watched in (False, True):
        torch.manual_seed(7)
        if watched:
            with rg.record(made) as tape:
                loss = made(given).square().sum()
        else:
            loss = made(given).square().sum()
        gradients.append([*torch.autograd.grad(loss, [*made.parameters()]), torch.rand(3)])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
    assert not any(call[rg.facts.Entropy()].requires_grad for call in tape)


def test_everything_is_restored() -> None:
    made, given = model().eval(), x()
    before = world()
    with rg.record(made):
        during = world()
        made(given)
    assert world() == before
    assert [a == b for a, b in zip(before, during, strict=True)] == [False] * 6 + [True] * 3


def test_everything_is_restored_after_an_error_in_the_model() -> None:
    class Broken(nn.Module):
        def forward(self, _: Tensor) -> Tensor:
            raise ZeroDivisionError

    made = nn.Sequential(Block(Plain()), Broken())
    before = world()
    with pytest.raises(ZeroDivisionError), rg.record(made) as tape:
        made(torch.zeros(1, 3, 12))
    assert world() == before and len(tape) == 1


def test_a_name_is_right_after_an_error_that_the_model_catches() -> None:
    class Careful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.broken = nn.Bilinear(1, 1, 1)

        def forward(self, x: Tensor) -> Tensor:
            with pytest.raises(TypeError):
                self.broken(x)
            return scaled_dot_product_attention(x, x, x)

    made = Careful()
    with rg.record(made) as tape:
        made(x())
    assert tape.names == ("Careful",)


def test_two_recordings_see_the_same() -> None:
    made, given = model(), x()
    with rg.record(made, FACTS) as outer:
        with rg.record(made[0], FACTS) as inner:
            made(given)
        made(given)
    assert [call.name for call in inner] == ["attention"]
    assert [(call.name, call.number) for call in outer] == [(name, n) for n in (0, 1) for name in NAMES]
    measure(outer.calls[0], weights(inner.calls[0]))


def test_threads_record_their_own_calls_and_the_last_restores() -> None:
    before, started, done = world(), threading.Barrier(2), list[int]()

    def run(times: int) -> None:
        made = model()
        with rg.record(made) as tape:
            started.wait()
            for _ in range(times):
                made(x())
            started.wait()
        done.append(len(tape))

    threads = [threading.Thread(target=run, args=(n,)) for n in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(done) == [3, 6]
    assert world()[:-1] == before[:-1]


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("backward", [Tensor.backward, torch.autograd.backward])
def test_what_a_checkpoint_computes_again_is_not_counted(reentrant: bool, backward: Callable[[Tensor], None]) -> None:
    class Saving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = model()

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return x

    made = Saving()
    with rg.record(made) as tape:
        backward(made(x().requires_grad_()).sum())
    assert [(call.name, call.number) for call in tape] == [(f"blocks.{name}", 0) for name in NAMES]


def test_a_recording_begins_anew_in_each_block() -> None:
    made = Plain()
    recording = rg.record(made, FACTS)
    with recording as first:
        made(x())
    with recording as second, recording as third:
        made(x())
    assert first is not second and len(first) == len(second) == len(third) == 1
    with pytest.raises(AttributeError, match="has no 'calls' before it is run"):
        recording.calls  # noqa: B018 (it is the attribute that is asked for)


def test_heads_of_a_call_of_torch_without_a_batch() -> None:
    class Grouped(nn.Module):
        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            return torch.nn.functional.scaled_dot_product_attention(q, k, k, enable_gqa=True)

    q, k, made = torch.randn(8, 5, 16), torch.randn(2, 5, 16), Grouped()
    with rg.record(made, FACTS) as tape:
        made(q, k)
    entropy = rg.look(q[None], k[None], facts=(rg.facts.Entropy(),))[rg.facts.Entropy()]
    assert tape.calls[0].q_shape == (1, 8, 5, 16) and torch.equal(tape.calls[0][rg.facts.Entropy()], entropy)


def test_inputs_hold_no_mask_that_the_call_did_not_take() -> None:
    call = AttentionCall(None, *torch.randn(2, 1, 2, 5, 8), mask_if_cross=rg.Dense(torch.ones(5, 5).bool()))
    assert rg.facts.Inputs().of_call(call, "", 0).mask_if_cross is None


def test_autocast_is_that_of_the_model() -> None:
    made, given = Plain(), x()
    with torch.autocast("cpu", torch.bfloat16), rg.record(made, FACTS) as tape:
        made(given)
        q, k, _ = made.project(given)
    told = tape.calls[0][rg.facts.Inputs()]
    assert told.q.dtype == torch.bfloat16 and torch.equal(told.q, q) and torch.equal(told.k, k)
    assert tape.calls[0][rg.facts.Entropy()].dtype == torch.float32


def test_facts_of_inference_mode_are_plain_tensors() -> None:
    made = Plain()
    with torch.inference_mode(), rg.record(made) as tape:
        made(x())
    entropy = tape.calls[0][rg.facts.Entropy()]
    assert not entropy.is_inference()
    entropy += 1


def test_masks_are_kept_once_and_as_they_were() -> None:
    mask = torch.ones(7, 7, dtype=torch.bool).tril()
    made = nn.Sequential(Plain(attn_mask=mask), Plain(attn_mask=mask))
    with rg.record(made) as tape:
        made(x())
    mask.fill_(False)
    first, second = (call.view.mask.tensors()[0] for call in tape)
    assert first is second
    assert torch.equal(first[0, 0], torch.ones(7, 7, dtype=torch.bool).tril())


def test_inputs_are_copies() -> None:
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("k", torch.ones(1, 1, 4, 8))

        def forward(self, q: Tensor) -> Tensor:
            out = scaled_dot_product_attention(q, self.k, self.k)
            self.k.zero_()
            return out

    made = Cached()
    with rg.record(made, FACTS) as tape:
        made(torch.ones(1, 1, 2, 8))
    call = tape.calls[0]
    assert call[rg.facts.Inputs()].k.min() == 1
    assert call.view.frame.positions == rg.tail(2, 4)
    with pytest.raises(TypeError, match=r"Inputs\(\) is for record"):
        rg.look(torch.ones(2, 8), torch.ones(2, 8), facts=(rg.facts.Inputs(),))


def test_positions_are_copies() -> None:
    """A static cache often moves one tensor in place from step to step."""
    layer, at = rg.nn.MultiHeadAttention(8, heads=2), torch.tensor([3])
    with rg.record(layer, (*FACTS, rg.facts.Inputs())) as tape, torch.no_grad():
        for _ in range(3):
            layer(
                torch.ones(1, 1, 8), torch.ones(1, 9, 8), mask=rg.Causal(), positions=rg.Positions(at, torch.arange(9))
            )
            at += 1
    assert [call.view.frame.positions.q.tolist() for call in tape] == [[3], [4], [5]]
    assert [call[rg.facts.Inputs()].positions.q.tolist() for call in tape] == [[3], [4], [5]]
    assert [call.view.counts().unique().tolist() for call in tape] == [[4], [5], [6]]


class ByItself(nn.Module):
    """Attention that multiplies and normalises by itself."""

    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.mT).softmax(-1) @ x


class HandMadeAttention(ByItself):
    pass


class HandMadeAttentionBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = HandMadeAttention()

    def forward(self, x: Tensor) -> Tensor:
        return self.attn(x)


def test_modules_that_were_not_seen_are_counted_and_named() -> None:
    seen = rg.nn.MultiHeadAttention(8, heads=2)
    parts = seen, HandMadeAttentionBlock(), HandMadeAttention(), ByItself(), rg.nn.MultiHeadAttention(8, heads=2)
    parts[3].never_called = HandMadeAttention()
    model, x = nn.Sequential(*parts), torch.randn(1, 5, 8)
    said = r"of 2 modules, but not of 2 others .*HandMadeAttention\): 1\.attn, 2\."
    with pytest.warns(UserWarning, match=said), rg.record(model, (rg.facts.Entropy(),), layers="0") as tape:
        model(x)
    assert tape.unseen == ("1.attn", "2") and tape.names == ("0",)
    with rg.record(nn.Sequential(seen, ByItself()), (rg.facts.Entropy(),)) as tape:
        model[0](x)
    assert tape.unseen == ()
