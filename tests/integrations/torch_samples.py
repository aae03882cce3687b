"""torch's own samples of its attention, given to regard's: run in a process of its own, for they set global flags.

    python torch_samples.py function|module

Prints a line for each check that was made, "ok" or what was wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

from regard.compat.torch import MultiheadAttention, scaled_dot_product_attention

# what torch's own tests of this function allow; half precision is held to twice the error that torch has there
TOLERANCE = {torch.float64: {}, torch.float32: {"atol": 5e-5, "rtol": 5e-6}}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def main(which: str) -> None:
    checks = {"function": function_checks, "module": module_checks}[which]
    for name, check in checks():
        torch.manual_seed(0)
        try:
            check()
            print(f"ok {name}")
        except Exception as error:
            print(f"failed {name}: {type(error).__name__} {str(error)!r}")


def function_checks() -> Iterator[tuple[str, Callable[[], None]]]:
    from torch.testing._internal.common_methods_invocations import op_db

    (op,) = (op for op in op_db if op.name == "nn.functional.scaled_dot_product_attention")
    for dtype in DTYPES:
        for n, sample in enumerate(op.sample_inputs("cpu", dtype, requires_grad=True)):
            name = f"{dtype} {n}"
            if sample.kwargs["dropout_p"]:
                yield f"{name} dropout", partial(dropped, sample)
            else:
                yield f"{name} values", partial(alike, sample, dtype)
                yield f"{name} strided", partial(alike, sample.noncontiguous(), dtype)
            if dtype == torch.float64:
                yield f"{name} gradients", partial(differentiated, sample)


def alike(sample: Any, dtype: torch.dtype) -> None:
    """Values and gradients are those of torch's function."""
    run = partial(differentiable_results, sample)
    theirs = run(torch.nn.functional.scaled_dot_product_attention, dtype)
    exact = run(torch.nn.functional.scaled_dot_product_attention, torch.float64)
    for ours, torchs, true in zip(run(scaled_dot_product_attention, dtype), theirs, exact, strict=True):
        if dtype in TOLERANCE:
            torch.testing.assert_close(ours, torchs, **TOLERANCE[dtype])
            continue
        assert (ours.dtype, ours.shape) == (torchs.dtype, torchs.shape)
        error, allowed = ((t - true).abs().max() for t in (ours, torchs))
        assert error <= 2 * allowed + torch.finfo(dtype).eps * true.abs().max(), (error, allowed)


def differentiable_results(sample: Any, function: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The output, and the gradients of all tensors of a sample."""
    own = sample.transform(lambda t: t.detach().to(dtype).requires_grad_() if isinstance(t, Tensor) else t)
    out = function(own.input, *own.args, **own.kwargs)
    tensors = [t for t in (own.input, *own.args, *own.kwargs.values()) if isinstance(t, Tensor)]
    return [out, *torch.autograd.grad(out, tensors, torch.linspace(-1, 1, out.numel(), dtype=dtype).view_as(out))]


def dropped(sample: Any) -> None:
    """Each weight of torch's is 0 or twice as large: with the identity for values, the output is the weights."""
    query, key = sample.input, sample.args[0]
    eye = torch.eye(key.shape[-2], dtype=query.dtype).expand(*key.shape[:-2], -1, -1)
    weights = scaled_dot_product_attention(query, key, eye, **sample.kwargs)
    whole = torch.nn.functional.scaled_dot_product_attention(
        query, key, eye, is_causal=sample.kwargs["is_causal"], dropout_p=0.0
    )
    kept = weights != 0
    assert 0.2 < kept[whole != 0].double().mean() < 0.8
    torch.testing.assert_close(weights, torch.where(kept, 2 * whole, 0))


def differentiated(sample: Any) -> None:
    """First and second derivatives are those of finite differences."""
    mask = sample.kwargs.get("attn_mask")
    options = {name: given for name, given in sample.kwargs.items() if name != "attn_mask"}

    def seeded(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        torch.manual_seed(5)
        return scaled_dot_product_attention(query, key, value, attn_mask, **options)

    tensors = (sample.input, *sample.args, *(() if mask is None else (mask,)))
    drawn = bool(options.get("dropout_p"))  # within vmap torch draws nothing
    forward = {"check_forward_ad": True, "check_batched_forward_grad": not drawn}
    assert gradcheck(seeded, tensors, fast_mode=True, check_batched_grad=True, **forward)
    assert gradgradcheck(seeded, tensors, fast_mode=True, check_batched_grad=True, check_fwd_over_rev=True)


def module_checks() -> Iterator[tuple[str, Callable[[], None]]]:
    from torch.testing._internal.common_modules import module_db

    (info,) = (info for info in module_db if info.module_cls is nn.MultiheadAttention)
    for dtype in (torch.float64, torch.float32):
        for training in (True, False):
            samples = info.module_inputs_func(info, "cpu", dtype, requires_grad=True, training=training)
            for n, sample in enumerate(samples):
                layers = layers_of(sample, dtype, training)
                yield f"{dtype} {training=} {n} alike", partial(modules_alike, *layers, sample)
                yield f"{dtype} {training=} {n} reference", partial(as_the_reference, layers[0], sample)
                if training and dtype == torch.float64 and n % 3 == 0:  # they take long; without dropout eval is alike
                    yield f"{dtype} {training=} {n} gradients", partial(module_differentiated, layers[0], sample)


def layers_of(sample: Any, dtype: torch.dtype, training: bool) -> tuple[nn.Module, nn.Module]:
    """regard's layer and torch's, with the same parameters."""
    how = sample.constructor_input
    torch.manual_seed(1)
    theirs, ours = (kind(*how.args, **how.kwargs, dtype=dtype) for kind in (nn.MultiheadAttention, MultiheadAttention))
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.3)  # biases too, which torch starts at 0
    ours.load_state_dict(theirs.state_dict())
    return ours.train(training), theirs.train(training)


def modules_alike(ours: nn.Module, theirs: nn.Module, sample: Any) -> None:
    """The same output, weights, and gradients of inputs and parameters, also where the inputs have other strides."""
    given = sample.forward_input
    for inputs in (given.args, [t.detach().T.contiguous().T.requires_grad_() for t in given.args]):
        both = []
        for layer in (ours, theirs):
            out, weights = layer(*inputs, **given.kwargs)
            seeds = [torch.linspace(-1, 1, t.numel(), dtype=t.dtype).view_as(t) for t in (out, weights)]
            both.append((out, weights, *torch.autograd.grad((out, weights), (*inputs, *layer.parameters()), seeds)))
        torch.testing.assert_close(*both, **TOLERANCE[out.dtype])


def as_the_reference(layer: nn.Module, sample: Any) -> None:
    """Without a batch as with a batch of one, by torch's reference of the sample."""
    given = sample.forward_input
    reference = sample.reference_fn(layer, *given.args, **given.kwargs)
    torch.testing.assert_close(layer(*given.args, **given.kwargs), reference, **TOLERANCE[reference[0].dtype])


def module_differentiated(layer: nn.Module, sample: Any) -> None:
    """First and second derivatives with respect to inputs and parameters are those of finite differences."""
    given, names = sample.forward_input, [name for name, _ in layer.named_parameters()]

    def function(*tensors: Tensor) -> tuple[Tensor, ...]:
        inputs, parameters = tensors[: len(given.args)], tensors[len(given.args) :]
        named = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(layer, named, inputs, given.kwargs)

    tensors = (*given.args, *layer.parameters())
    assert gradcheck(function, tensors, fast_mode=True, check_batched_grad=True)
    assert gradgradcheck(function, tensors, fast_mode=True, check_batched_grad=True)


if __name__ == "__main__":
    main(sys.argv[1])
