"""doctor: what runs on this machine, and whether regard serves a model of transformers, checked against its own."""

from __future__ import annotations

import os
import platform
import warnings
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor, nn

from regard.api import explain
from regard.backends.native.ffi import built, chosen, runnable, why_not_built
from regard.call.hooks import AttentionCall, observing
from regard.cli.machine import processor
from regard.cli.random_inputs import NEW, random_inputs, token_count
from regard.compat.folder import folder_of, own_model, said
from regard.core.errors import Unsupported
from regard.core.shapes import count_of
from regard.runtime.dispatch import BACKENDS, Explanation

FAR = 1e-3  # of the largest output: rounding in float32 stays far below, a wrong mask far above

# optional packages, and the extra that brings each
OPTIONAL = {
    "numpy": "demo",
    "matplotlib": "plot",
    "rich": "demo",
    "safetensors": "hf",
    "transformers": "hf",
    "sentence-transformers": "test",
}


def here() -> str:
    """What runs here, a line each: versions, the processor and its kernels, the backends, the optional packages.

    >>> here().splitlines()[0].split()[0]
    'regard'
    """
    rows = [
        ("regard", f"{_version('regard') or 'not installed, run from its source'}, Python {platform.python_version()}"),
        ("torch", f"{torch.__version__}, {count_of(torch.get_num_threads(), 'thread')}"),
        ("processor", processor()),
        ("kernels", _kernels()),
        ("backends", ", ".join(repr(backend) for backend in BACKENDS)),
        *((name, _package(name, extra)) for name, extra in OPTIONAL.items()),
    ]
    return _aligned(rows)


def _kernels() -> str:
    there = ", ".join(built())
    if not there:
        return f"not built: {why_not_built()}; everything runs on Tiled()"
    named = os.environ.get("REGARD_ISA")
    why = "the best that runs here" if named is None else f"as REGARD_ISA={named} says"
    return f"{chosen()}, {why}; built: {there}; this processor runs: {', '.join(runnable())}"


def _package(name: str, extra: str) -> str:
    return _version(name) or f"not installed: pip install 'regard[{extra}]'"


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _aligned(rows: list[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)


@dataclass(frozen=True, eq=False)
class Examined:
    """What an examination of a model found; printing it shows that.

    model         the class of the model
    modules       path -> class of every module whose attention came to regard
    missed        the same for modules that are named attention and ran, and whose calls did not come
    calls         how many calls of attention one forward makes
    difference    the largest difference to eager attention, of real tokens, as a share of the largest output
    largest       that output
    tokens        how many tokens each sequence has
    generated     how many tokens of NEW are the same when generated, None where the model generates none
    explanations  how regard runs the calls, and how many of them
    """

    model: str
    modules: dict[str, str]
    missed: dict[str, str]
    calls: int
    difference: float
    largest: float
    tokens: int
    generated: int | None
    explanations: tuple[tuple[Explanation, int], ...]

    @property
    def sound(self) -> bool:
        return not self.missed and self.difference < FAR and self.generated in (None, NEW)

    def __str__(self) -> str:
        kinds = ", ".join(f"{n} × {kind}" for kind, n in Counter(self.modules.values()).items())
        read = f"{self.tokens} tokens, float32"
        rows = [
            ("model", self.model),
            ("attention", f"{count_of(self.calls, 'call')} of {kinds}: {_few(list(self.modules))}"),
            ("not reached", _few([f"{path} ({kind})" for path, kind in self.missed.items()]) or "none"),
            ("to eager", f"{self.difference:.1e} of the largest output ({self.largest:.3g}), {read}"),
            *self._generation(),
            *(row for found, count in self.explanations for row in self._explained(found, count)),
            ("verdict", "regard serves this model" if self.sound else "do not use regard here: see above"),
        ]
        return _aligned(rows)

    def _generation(self) -> list[tuple[str, str]]:
        return [] if self.generated is None else [("generated", f"{self.generated} of {NEW} tokens as eager's")]

    def _explained(self, found: Explanation, count: int) -> list[tuple[str, str]]:
        said = dict(found.facts)
        rows = [("backend", f"{found.backend!r} for {count_of(count, 'call')}; {said['score']}, {said['mask']}")]
        native = [why for backend, why in found.reasons if backend == BACKENDS[0]]
        return rows + [(f"not {BACKENDS[0]!r}", why) for why in native]


def _few(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} ... {names[-1]}"


def examine(name: str) -> Examined:
    """Runs a model of transformers (a folder, or "minilm") with its eager attention and with regard's.

    In float32, on two sequences of 32 random tokens, one of them padded, or on a random picture or sound. A model with
    few positions reads fewer tokens. Nothing is looked up outside of the folder.

    Raises ValueError where there is no such model, Unsupported where its attention does not come to regard.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # what regard would warn of is what this finds out
        return _examined(own_model(folder_of(name)))


def _examined(model: Any) -> Examined:
    feed, real = random_inputs(model)
    heard: list[AttentionCall] = []
    with torch.no_grad():
        try:
            with observing(heard.append), _watched(model) as ran:
                ours = _run(model, feed)
        except Unsupported as error:
            raise Unsupported(_unreached(model, str(error).splitlines()[0])) from None
        if not heard:
            raise Unsupported(_unreached(model, "not one call of attention came to regard"))
        tokens = _generate(model, feed)
        model.set_attn_implementation("eager")
        theirs = _run(model, feed)
        expected = _generate(model, feed)
    seen, largest = {id(call.layer) for call in heard}, float(theirs.abs().max())
    return Examined(
        model=type(model).__name__,
        modules={path: type(m).__name__ for path, m in model.named_modules() if id(m) in seen},
        missed=_missed(model, seen, ran),
        calls=len(heard),
        difference=float(_of_real((ours - theirs).abs(), real).max()) / largest,
        largest=largest,
        tokens=token_count(model),
        generated=None if tokens is None else int((tokens == expected).sum()),
        explanations=_explanations(heard),
    )


def _run(model: Any, feed: dict[str, Tensor]) -> Tensor:
    """The output of the model, or a ValueError, with the model's own error, where it does not read such inputs."""
    try:
        return _output(model(**feed))
    except Unsupported:
        raise
    except Exception as error:  # what models raise on inputs that they cannot read has no type in common
        name, why = type(model).__name__, f"{type(error).__name__}: {said(error).rstrip('.')}"
        raise ValueError(f"{name} does not read {', '.join(feed)} alone: {why}.") from error


def _of_real(difference: Tensor, real: Tensor | None) -> Tensor:
    return difference if real is None or difference.shape[:2] != real.shape else difference[real.bool()]


def _unreached(model: nn.Module, why: str) -> str:
    return f"{type(model).__name__} does not route its attention through transformers' interface: {why.rstrip('.')}."


def _output(out: Any) -> Tensor:
    """The logits, or whatever floating-point numbers come first."""
    for value in out.values():
        if isinstance(value, Tensor) and value.is_floating_point():
            return value
    raise ValueError(f"{type(out).__name__} holds no numbers that could be compared.")


def _generate(model: Any, feed: dict[str, Tensor]) -> Tensor | None:
    """NEW tokens, greedily, of the sequence that is not padded."""
    if not model.can_generate() or "input_ids" not in feed:
        return None
    asked = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "num_beams": 1}
    return model.generate(feed["input_ids"][:1], attention_mask=feed["attention_mask"][:1], **asked)[0, -NEW:]


@contextmanager
def _watched(model: nn.Module) -> Generator[set[int], None, None]:
    """Which modules run while it is open: of a model for text and pictures, those for pictures may not."""
    ran: set[int] = set()

    def note(module: nn.Module, _: Any) -> None:
        ran.add(id(module))

    hooks = [module.register_forward_pre_hook(note) for module in model.modules()]
    try:
        yield ran
    finally:
        for hook in hooks:
            hook.remove()


def _missed(model: nn.Module, seen: set[int], ran: set[int]) -> dict[str, str]:
    """Modules called attention, the innermost of their kind, that ran and that no call came from, nor from around."""
    named = {path: m for path, m in model.named_modules() if "Attention" in type(m).__name__}
    reached = [path for path, m in model.named_modules() if id(m) in seen]
    return {
        path: type(m).__name__
        for path, m in named.items()
        if id(m) in ran
        and not any(other.startswith(f"{path}.") for other in named)
        and not any(f"{path}.".startswith(f"{r}.") or f"{r}.".startswith(f"{path}.") for r in reached)
    }


def _explanations(heard: list[AttentionCall]) -> tuple[tuple[Explanation, int], ...]:
    """How the calls run, those that run alike counted together."""
    found: dict[str, tuple[Explanation, int]] = {}
    for call in heard:
        one = explain(
            *(call.q, call.k, call.k), score=call.score, mask=call.mask, positions=call.positions, sink=call.sink
        )
        key = str((one.backend, [fact for fact in one.facts if fact[0] in ("score", "mask")]))
        first, count = found.get(key, (one, 0))
        found[key] = first, count + 1
    return tuple(found.values())
