"""Report: the attention of a model on a text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any, ClassVar

from torch import Tensor

import regard.inspect.report.page as page
import regard.inspect.report.plot as plot
import regard.inspect.report.save as save
import regard.inspect.report.text as text
from regard.core.arrays import size
from regard.core.wrong_calls import answers_wrong_calls, kind_of
from regard.inspect.facts.algebra import Fact
from regard.inspect.facts.inputs import Inputs
from regard.inspect.layers import Layers
from regard.inspect.report.comparison import Comparison
from regard.inspect.report.content import Content
from regard.inspect.report.element import Looked, checked_calls
from regard.inspect.report.head_result import HeadResult, matched
from regard.inspect.report.labels import Labels
from regard.inspect.report.layer import FACTS, SAVED, Layer
from regard.inspect.report.page_parts import framed
from regard.inspect.report.picture import Picture
from regard.inspect.report.server import PageServer
from regard.inspect.report.steps import in_steps, merged
from regard.inspect.stacks import in_order, places


@dataclass(frozen=True, eq=False, repr=False)
class Report(Content):
    """The attention of a model on one text: print it, or save it as a picture, a page or numbers.

    title, model   what was run, and the class of the model
    layers         what each attention call did, first layer first
    seconds        how long running and looking took
    unit           what a token is called: "token", "byte"
    context        the number of tokens that must repeat for an earlier copy to count (induction)
    notes          further facts for the first line
    picture        the image, if the tokens are its patches
    head_results   further results about its heads: see with_heads
    second_text    the number of the first token of the second text of a pair; 0 for one text

    >>> from types import SimpleNamespace
    >>> from regard.inspect.look_tensors import look
    >>> from regard.masks.positional import Causal
    >>> x, mask = torch.eye(4).expand(1, 2, 4, 4), Causal()
    >>> seen, view = look(x, x, facts=Report.FACTS, mask=mask), mask.on(4, batch=(1,), heads=2)
    >>> call = SimpleNamespace(name="attention", seen=seen, view=view, kind="self")
    >>> report = Report.of([call], title="two heads", model="none", tokens="abcd")
    >>> print(report)
    two heads (none)  4 tokens, 1 × 2 heads ...
    >>> [finding.said for finding in report.findings][-1]
    'max score 0.5 at L0H0 (next head 0.5)'
    """

    FACTS: ClassVar[tuple[Fact[Any], ...]] = FACTS  # what has to be recorded

    @staticmethod
    def facts_of_text(tokens: int) -> tuple[Fact[Any], ...]:
        """The facts that look records of a text of so many tokens by default.

        FACTS, and for up to 2,048 tokens facts.Inputs(), from which `row` and the weights in .npz are computed.
        """
        return (*FACTS, Inputs()) if tokens <= SAVED else FACTS

    @staticmethod
    @answers_wrong_calls(
        {
            **dict.fromkeys(("labels", "texts", "words"), "write tokens=, the texts of the tokens"),
            **dict.fromkeys(("keys", "source", "encoder_tokens"), "write key_tokens=, the texts that are read"),
            **dict.fromkeys(("head", "heads", "layer", "layers"), "the report has all; report.save(path, head='L3H1')"),
        },
        callee="Report.of",
    )
    def of(
        calls: Iterable[Looked],
        *,
        title: str,
        model: str,
        tokens: Sequence[str] = (),
        key_tokens: Sequence[str] = (),
        cross: Layers | None = None,
        encoder: Layers | None = None,
        element: int = 0,
        seconds: float = 0.0,
        unit: str = "token",
        context: int = 2,
        notes: tuple[str, ...] = (),
        picture: Picture | None = None,
        second_text: int = 0,
    ) -> Report:
        """A report on the calls of a tape that was recorded with facts=Report.FACTS.

        Steps of `generate` are one layer each, the queries of all of them. Layers are in the order of their calls, but
        an encoder's first, then those of the decoder, then its cross-attention: "encoder L0", "decoder cross L1".

        tokens are the texts of the sequence (a decoder's), key_tokens those of the one that cross-attention reads (its
        encoder's); `element` says which of a batch. Which layer reads which follows from what the layers were called
        with (Recorded.kind); where that shows nothing, from how many queries and keys they have; never from the names
        of modules. The caller may say it: `cross` names the layers that read key_tokens, `encoder` those whose queries
        are key_tokens too. Each is a pattern over their paths ("*" all), several, a function of the path, or () for no
        layer. If `tokens` are those of two texts, one after the other, second_text is the number of the first token of
        the second one.

        A UserWarning names the layers for which nothing decides, what they are taken for, and what to pass. Raises
        ValueError for no call, for texts that name no token of any layer, where `cross` or `encoder` fits no layer, for
        a context below 1, and for a second_text beyond the tokens; IndexError for an element that is not there.
        """
        context = size(context, "context", 1)
        labels, calls = Labels(tokens, key_tokens, cross, encoder), checked_calls(calls)
        found = in_steps(calls, labels.crosses(calls), len(tokens))
        labels.check_counts(found)
        found = [found[n] for n in in_order([one.name for one in found], [one.cross for one in found])]
        named = places([one.name for one in found], [one.cross for one in found])
        layers, of_queries = list[Layer](), labels.of_queries(found)
        for one, place, own in zip(found, named, of_queries, strict=True):
            steps = [Layer.of(call, element, own, key_tokens, one.cross) for call in one.calls]
            layers.append(replace(merged(steps, one, own), place=place))
        labels.check_used(layers, found, of_queries)
        labels.warn_of_assumed(found)
        return Report(title, model, tuple(layers), seconds, unit, context, notes, picture, second_text=second_text)

    def text(self, width: int = 80) -> str:
        """The report for a terminal: a line of facts, grids of layers × heads, findings with their rules."""
        return text.describe(self, width)

    @answers_wrong_calls(
        {
            "heads": "write head='L3H1'",
            "dpi": "write report.plot(head).savefig(path, dpi=300)",
            **dict.fromkeys(("format", "fmt"), "the suffix of the path says it, as in report.html"),
        }
    )
    def save(self, path: str | PathLike[str], head: tuple[int, int] | str | None = None) -> None:
        """Writes the report in the format of the suffix: .png .svg .pdf .html .json .npz. See docs/report.md.

        `head`, (layer, head) or a label such as "L3H1", is drawn large; the default is chosen by the findings. The file
        is written under a temporary name and then renamed, so that it is never incomplete. Raises ValueError for
        another suffix, and for a head that does not exist.
        """
        save.write(self, path, self.find(head) if isinstance(head, str) else head)

    def plot(self, head: tuple[int, int] | str | None = None) -> Any:
        """The map of one head as a matplotlib Figure: rows are queries, columns keys, with their tokens at the axes.

        Tokens are named where an axis has 36 or fewer. The scale is linear where 80 % of the mass is in weights of a
        tenth of the largest or more, otherwise logarithmic, from 0.0001 to 1. `head` as in save. Needs matplotlib;
        plt.close is not needed, since no global state holds the figure. Raises ValueError for a head that does not
        exist.

        >>> from regard.demo.model import load
        >>> from regard.demo.reading import read
        >>> figure = read(load(), b"to be or not to be").plot("L3H1")
        >>> figure.axes[0].get_xlabel(), figure.axes[0].get_ylabel()
        ('key', 'query')
        """
        return plot.head_figure(self, self.find(head) if isinstance(head, str) else head)

    def serve(self, head: tuple[int, int] | str | None = None) -> PageServer:
        """The page with exact rows, for texts of any length, at `.url` until `.close()`; in a notebook, a link to it.

        The server listens on this machine only, under a secret address, as `regard look --serve`. `head` as in save.
        Raises ValueError if queries and keys were not kept: see row.
        """
        return PageServer(self, self.find(head) if isinstance(head, str) else head).start()

    def compare(self, other: Report) -> Comparison:
        """Which heads differ most between this report and another, and where their mass moved.

        Two texts, two checkpoints, a model before and after tuning; with itself, two heads of one report. The models
        need as many layers and heads; texts that differ are aligned by token. Raises ValueError where the heads do not
        match. See Comparison, and docs/report.md.
        """
        return Comparison(self, other)

    def row(self, head: tuple[int, int] | str, query: int) -> Tensor:
        """The exact weights of one query on all keys, (nk,), computed at once: for texts of any length.

        They need the queries and keys of the model, which look keeps of texts of up to 2,048 tokens, and of longer ones
        on request: look(model, text, ..., facts=(*rg.Report.FACTS, rg.facts.Inputs())).

        float32, or float64 for a model in float64; on the CPU; 0 for keys that the query may not see. Time and memory
        are linear in the keys. Queries and keys are counted as in the layer: padding is left out, steps of `generate`
        are one sequence; a negative query counts from the end.

        head   (layer, head) or a label such as "L3H1"
        Raises ValueError for a head that does not exist, and if queries and keys were not kept; IndexError for a query
        that does not exist.

        >>> import regard as rg
        >>> from regard.demo.model import load
        >>> from regard.demo.reading import read
        >>> report = read(load(), b"to be or not to be")
        >>> report.row("L3H1", -1).shape, round(float(report.row("L3H1", -1).sum()), 4)
        (torch.Size([18]), 1.0)
        """
        at, _ = self.shown(self.find(head) if isinstance(head, str) else head)
        weights, _ = self.layers[at.layer].row(query)
        return weights[at.head]

    def with_heads(self, *results: HeadResult) -> Report:
        """The same report with results of rg.heads.contributions, carried, circuits, ablation and probe, in any order.

        Print, picture and page then also show their grids and findings, and .json and .npz hold their numbers. The
        report holds one result of each kind, the last one. Layers are matched by their paths in the model. Raises
        ValueError if a result is of other layers, heads or keys, TypeError for anything else.

        >>> import regard as rg
        >>> from regard.demo.model import load
        >>> from regard.demo.reading import read
        >>> model, text = load(), b"to be or not to be, to be or not to be"
        >>> report = read(model, text).with_heads(rg.heads.ablation(model, list(text)))
        >>> report.grids[-1].title, report.findings[-1].rule
        ('loss without a head', 'one head at a time set to its mean over the text (...)')
        """
        held = {type(result): result for result in self.head_results}
        for result in results:
            if not isinstance(result, HeadResult):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise TypeError(
                    f"with_heads has {kind_of(result)}; expected what rg.heads.contributions, carried, "
                    "circuits, ablation or probe returned."
                )
            held[type(result)] = matched(result, self.layers)
        return replace(self, head_results=tuple(held[kind] for kind in sorted(held, key=lambda one: one.__name__)))

    def __repr__(self) -> str:
        return f"Report({text.name(self)}, {text.facts(self)})"

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        return framed(page.html(self, None), self.title)
