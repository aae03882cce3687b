"""Wrong calls of reports, comparisons and measures of heads, and guesses: a table, as in test_wrong_values.py."""

from __future__ import annotations

import re
from typing import Any

import pytest

from test_wrong_calls import rows
from test_wrong_values import names

__all__ = ["names"]  # the fixture

REPORTS = """
rg.Report.of([], title="a", model="b")  # calls is empty; a report needs one attention call or more.
rg.Report.of(tape_calls, title="a", model="b", tokens=["a"])  # tokens has 1 text; the calls are of 5 tokens. Pass one text a token, special ones such as [CLS] included.
rg.Report.of(tape_calls)  # Report.of needs title and model; it has calls, title, model, tokens,
rg.Report.of(tape_calls, title="a", model="b", labels=["a"])  # Report.of has no argument 'labels'; write tokens=, the texts of the tokens.
rg.Report.of(tape_calls, title="a", model="b", crosses="*")  # Report.of has no argument 'crosses'; did you mean cross?
rg.Report.of(tape_calls, title="a", model="b", cross="decoder.*")  # cross='decoder.*' fits no layer of this recording; it has MultiHeadAttention.
rg.Report.of(3, title="a", model="b")  # calls is an int; expected those of a recording: with rg.record(model, facts=rg.Report.FACTS) as tape: model(x), then Report.of(tape.calls, ...).
rg.Report.of(rg.look(q, q), title="a", model="b")  # calls is a FactResults; expected those of a recording
rg.Report.of([q], title="a", model="b")  # calls holds a Tensor of float32; expected those of a recording
rg.Report.of(report, title="a", model="b")  # calls is a Report; expected those of a recording
rg.Report.of(tape_calls, title="a", model="b", context=0)  # context is 0; expected 1 or more.
rg.Report.of(tape_calls, title="a", model="b", context="2")  # context is '2'; expected an integer.
report.save("a.docx")  # a.docx is not supported as a report's file: its suffix is none of .png .svg .pdf .html .json .npz.
report.save("a.png", head="L9H9")  # there is no layer L9 here; there are L0 to L0.
report.save("a.png", head=3)  # head=3 names no layer; expected (layer, head), or a label such as 'L3H1'.
report.save("a.png", heads="L0H0")  # Report.save has no argument 'heads'; write head='L3H1'.
report.save("a.png", dpi=300)  # Report.save has no argument 'dpi'; write report.plot(head).savefig(path, dpi=300).
report.row("L0H0", 99)  # the queries and keys of MultiHeadAttention were not kept, from which rows are computed; look with facts=(*rg.Report.FACTS, rg.facts.Inputs()).
report.compare("other")  # compare has a str; expected another Report, as rg.look(model, text) gives it.
report.compare(report).moved("L0H9")  # there is no head L0H9; this model has layers 0 to 0, heads 0 to 2.
report.compare(report).save("a.png")  # a.png is not supported as a comparison's file: its suffix is none of .html .json .npz.
report.compare(report).save("a.html", head="L0H0")  # Comparison.save has no argument 'head'; write heads=(before, after), such as ('L3H1', 'L3H1').
report.compare(report).save("a.html", heads="L0H0")  # heads is 'L0H0'; expected the head before and the head after: heads=('L0H0', 'L0H0').
report.compare(report).save("a.html", heads=(0, 1))  # head=0 names no layer; expected (layer, head), or a label such as 'L3H1'.
report.with_heads(3)  # with_heads has an int; expected what rg.heads.contributions, carried, circuits, ablation or probe returned.
"""  # noqa: E501

GUESSES = """
rg.attention_weights(q, q, rows="all")  # rows is a str; expected integers, (r,).
layer.weights(x, rows="last")  # rows is a str; expected integers, (r,).
rg.facts.Rows("last")  # Rows.rows is a str; expected integers, (r,).
rg.attention_state(q, q, q) | 3  # | merges two States; one side is an int: attention_state(q, k, v) makes a State.
rg.attention_state(q, q, q) + rg.attention_state(q, q, q)  # States are merged by | alone: write a | b.
rg.record(model, layers=3).__enter__()  # layers is an int; expected a pattern over paths ('*' for all), several, or a function of the path.
rg.Report.of(tape_calls, title="a", model="b", cross=3)  # cross is an int; expected a pattern over paths
rg.head("3", 4)  # '3' positions: expected an integer.
rg.tail(4, "9")  # tail: nk is '9'; expected a number, or lengths (batch,).
rg.Dense(lambda b, h, i, j: i >= j)  # Dense.allowed is a function; write Where(fn).
rg.visualise  # it is regard.look(model, "a text", tokenizer=tokenizer), whose report has .save("page.html").
rg.GQA  # it is regard.attention(q, k, v) with fewer heads in k and v than in q, and regard.nn.MultiHeadAttention(d_model, heads, key_heads=...).
rg.heads.induction  # it is regard.heads.probe(model), which measures each head on random tokens.
rg.heads.ablate  # did you mean ablation?
rg.sources.Memmap  # it is regard.sources.Arrays(k, v), of arrays or of files that numpy.save wrote.
"""  # noqa: E501

MODELS = """
rg.heads.probe("gpt2")  # model is a str; expected an nn.Module that reads token ids.
rg.heads.probe(None)  # model is None; expected an nn.Module that reads token ids.
rg.heads.probe(report)  # model is a Report; expected an nn.Module that reads token ids.
rg.heads.carried("gpt2", "a text")  # model is a str; expected an nn.Module that reads token ids.
rg.heads.circuits(None, "a text")  # model is None; expected an nn.Module that reads token ids.
rg.look(None, "a text")  # look begins with None; expected a model that its own library has loaded: look(model, text, tokenizer=tokenizer); or tensors: look(q, k).
rg.look("gpt2", "a text")  # look begins with 'gpt2', a str; expected a model that its own library has loaded
rg.rollout(3)  # calls is an int; expected the calls of a recording: with rg.record(model, facts=(rg.facts.Inputs(),)) as tape: model(x), then rg.rollout(tape).
rg.rollout(report)  # calls is a Report; expected the calls of a recording
"""  # noqa: E501


@pytest.mark.parametrize(("call", "said"), rows(REPORTS, GUESSES, MODELS))
def test_what_does_not_fit_is_named(call: str, said: str, names: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError, LookupError, AttributeError), match=re.escape(said)):
        eval(call, dict(names))
