"""What README and docs/ say, runs: every ```python block of a page, in order, in one namespace.

Pages that are notebooks run in test_notebooks.py.
"""

from __future__ import annotations

import doctest
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import regard as rg
from generate.notebook import is_notebook
from needed import needs_kernels
from regard import facts
from selection import few

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [page for page in PAGES if not is_notebook(page.read_text(encoding="utf-8"))]
ALIGNMENT = ROOT / "docs" / "how-to" / "alignment.md"
RUN_HERE = [page for page in PAGES if page != ALIGNMENT]  # that one runs in its own test
SLOW = (
    *("README.md", "embeddings.md", "entropy.md", "facts.md", "generation.md"),
    *("graphs.md", "heads.md", "induction.md", "look.md", "mapped.md", "own.md"),
    *("report.md", "sinks.md", "train.md", "transformers.md", "vit.md"),
)
BLOCK = re.compile(r"^(?P<indent> *)```python *\n(?P<code>.*?)^(?P=indent)``` *$", re.MULTILINE | re.DOTALL)

COMMANDS = (
    "pip install -c constraints.txt '.[demo]' && regard demo",
    "pip install -c constraints.txt '.[test]' && pytest",
    "pytest --full",
)


def blocks(text: str) -> list[tuple[int, str]]:
    """The ```python blocks of a page, each with the number of its first line."""
    return [
        (
            text.count("\n", 0, found.start("code")) + 1,
            re.sub(rf"^{found['indent']}", "", found["code"], flags=re.MULTILINE),
        )
        for found in BLOCK.finditer(text)
    ]


def execute(page: Path) -> dict[str, Any]:
    """Runs a page, and returns its names. A block that starts with >>> is also held to the output that it shows."""
    names: dict[str, Any] = {"__name__": "__main__"}
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    for line, code in blocks(page.read_text(encoding="utf-8")):
        if code.lstrip().startswith(">>> "):
            shown = doctest.DocTestParser().get_doctest(code, names, page.name, str(page), line - 1)
            runner = doctest.DocTestRunner(optionflags=flags)
            runner.run(shown, clear_globs=False)
            assert runner.failures == 0, f"{page.name}, line {line}"
            names.update(shown.globs)
        else:
            # The blank lines in front make a traceback name the page's own line.
            exec(compile("\n" * (line - 1) + code, str(page), "exec"), names)
    return names


@pytest.mark.parametrize(
    "page",
    few(RUN_HERE, *(page for page in RUN_HERE if page.name not in SLOW)),
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_code_on_the_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    execute(page)


TASKS = {
    "replace.md": "Replace torch.nn.MultiheadAttention",
    "embeddings.md": "Speed up sentence-transformers",
    "pages.md": "Generate with a paged cache",
    "sinks.md": "A sliding window with a sink",
    "alibi.md": "ALiBi with learned slopes",
    "induction.md": "Find induction heads in your own GPT",
    "entropy.md": "Entropy in a loss",
    "mapped.md": "Attend to a memory-mapped file",
    "pack.md": "Train on packed batches",
    "flex.md": "Come from FlexAttention",
    "vit.md": "Look at a ViT on a photograph",
    "alignment.md": "Draw Bahdanau's alignment picture",
    "train.md": "bfloat16",
}


@pytest.mark.parametrize("name", TASKS)
def test_a_task_has_a_heading_that_a_reader_searches_for(name: str) -> None:
    text = (ROOT / "docs" / "how-to" / name).read_text(encoding="utf-8")
    assert re.search(rf"^##? {re.escape(TASKS[name])}$", text, re.MULTILINE)


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "how-to").glob("*.md")), ids=lambda page: page.stem)
def test_a_how_to_fits_on_a_screen(page: Path) -> None:
    code = "".join(code for _, code in blocks(page.read_text(encoding="utf-8")))
    assert len([line for line in code.splitlines() if line.strip()]) <= 40


@pytest.mark.full
def test_the_alignment_of_dates_is_learned_in_two_hundred_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which take ten seconds, as the page says: a count of steps holds on a machine of any speed."""
    monkeypatch.chdir(tmp_path)
    steps = list[object]()
    hook = register_optimizer_step_post_hook(lambda *given: steps.append(given))
    try:
        names = execute(ALIGNMENT)
    finally:
        hook.remove()
    assert len(steps) <= 200
    with torch.no_grad():
        read, expected = (
            names["numbers"](texts) for texts in (["21 September 2014", "9 June 1987"], ["2014-09-21", "1987-06-09"])
        )
        assert names["model"](read, expected).argmax(-1).equal(expected)
    (layer,) = names["report"].layers
    assert "".join(layer.queries.tokens) == "1979-05-03" and "".join(layer.keys.tokens) == "3 May 1979"
    weights = layer.every_weight()[0]
    year, month, day = weights[:4, 5:], weights[6, 1:6], weights[9, :2]  # 5 and 1 are the spaces before both
    assert bool((year.sum(-1) > 0.5).all()) and float(month.sum()) > 0.5 and float(day.sum()) > 0.5
    assert {path.name for path in tmp_path.iterdir()} == {"alignment.html", "alignment.png"}


@needs_kernels
def test_the_mask_that_readme_writes_runs_on_the_kernels() -> None:
    names = execute(README)
    x = names["x"]
    plan = rg.explain(x, x, x, mask=names["Stride"](4) & rg.Causal())
    assert plan.backend == rg.Native() and "a program of" in dict(plan.facts)["mask as"]
    assert dict(plan.facts)["backward"] == "the same kernels"


def test_readme_names_the_oldest_torch_that_is_admitted() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    admitted = re.search(r'^dependencies = \["torch>=([0-9.]+)"\]$', project, re.MULTILINE)
    assert admitted is not None  # tests/with_torch.sh reads the same line
    assert f"needs PyTorch {admitted[1]} or later" in README.read_text(encoding="utf-8")


def test_readme_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 150


@pytest.mark.full
def test_readme_shows_what_the_demo_prints() -> None:
    from regard.demo import __file__ as demo
    from regard.demo.model import load
    from regard.demo.reading import read

    printed = str(read(load(), Path(demo).with_name("text.txt").read_bytes()))
    shown = re.search(r"^    byte model .*\n(?:    .*\n)+", README.read_text(encoding="utf-8"), re.MULTILINE)
    assert shown is not None
    lines = [line[4:].removesuffix(", ...") for line in shown[0].splitlines()]
    assert len(lines) == 10 and [line for line in lines if line not in printed] == []


def test_pages_give_the_number_of_facts() -> None:
    """The table of facts has a row for each; Mass.first, Received(weights) and Received.last are forms of two."""
    kinds = [kind for kind in vars(facts).values() if isinstance(kind, type) and issubclass(kind, facts.Fact)]
    of_weights = {kind.__name__ for kind in kinds} - {"Fact", "Inputs"}
    table = set(re.findall(r"^\| `(\w+)[(.]", (ROOT / "docs" / "facts.md").read_text(encoding="utf-8"), re.MULTILINE))
    assert table == of_weights
    assert f"any of [{len(table)} facts](docs/facts.md)" in " ".join(README.read_text(encoding="utf-8").split())
    assert f"and {len(table)} facts about the weights" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    compared = (ROOT / "docs" / "compare.md").read_text(encoding="utf-8")
    assert f"| facts about the weights | {len(table)}, in linear memory |" in compared


def test_pages_give_the_additive_score_its_weights_alike() -> None:
    """A paper's W_q (h, dq) is transposed: Additive's w_q is (dq, h)."""
    for page in (README, ROOT / "docs" / "seeds.md"):
        assert "Additive(W_q.T, W_k.T, v" in page.read_text(encoding="utf-8")


def test_readme_shows_code() -> None:
    assert blocks(README.read_text(encoding="utf-8"))


@pytest.mark.parametrize("command", COMMANDS)
def test_readme_and_ci_give_the_same_commands(command: str) -> None:
    assert command in README.read_text(encoding="utf-8")
    assert command in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


PAGE = """# A page

```python
x = 1
```

1. An item:

   ```python
   x += 1
   ```

```python
>>> x
2
```

```text
not python
```
"""


def test_blocks_share_their_names(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE, encoding="utf-8")
    assert [line for line, _ in blocks(PAGE)] == [4, 10, 14]
    execute(page)


@pytest.mark.parametrize(("good", "bad"), [("x = 1", "x = y"), ("\n2\n", "\n3\n")])
def test_a_wrong_block_fails(tmp_path: Path, good: str, bad: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE.replace(good, bad), encoding="utf-8")
    with pytest.raises((NameError, AssertionError), match=r"y|page.md, line 14"):
        execute(page)
