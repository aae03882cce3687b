"""patch: while it is in place, models that call torch's attention run on regard."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any

import torch
from torch import nn

from regard.compat.torch.routes import AT_HOME, HOLDERS, IN_PLACE, ROUTED, TORCHS, Counts
from regard.core.wrong_calls import kind_of
from regard.inspect.capture.replaced import replaced

_MARK = "_regard_patched"  # the attribute of a patched forward


class Patch(Counts):
    """What `patch` has put in place: `restore()` undoes it, `print(...)` shows what ran where.

    calls   how often each function ran on regard, or on torch and why: {("scaled_dot_product_attention", None): 24}
    traced  the same of calls that torch.compile made part of a graph, counted once a graph
    """

    def __init__(self, model: nn.Module | None, report: Callable[[str], object] | None) -> None:
        super().__init__()
        self.model, self.report = model, report
        self.places = [*AT_HOME, *HOLDERS.find()]
        self._undo = ExitStack()
        self._undo.enter_context(_Replacing(self) if model is None else _PatchedForward.of(model).by(self))

    def restore(self) -> None:
        """Puts torch's functions, or the model's forward, back. A second time it does nothing."""
        self._undo.close()

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *error: object) -> None:
        self.restore()
        if self.report is not None:
            self.report(str(self))

    def __str__(self) -> str:
        every = self.calls + self.traced
        whose = "" if self.model is None else f" of {type(self.model).__name__}"
        if not every:
            return (
                f"regard.patch: no attention call{whose} was seen. Seen are calls of torch's {', '.join(TORCHS)}; "
                "not models that multiply and normalise by themselves, or call another library's kernel."
            )
        ran = sum(count for (_, why), count in every.items() if why is None)
        lines = [f"regard.patch: {ran} of {every.total()} attention calls{whose} ran on regard"]
        for counts, how in ((self.calls, ""), (self.traced, ", in graphs (counted when compiled)")):
            for (name, why), count in counts.most_common():
                where = "on regard" if why is None else f"left to torch: {why}"
                lines.append(f"  {count:6}  {name}  {where}{how}")
        return "\n".join(lines)


def patch(model: nn.Module | None = None, *, report: Callable[[str], object] | None = print) -> Patch:
    """Makes torch's attention run on regard: inside a `with` block, or until `restore()`.

    It replaces scaled_dot_product_attention and multi_head_attention_forward of torch.nn.functional, and
    flex_attention, also in modules that have imported them by name. This covers nn.MultiheadAttention,
    nn.Transformer..., and the models of timm, torchvision, diffusers and transformers ("sdpa") that call them. The
    patch switches the fused kernels of nn.TransformerEncoderLayer and nn.MultiheadAttention off, so that these layers
    call the functions, as in training; nested tensors, which they take on these kernels alone, they then refuse
    (regard.compat.torch.MultiheadAttention takes them).

    model   only while its forward runs; None: every call of this process, on every thread. Calls of other threads
            while a patched model runs run on regard too. A copy of the model is another model
    report  called with the summary at the end of the block; None: no report, `print(the Patch)` shows it

    Outputs, weights and gradients are torch's up to rounding, with three differences: dropout draws other bits, weights
    (need_weights=True) are those before dropout, and the output of a query that sees nothing is 0, where torch may give
    NaN. Calls that regard's kernels cannot run go to torch and are counted with the reason: tensors that are not on the
    CPU, not float32, bfloat16 or float16, nested, sparse, or of a subclass, masks and weights included
    (causal_upper_left and causal_lower_right of torch.nn.attention.bias are known); attn_mask with is_causal; of
    flex_attention, compiled calls and largest scores; torch.func transforms, forward-mode derivatives, tracing. With
    activation checkpointing (torch.utils.checkpoint) the backward computes forwards again: call it inside the block,
    `with rg.patch():`; a patched model covers its own forward alone. Under torch.compile, patch first or call the
    compiled model inside the block: its graphs then hold regard's kernels, and are compiled again without them after
    the end. torch.jit.script compiles torch's own functions, patched or not. Blocks nest; an error restores torch's
    functions too. The first patch searches all loaded modules, which takes about 20 ms for 4,000 of them; later ones
    take 0.2 ms unless modules were loaded meanwhile. An installed package that binds one of its old names to torch's
    function after the first search is not seen.

    >>> layer = torch.nn.TransformerEncoderLayer(16, 4, batch_first=True).eval()
    >>> with patch():
    ...     _ = layer(torch.randn(2, 5, 16))
    regard.patch: 1 of 1 attention calls ran on regard
           1  multi_head_attention_forward  on regard
    """
    if model is not None and not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"model is {kind_of(model)}; expected an nn.Module, or None for every call of this process.")
    return Patch(model, report)


class _PatchedForward:
    """What stands in the place of a model's forward: a function that the last one of its Patches counts for.

    A copy of the model that is made meanwhile has a method of that function too. It runs unpatched, on the copy.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.patches = weakref.ref(model), list[Patch]()
        self.was: Any = vars(model).get("forward")
        forward: Any = model.forward
        method = isinstance(forward, MethodType) and forward.__self__ is model
        run: Callable[..., Any] = forward.__func__ if method else forward

        @functools.wraps(run)
        def patched(*args: Any, **kwargs: Any) -> Any:
            copied = method and args[0] is not self.model()
            last = self.patches[-1:]  # read once: another thread may restore it meanwhile
            if copied or not last:
                return run(*args, **kwargs)
            with _Replacing(last[0]):
                return run(*args, **kwargs)

        vars(patched)[_MARK] = self
        model.forward = MethodType(patched, model) if method else patched

    @staticmethod
    def of(model: nn.Module) -> _PatchedForward:
        """That of a model which is patched already, or a new one."""
        found = getattr(vars(model).get("forward"), _MARK, None)
        return found if found is not None and found.model() is model else _PatchedForward(model)

    @contextmanager
    def by(self, patch: Patch) -> Generator[None, None, None]:
        """While it is open, the model is patched; the last one puts back what was there."""
        self.patches.append(patch)
        try:
            yield
        finally:
            self.patches.remove(patch)
            model = self.model()
            if model is not None and not self.patches:
                if self.was is None:
                    del model.forward
                else:
                    model.forward = self.was


class _Replacing:
    """While it is open, the functions of torch are those of this module, and calls are counted by one Patch."""

    def __init__(self, patch: Patch) -> None:
        self.patch, self.undo = patch, ExitStack()

    def __enter__(self) -> None:
        for module, name, function in self.patch.places:
            self.undo.enter_context(replaced(module, name, lambda _, function=function: ROUTED[function]))
        self.undo.enter_context(replaced(torch.backends.mha, "_is_fastpath_enabled", lambda _: False))
        IN_PLACE.append(self.patch)

    def __exit__(self, *error: object) -> None:
        IN_PLACE.remove(self.patch)
        self.undo.close()
