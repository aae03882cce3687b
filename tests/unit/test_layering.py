"""The layers of the package: imports go down only, never sideways, never through a package's own __init__.

They hold wherever an import stands, in a function or under TYPE_CHECKING too: what an annotation names is also known.
Nor is there a cycle, among all modules of src, packages' __init__ included.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src"

# From the lowest; a module belongs to the longest of these names that it begins with.
LAYERS = (
    (
        "core.errors",
        "core.value",
        "core.wrong_calls",
        "core.elsewhere",
        "core.tracing",
        "core.attributes",
        "core.functions",
        "core.pair_indexing",
        "core.cotangents",
        "core.vjp",
        "core.dispatch_mode",
        "core.dtypes",
        "core.shapes",
        "core.deferred",
        "core.paged",
        "core.int8_rows",
        "core.mkl",
        "core.html",
    ),
    ("core.arrays", "core.region", "core.state", "core.positions", "core.dropout"),
    ("masks", "scores"),
    ("call", "sequences"),
    ("backends",),
    ("runtime", "sequences.one_list", "sequences.nested_call"),
    ("api",),
    ("nn", "inspect", "parallel", "sources"),
    ("compat", "demo", "cli", "testing", "__main__"),
)
LAYER = {part: layer for layer, parts in enumerate(LAYERS) for part in parts}

# Parts of one layer that do not see each other, and the pairs (importer, imported) that may all the same.
APART = (("masks", "scores"), ("nn", "inspect", "parallel", "sources"))
ALLOWED = {("inspect", "nn")}
# Backends share these, and nothing else; those of a backend that is a package share that package.
SHARED_BY_BACKENDS = ("base", "streaming.tiling", "streaming.softmax", "streaming.backward")
SHARED = f"backends share only {' and '.join(SHARED_BY_BACKENDS)}"
# These use regard as its users do.
AS_USERS = ("cli", "demo", "__main__")


@dataclass(frozen=True)
class Import:
    """One import: the module it stands in, the line, the module it names, and those of src whose content it takes."""

    by: str
    line: int
    of: str
    reaches: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.by}:{self.line} imports {self.of}"


def modules(source: Path) -> dict[str, Path]:
    """regard.masks.algebra -> its file; a package stands under its own name."""
    found: dict[str, Path] = {}
    for file in sorted(source.rglob("*.py")):
        parts = file.relative_to(source).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def packages(source: Path) -> set[str]:
    return {name for name, file in modules(source).items() if file.name == "__init__.py"}


def imports(source: Path) -> Iterator[Import]:
    """Every import of a part of src. `from regard.masks import algebra` asks the package's __init__ for a module."""
    known = modules(source)
    for by, file in known.items():
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            named: dict[str, set[str]] = {}
            if isinstance(node, ast.Import):
                named = {alias.name: {alias.name} for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                of = "." * node.level + (node.module or "")
                inside = {f"{of}.{alias.name}" for alias in node.names}
                named = {of: {name if name in known else of for name in inside}}
            for of, reached in named.items():
                if of.startswith(".") or of.split(".")[0] in known:
                    yield Import(by, node.lineno, of, tuple(sorted(reached & known.keys())))


def part(module: str) -> str:
    """regard.masks.algebra -> masks, regard.core.state -> core.state; "" for regard itself and others."""
    names = module.split(".")[1:] if module.startswith("regard.") else []
    longest = (".".join(names[:n]) for n in range(len(names), 0, -1))
    return next((name for name in longest if name in LAYER), names[0] if names else "")


def complaint(found: Import, packages: set[str]) -> str | None:
    """What is wrong with one import, if anything."""
    if found.of.startswith("."):
        return f"{found} relatively; name the module in full"
    by, of = part(found.by), part(found.of)
    if by == "" or by in AS_USERS:
        return None
    if found.of in packages:
        return f"{found}, a package's __init__; import from the module that defines the name"
    if by == of:
        return _of_another_backend(found) if by == "backends" else None
    if by not in LAYER or of not in LAYER:
        return None  # `complaints` says which has none
    if LAYER[of] > LAYER[by]:
        return f"{found}: up from layer {LAYER[by]} to layer {LAYER[of]}"
    if any(by in parts and of in parts for parts in APART) and (by, of) not in ALLOWED:
        return f"{found}: {by} and {of} do not see each other"
    return None


def _of_another_backend(found: Import) -> str | None:
    by, of = (name.removeprefix("regard.backends.") for name in (found.by, found.of))
    if of in SHARED_BY_BACKENDS or by.split(".")[0] == of.split(".")[0]:
        return None
    return f"{found}: {SHARED}"


def cycles(source: Path) -> list[str]:
    """Modules that reach themselves by imports. That a module loads the __init__ of its own packages is no step."""
    graph: dict[str, set[str]] = {}
    for found in imports(source):
        graph.setdefault(found.by, set()).update(found.reaches)
    loops: list[str] = []
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        if module in path:
            loops.append("a cycle: " + " -> ".join((*path[path.index(module) :], module)))
        elif module not in done:
            for next_module in sorted(graph.get(module, ())):
                visit(next_module, (*path, module))
            done.add(module)

    for module in sorted(graph):
        visit(module, ())
    return loops


def complaints(source: Path) -> list[str]:
    own = packages(source)
    unplaced = sorted({part(name) for name in modules(source) if name not in own} - {""} - set(LAYER))
    return [
        *(f"{name} has no layer; give it one in LAYERS" for name in unplaced),
        *(said for found in imports(source) if (said := complaint(found, own))),
        *cycles(source),
    ]


def test_imports_go_down_only() -> None:
    assert {"regard", "regard.api", "regard.core.state", "regard_command"} <= modules(SOURCE).keys()
    assert complaints(SOURCE) == []


def project(source: Path, files: dict[str, str]) -> Path:
    """A small package `regard` with these files, an empty __init__ in every folder, and a command beside it."""
    command = {"../regard_command/__init__.py": "def main():\n    from regard.cli import run"}
    for path, text in {"__init__.py": "", **command, **files}.items():
        file = source / "regard" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        (file.parent / "__init__.py").touch()
        file.write_text(text, encoding="utf-8")
    return source


SOUND = {
    "__init__.py": "from regard.masks import Causal\nfrom regard.nn.attention import Attention",
    "core/errors.py": "",
    "masks/__init__.py": "from regard.masks.algebra import Mask as Mask",
    "masks/algebra.py": "import torch\nfrom regard.core.errors import Refusal\nfrom regard.core.positions import head",
    "masks/positional.py": "from regard.masks.algebra import Mask",
    "core/positions.py": "if TYPE_CHECKING:\n    from regard.core.errors import Refusal",
    "backends/base.py": "from regard.call.problem import Problem",
    "backends/streaming/tiling.py": "from regard.backends.base import Backend",
    "backends/streaming/tiled.py": "from regard.backends.streaming.tiling import tiles",
    "call/problem.py": "import regard.masks.algebra",
    "nn/attention.py": "from regard.call.problem import Problem",
    "inspect/look.py": "from regard.nn.attention import Attention",
    "demo/story.py": "from regard import nn\nfrom regard.masks import Mask\nimport regard as rg",
    "cli.py": "import regard\nfrom regard.demo.story import tell",
}


def test_a_sound_project_passes(tmp_path: Path) -> None:
    assert complaints(project(tmp_path, SOUND)) == []


@pytest.mark.parametrize(
    ("path", "text", "said"),
    [
        ("core/errors.py", "from regard.call.problem import Problem", "up from layer 0 to layer 3"),
        ("core/errors.py", "def f():\n    from regard.cli import main", "up from layer 0 to layer 8"),
        ("core/errors.py", "import regard.cli", "up from layer 0 to layer 8"),
        ("masks/ragged.py", "if TYPE_CHECKING:\n    import regard.call.problem", "up from layer 2 to layer 3"),
        ("masks/ragged.py", "from regard.scores.algebra import Score", "masks and scores do not see each other"),
        ("scores/algebra.py", "from regard.masks.algebra import Mask", "scores and masks do not see each other"),
        ("nn/cache.py", "from regard.inspect.look_tensors import look", "nn and inspect do not see each other"),
        ("parallel/ring.py", "from regard.nn.attention import Attention", "parallel and nn do not see each other"),
        ("backends/flex.py", "from regard.backends.streaming.tiled import Tiled", SHARED),
        ("backends/base.py", "from regard.backends.streaming.tiled import Tiled", SHARED),
        ("call/problem.py", "from regard.masks import Mask", "a package's __init__"),
        ("call/problem.py", "from regard import masks", "a package's __init__"),
        ("call/problem.py", "import regard", "a package's __init__"),
        ("masks/ragged.py", "from regard.masks import algebra", "a package's __init__"),
        ("testing.py", "import regard as rg", "a package's __init__"),
        ("masks/ragged.py", "from .algebra import Mask", "relatively"),
        ("core/state.py", "from regard.masks.algebra import Mask", "up from layer 1 to layer 2"),
        ("core/state.py", "def f():\n    from regard.scores.algebra import Score", "up from layer 1 to layer 2"),
        ("masks/algebra.py", "from regard.masks.positional import Causal", "a cycle: regard.masks.algebra ->"),
        ("masks/algebra.py", "def f():\n    import regard.masks.positional", "a cycle: regard.masks.algebra ->"),
        ("__init__.py", "def f():\n    import regard.cli", "a cycle: regard -> regard.cli -> regard"),
        ("cli.py", "import regard_command", "a cycle: regard.cli -> regard_command -> regard.cli"),
        ("lobby.py", "", "lobby has no layer"),
    ],
)
def test_every_check_speaks(tmp_path: Path, path: str, text: str, said: str) -> None:
    spoken = complaints(project(tmp_path, {**SOUND, path: text}))
    assert said in (spoken or ["nothing"])[0]
