"""The pages of the API reference: every public name of regard, found in its modules, under one heading each."""

from __future__ import annotations

import ast
import importlib.util
import inspect
from dataclasses import dataclass
from pathlib import Path

import regard


@dataclass(frozen=True)
class Page:
    """One page: the names of `regard` that are defined under `defined_in`, and those of whole `modules`.

    The names in `first` come first, then functions of `regard`, its classes, and the modules' names.
    """

    file: str
    title: str
    text: str
    defined_in: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    first: tuple[str, ...] = ()

    def names(self) -> list[str]:
        """The dotted names of this page, as a user writes them after `import regard`."""
        exported = [name for name in regard.__all__ if _defined_under(name, self.defined_in)]
        exported.sort(key=lambda name: inspect.isclass(getattr(regard, name)))
        found = [f"regard.{name}" for name in exported]
        for module in self.modules:
            found += [f"{module}.{name}" for name in public_names(module)]
        places = {name: place for place, name in enumerate(self.first)}
        return sorted(found, key=lambda name: places.get(name.rpartition(".")[2], len(places)))

    def markdown(self) -> str:
        """The page's source: mkdocstrings replaces each `:::` line by a signature and a docstring."""
        entries = "\n\n".join(f"::: {name}" for name in self.names())
        return f"# {self.title}\n\n{self.text}\n\n{entries}\n"


PAGES = (
    Page(
        "attention",
        "Attention",
        "The functions that compute attention (float32, bfloat16, float16, float64), and the values that they take and "
        "return besides tensors.",
        ("regard.api", "regard.core", "regard.sequences"),
        first=("attention", "attention_weights", "attention_scores", "explain"),
    ),
    Page(
        "masks",
        "Masks",
        "A mask says which keys a query may see. Masks combine by `&`, `|` and `~`. "
        "[The gallery](../gallery.md) draws each.",
        ("regard.masks",),
        first=("Mask",),
    ),
    Page(
        "scores",
        "Scores",
        "A score says how well a key matches a query: a similarity, then modifiers joined by `>>`. "
        "[The gallery](../gallery.md) draws each.",
        ("regard.scores",),
        first=("Score", "Similarity", "Modifier"),
    ),
    Page(
        "backends",
        "Backends",
        "A backend is where a call runs. Without `backend=`, regard takes the first one that can run the call; "
        "`rg.explain` says why.",
        ("regard.backends",),
    ),
    Page(
        "inspection",
        "Looking inside",
        "Facts about the weights of one call or of every call of a model, and pages made of them.",
        ("regard.inspect",),
        first=("look", "record", "Report", "monitor"),
    ),
    Page(
        "facts",
        "regard.facts",
        "`rg.facts`: questions about the weights, which `rg.look` and `rg.record` answer. [Definitions](../facts.md).",
        (),
        ("regard.facts",),
        ("Entropy", "EffectiveKeys", "Top", "Received", "Rows", "Map"),
    ),
    Page(
        "heads",
        "regard.heads",
        "`rg.heads`: what each head adds and carries, what it copies and seeks, the loss without it, and its kind. "
        "[How to read the numbers](../heads.md).",
        (),
        ("regard.heads",),
        ("contributions", "carried", "circuits", "ablation", "probe"),
    ),
    Page(
        "nn",
        "regard.nn",
        "`rg.nn`: layers (multi-head attention), caches, rotary positions, pooling and learned scores.",
        (),
        ("regard.nn",),
        ("MultiHeadAttention",),
    ),
    Page(
        "sources",
        "regard.sources",
        "`rg.sources`: keys and values that come in parts and may be larger than memory. "
        "[How to use them](../sources.md).",
        ("regard.sources",),
        ("regard.sources",),
    ),
    Page(
        "compat",
        "Other libraries' names",
        "The functions and layers of other libraries, with their signatures, computed by regard. "
        "[If you come from ...](../moving.md)",
        ("regard.compat",),
        (
            "regard.compat.torch",
            "regard.compat.flash_attention",
            "regard.compat.jax",
            "regard.compat.keras",
            "regard.compat.onnx",
            "regard.compat.transformers",
        ),
    ),
    Page(
        "convert",
        "Masks of other libraries",
        "Functions that convert masks from and to the conventions of other libraries.",
        (),
        ("regard.masks.convert", "regard.masks.peers", "regard.masks.to_peers"),
    ),
    Page(
        "parallel",
        "regard.parallel",
        "`regard.parallel` computes attention over [one sequence on several processes](../parallel.md).",
        (),
        ("regard.parallel",),
    ),
    Page(
        "testing",
        "regard.testing",
        "`regard.testing` checks a mask, a score or a fact that you wrote.",
        (),
        ("regard.testing",),
    ),
)


def public_names(module: str) -> list[str]:
    """The public names of a module in the order of its source: a package's imports, another module's definitions.

    They are read from the source, because importing regard.compat.jax needs JAX.
    """
    tree = ast.parse(_source(module).read_text(encoding="utf-8"))
    imported = [name.asname for line in tree.body if isinstance(line, ast.ImportFrom) for name in line.names]
    defined = [line.name for line in tree.body if isinstance(line, ast.FunctionDef | ast.ClassDef)]
    return [name for name in dict.fromkeys([*imported, *defined]) if name and not name.startswith("_")]


def _source(module: str) -> Path:
    """The file of a module by the name that users write: regard.facts is regard.inspect.facts."""
    named = getattr(regard, module.removeprefix("regard."), None)
    spec = importlib.util.find_spec(named.__name__ if inspect.ismodule(named) else module)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin)


def _defined_under(name: str, packages: tuple[str, ...]) -> bool:
    """Whether a public name of `regard` is no module, and comes from one of these packages."""
    value = getattr(regard, name)
    if inspect.ismodule(value):
        return False
    return any(value.__module__ == package or value.__module__.startswith(package + ".") for package in packages)
