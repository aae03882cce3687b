"""Steps of one layer become that layer: the same as if all queries had come at once. And what layers are called."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from torch import Tensor

import regard as rg
import sample_reports as reports
from regard.inspect.report.axis import Axis
from regard.inspect.report.layer import Layer
from regard.inspect.report.report import Report
from regard.inspect.report.steps import Steps, in_steps
from regard.inspect.stacks import in_order, places


def tokens(n: int, random: int = 0) -> tuple[Tensor, Tensor]:
    q, k = torch.randn(2, 1, 3, n, 8, generator=torch.Generator().manual_seed(random)) * 2
    return q, k


def decoded(q: Tensor, k: Tensor, sizes: list[int], name: str = "attention", window: int = 10**6) -> list[reports.Call]:
    """The calls of one layer that is given so many tokens at a time, with a cache of the last `window` keys."""
    calls, end = [], 0
    for size in sizes:
        start, end = end, end + size
        first = 0 if size > 1 else max(0, end - window)
        keys = k[..., first:end, :]
        mask = rg.Causal() & rg.Window(before=window - 1, after=0)
        at = rg.tail(size, end - first) if size < end - first else rg.head(size, size)
        calls.append(reports.call(q[..., start:end, :], keys, mask, name, positions=at))
    return calls


def report(calls: list[reports.Call], **form: object) -> Report:
    return Report.of(calls, title="a model", model="Made", **form)


def assert_equal(one: Layer, other: Layer, apart: tuple[str, ...] = ("kept",)) -> None:
    for field in fields(Layer):
        if field.name in apart:
            continue
        a, b = getattr(one, field.name), getattr(other, field.name)
        if isinstance(a, Axis):
            assert a.tokens == b.tokens, field.name
            a, b = a.positions, b.positions
        if isinstance(a, Tensor):
            torch.testing.assert_close(a, b, msg=lambda said, name=field.name: f"{name}: {said}")
        else:
            assert a == b, field.name


class TestMerged:
    @pytest.mark.parametrize("sizes", [[23], [7, *[1] * 16], [1] * 23, [5, 4, 1, 1, 12]])
    def test_steps_are_the_whole(self, sizes: list[int]) -> None:
        q, k = tokens(23)
        names = [f"t{i}" for i in range(23)]
        (whole,) = report([reports.call(q, k, rg.Causal())], tokens=names).layers
        (layer,) = report(decoded(q, k, sizes), tokens=names).layers
        assert_equal(layer, whole)
        assert layer.queries.tokens == layer.keys.tokens == tuple(names) and layer.looks_at_itself

    def test_a_cache_that_drops_keys(self) -> None:
        q, k = tokens(19)
        mask = rg.Causal() & rg.Window(before=4, after=0)
        (whole,) = report([reports.call(q, k, mask)]).layers
        (layer,) = report(decoded(q, k, [7, *[1] * 12], window=5)).layers
        assert_equal(layer, whole)

    def test_a_query_that_sees_nothing(self) -> None:
        q, k = tokens(9)
        mask = rg.Causal() & rg.Where(lambda b, h, i, j: i != 6)
        steps = [reports.call(q[..., :5, :], k[..., :5, :], mask)] + [
            reports.call(q[..., n : n + 1, :], k[..., : n + 1, :], mask, positions=rg.tail(1, n + 1))
            for n in range(5, 9)
        ]
        (whole,), (layer,) = (report(calls).layers for calls in ([reports.call(q, k, mask)], steps))
        assert_equal(layer, whole, ("kept", "earliest"))
        assert layer.counts[0].tolist() == [1, 2, 3, 4, 5, 6, 0, 8, 9]

    def test_a_recording_that_begins_amid_a_text(self) -> None:
        (layer,) = report(decoded(*tokens(9), [6, 1, 1, 1])[1:], tokens=["x", "y", "z"]).layers
        assert layer.queries.positions.tolist() == [6, 7, 8] and layer.keys.positions.tolist() == list(range(9))
        assert layer.queries.tokens == ("x", "y", "z") and layer.keys.tokens == ()
        (layer,) = report(decoded(*tokens(9), [6, 1, 1, 1])[1:], tokens=list("abcdefghi")).layers
        assert layer.queries.tokens == tuple("ghi") and layer.keys.tokens == tuple("abcdefghi")

    def test_more_keys_than_cells(self) -> None:
        q, k = tokens(300)
        (whole,) = report([reports.call(q, k, rg.Causal())]).layers
        (layer,) = report(decoded(q, k, [250, *[1] * 50])).layers
        assert_equal(layer, whole, ("kept", "maps", "cells"))
        torch.testing.assert_close(layer.maps.sum(-1), torch.ones(3, 128))
        mass, expected = ((one.maps * one.row_edges.diff()[:, None]).sum(1) for one in (layer, whole))
        moved = (mass - expected).cumsum(-1).abs().sum(-1) / expected.sum(-1)  # how far along the keys, in cells
        assert float(moved.max()) < 1
        assert not bool((whole.cells & ~layer.cells).any())

    def test_cross_attention(self) -> None:
        q, k = tokens(9)
        q, k = q[..., :7, :], k
        own, cross = "decoder.0.self_attn", "decoder.0.cross_attn"
        steps = [
            call
            for n, one in enumerate(decoded(*tokens(7), [1] * 7, own))
            for call in (one, reports.call(q[..., n : n + 1, :], k, name=cross, positions=rg.tail(1, 9)))
        ]
        names, read = [f"t{i}" for i in range(7)], [f"k{i}" for i in range(9)]
        whole = report(
            [reports.call(*tokens(7), rg.Causal(), own), reports.call(q, k, name=cross, positions=rg.head(7, 9))],
            **{"tokens": names, "key_tokens": read},
        )
        found = report(steps, tokens=names, key_tokens=read)
        assert [layer.place for layer in found.layers] == ["decoder L0", "decoder cross L0"]
        for one, other in zip(found.layers, whole.layers, strict=True):
            assert_equal(one, other)
        assert found.layers[1].keys.tokens == tuple(read) and not found.layers[1].looks_at_itself

    def test_cross_attention_of_equal_lengths_does_not_look_at_itself(self) -> None:
        calls = [reports.call(*tokens(9))]
        (layer,) = report(calls, cross="*").layers
        assert not layer.looks_at_itself
        (layer,) = report(calls).layers
        assert layer.looks_at_itself


def steps(calls: list[reports.Call]) -> list[Steps]:
    return in_steps(calls, lambda call: False)


class TestInSteps:
    def test_shared_weights_stay_apart(self) -> None:
        (a, b), (c, d) = decoded(*tokens(6), [5, 1]), decoded(*tokens(6, 1), [5, 1])
        assert [one.calls for one in steps([a, c])] == [[a], [c]]
        assert [one.calls for one in steps([a, c, b, d])] == [[a, b], [c, d]]

    def test_two_texts_stay_apart(self) -> None:
        (a, b), (c, d) = decoded(*tokens(6), [5, 1]), decoded(*tokens(7), [6, 1])
        assert [one.calls for one in steps([a, b, c, d])] == [[a, b], [c, d]]
        (c, d, f), g = decoded(*tokens(7), [5, 1, 1]), decoded(*tokens(7), [5, 1])
        assert [one.calls for one in steps([*g, c, d, f])] == [g, [c, d, f]]
        e = reports.call(*torch.randn(2, 2, 3, 1, 8), rg.Causal(), positions=rg.Positions(*[torch.tensor([6])] * 2))
        assert [one.calls for one in steps([a, b, e])] == [[a, b], [e]]  # another batch


class TestNames:
    @pytest.mark.parametrize(
        ("names", "said"),
        [
            (["encoder.block.0.layer.0.SelfAttention", "decoder.block.0.layer.1.EncDecAttention"], "T5"),
            (["model.encoder.layers.0.self_attn", "model.decoder.layers.0.encoder_attn"], "BART, Whisper"),
            (["encoder.encoder.layer.0.attention.attention", "decoder.transformer.h.0.crossattention"], "of two"),
        ],
    )
    def test_cross_attention_has_its_own(self, names: list[str], said: str) -> None:
        assert places(names) == ["encoder L0", "decoder cross L0"], said

    @pytest.mark.parametrize(
        "name", ["transformer.h.{}.attn", "bert.encoder.layer.{}.attention.self", "model.decoder.layers.{}.self_attn"]
    )
    def test_one_stack_needs_no_name(self, name: str) -> None:
        assert places([name.format(n) for n in range(3)]) == ["L0", "L1", "L2"]

    def test_stacks_are_in_order(self) -> None:
        names = [
            "encoder.0",
            "encoder.1",
            *(f"decoder.{n}.{kind}_attn" for n in range(2) for kind in ("self", "cross")),
        ]
        found = [names[index] for index in in_order(names)]
        assert found == [*names[:2], "decoder.0.self_attn", "decoder.1.self_attn", *names[3::2]]


class TestLabels:
    def made(self) -> Report:
        names = ["encoder.0", "decoder.0.self_attn", "decoder.0.cross_attn", "decoder.1.self_attn"]
        return report([reports.call(*tokens(9, n), name=name) for n, name in enumerate(names)])

    def test_heads_are_found_by_their_labels(self) -> None:
        made = self.made()
        found = [made.find(label) for label in ("encoder L0H1", "Decoder L1H2", "decoder cross L0H0", "2,1")]
        assert found == [(0, 1), (2, 2), (3, 0), (2, 1)]
        assert made.shown((3, 0))[1] == "decoder cross L0H0: decoder.0.cross_attn"
        assert reports.report().find("L1H2") == (1, 2)

    def test_a_label_that_could_be_several(self) -> None:
        with pytest.raises(ValueError, match="encoder L0, decoder L0, decoder cross L0; write which, as in decoder cr"):
            self.made().find("L0H1")
        with pytest.raises(ValueError, match="there is no layer L7 here; there are L0 to L1"):
            reports.report().find("L7H0")

    def test_findings_and_grids_name_them(self) -> None:
        made = self.made()
        labels = {head.name for finding in made.findings for head in finding.heads}
        assert labels and all(label.startswith(("encoder L", "decoder L", "decoder cross L")) for label in labels)
        assert "max score" in str(made) and " at " in str(made)
        rows = [line[: len("decoder cross L0")] for line in made.text().splitlines()]
        start = rows.index("encoder L0      ")
        assert rows[start : start + 4] == [
            "encoder L0      ",
            "decoder L0      ",
            "decoder L1      ",
            "decoder cross L0",
        ]


def test_texts_are_counted_over_all_steps() -> None:
    calls = decoded(*tokens(6), [4, 1, 1])
    with pytest.raises(ValueError, match="tokens has 5 texts; the calls are of 6 tokens"):
        report(calls, tokens=list("abcde"))
