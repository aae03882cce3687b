"""torch's samples of its attention under regard.patch, checked as torch's own suite does: in a process of its own.

    python torch_patched.py operators|modules

Prints a line for each check that was made, "ok" or what was wrong; the last says how many calls ran on regard. Samples
of float64 are torch's alone: patch leaves them to torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import CrossRefFakeMode
from torch._subclasses.schema_check_mode import SchemaCheckMode
from torch.testing._internal import composite_compliance, optests
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.utils._pytree import tree_leaves

import regard as rg

# relative to the largest number: what torch's own tests of these allow; some roundings of a bfloat16 output
TOLERANCE = {torch.float32: 5e-5, torch.bfloat16: 2e-2}
# of torch's samples, every so manieth: there are hundreds, which differ in one size
OPERATORS = {"nn.functional.scaled_dot_product_attention": 2, "nn.functional.multi_head_attention_forward": 9}
MODULES = {
    nn.MultiheadAttention: 9,
    nn.TransformerEncoderLayer: 9,
    nn.TransformerEncoder: 13,
    nn.TransformerDecoderLayer: 3,
    nn.Transformer: 5,
}
Call = Callable[[], Any]


def main(which: str) -> None:
    on_regard = 0
    for name, check in {"operators": operator_checks, "modules": module_checks}[which]():
        torch.manual_seed(0)
        try:
            on_regard += check()
            print(f"ok {name}")
        except Exception as error:
            print(f"failed {name}: {type(error).__name__} {str(error)!r}")
    print(f"{on_regard} calls ran on regard")


def patched(call: Call, mode: Callable[[], Any] = nullcontext) -> tuple[Any, int]:
    """What a call returns under the patch, and how many calls of attention ran on regard."""
    with rg.patch(report=None) as patch, mode():
        found = call()
    return found, sum(count for (_, left), count in (patch.calls + patch.traced).items() if left is None)


def close(ours: Tensor, torchs: Tensor, tolerance: float = TOLERANCE[torch.float32], msg: str | None = None) -> None:
    scale = max(1.0, float(torchs.detach().abs().max())) if torchs.numel() else 1.0
    torch.testing.assert_close(ours, torchs, rtol=0, atol=tolerance * scale, msg=msg)


def operator_checks() -> Iterator[tuple[str, Callable[[], int]]]:
    for op in (op for op in op_db if op.name in OPERATORS):
        assert op.error_inputs_func is None, "torch has errors of this operator to check"
        for dtype in TOLERANCE:
            samples = islice(op.sample_inputs("cpu", dtype, requires_grad=False), 0, None, OPERATORS[op.name])
            for n, sample in enumerate(samples):
                title = f"{op.name} {dtype} {n}"
                yield f"{title} meta", partial(alike, call_of(op, transformed(sample, lambda t: t.to("meta"))), dtype)
                yield f"{title} fake", partial(runs, call_of(op, sample), CrossRefFakeMode)
                if dropout_of(op, sample):
                    continue
                negative = transformed(sample, lambda t: torch._neg_view(t.neg()) if t.is_floating_point() else t)
                yield f"{title} values", partial(alike, call_of(op, sample), dtype)
                yield f"{title} strided", partial(alike, call_of(op, sample.noncontiguous()), dtype)
                yield f"{title} negative views", partial(alike, call_of(op, negative), dtype)
                yield f"{title} schemas", partial(runs, call_of(op, sample), SchemaCheckMode)
                if dtype == torch.float32:
                    yield f"{title} autocast", partial(alike, call_of(op, sample), torch.bfloat16, autocast)
        for n, sample in enumerate(op.sample_inputs("cpu", torch.float32, requires_grad=True)):
            if not dropout_of(op, sample):
                yield f"{op.name} {n} composite", partial(composite, op, sample)
                if n % 8 == 0:
                    yield f"{op.name} {n} ahead of time", partial(ahead_of_time, op, sample)


def autocast() -> Any:
    return torch.autocast("cpu", torch.bfloat16)


def dropout_of(op: Any, sample: Any) -> float:
    return sample.kwargs["dropout_p"] if "dropout_p" in sample.kwargs else sample.args[9]


def transformed(sample: Any, change: Callable[[Tensor], Tensor]) -> Any:
    return sample.transform(lambda t: change(t) if isinstance(t, Tensor) else t)


def call_of(op: Any, sample: Any) -> Call:
    return partial(op.op, sample.input, *sample.args, **sample.kwargs)


def alike(call: Call, dtype: torch.dtype, mode: Callable[[], Any] = nullcontext) -> int:
    """What torch returns without the patch; on meta, in shape and dtype."""
    with mode():
        expected = call()
    found, count = patched(call, mode)
    for ours, torchs in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        if torchs is None or torchs.is_meta:
            assert ours is torchs is None or (ours.shape, ours.dtype) == (torchs.shape, torchs.dtype)
        else:
            close(ours, torchs, TOLERANCE[dtype])
    return count


def runs(call: Call, mode: Callable[[], Any]) -> int:
    """A mode of torch's that compares each operation with what is declared of it finds nothing."""
    return patched(call, mode)[1]


def composite(op: Any, sample: Any) -> int:
    """With every choice of tensors replaced by subclasses that see each operation."""

    def check() -> None:
        given = (sample.input, *sample.args), sample.kwargs
        composite_compliance.check_with_mode(op.op, *given, close)
        composite_compliance.check_all_permutations(op.op, *given, close)

    return patched(check)[1]


def ahead_of_time(op: Any, sample: Any) -> int:
    """As a graph of forward and backward that is made without running it."""
    given = (sample.input, *sample.args), sample.kwargs

    def same(ours: Any, torchs: Any, msg: str | None = None) -> None:
        for a, b in zip(tree_leaves(ours), tree_leaves(torchs), strict=True):
            if a is not b:
                close(a, b, msg=msg)

    return patched(partial(optests.aot_autograd_check, op.op, *given, dynamic=False, assert_equals_fn=same))[1]


def module_checks() -> Iterator[tuple[str, Callable[[], int]]]:
    for info in (info for info in module_db if info.module_cls in MODULES):
        assert info.module_error_inputs_func is None, "torch has errors of this module to check"
        for training in (True, False):
            every = info.module_inputs_func(info, "cpu", torch.float32, requires_grad=True, training=training)
            for n, sample in enumerate(islice(every, 0, None, MODULES[info.module_cls])):
                yield f"{info.module_cls.__name__} {training=} {n}", partial(module_alike, info, sample, training)


def module_alike(info: Any, sample: Any, training: bool) -> int:
    """Outputs with and without gradients, and the gradients of inputs and parameters, without dropout.

    Of torch's outputs those with gradients count for both: where there are none, its fast path puts zeros in the place
    of padding, which a decoder without a mask of its own then reads.
    """
    layer, given = layer_of(info, sample, training), sample.forward_input
    tensors = [t for t in tree_leaves((given.args, given.kwargs)) if isinstance(t, Tensor) and t.requires_grad]

    def outputs() -> list[Tensor]:
        return [t for t in tree_leaves(layer(*given.args, **given.kwargs)) if t is not None]

    def with_gradients() -> list[Tensor]:
        found, wanted = outputs(), [*tensors, *layer.parameters()]
        seeds = [torch.linspace(-1, 1, t.numel(), dtype=t.dtype).view_as(t) for t in found]
        return [*found, *torch.autograd.grad(found, wanted, seeds, materialize_grads=True)]

    expected = with_gradients()
    found, count = patched(with_gradients)
    with torch.no_grad():
        silent, silent_count = patched(outputs)
    for ours, torchs in zip((*found, *silent), (*expected, *expected[: len(silent)]), strict=True):
        close(ours, torchs)
    return count + silent_count


def layer_of(info: Any, sample: Any, training: bool) -> nn.Module:
    how = sample.constructor_input
    torch.manual_seed(1)
    layer = info.module_cls(*how.args, **how.kwargs).train(training)
    for part in layer.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        if isinstance(part, nn.MultiheadAttention):
            part.dropout = 0.0
    for parameter in layer.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, 0.5, std=0.3)  # biases too, which torch starts at 0
    return layer


if __name__ == "__main__":
    main(sys.argv[1])
