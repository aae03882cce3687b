"""Small random models of transformers with a table of relative positions, and what is heard of their calls."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from regard.call.hooks import AttentionCall, observing
from tiny_models import ENCODER_DECODERS, Tiny

T5 = ENCODER_DECODERS["T5"]
_SWITCH = {"num_experts": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
_SWITCH |= {"num_decoder_layers": 2, "router_jitter_noise": 0.0}
_BOXES = {"image_size": 8, "patch_size": 4, "max_2d_position_embeddings": 64, "relative_attention_num_buckets": 32}
_BOXES["relative_bias_args"] = [{"type": "1d"}, {"type": "horizontal"}, {"type": "vertical"}]
_TEXT = {"hidden_size": 32, "is_decoder": True, "initializer_range": 0.1}
# both stacks have one
SAME_LAYERS = {
    "T5": T5,
    "MT5": Tiny("MT5ForConditionalGeneration", "MT5Config", T5.options, weights=0.1),
    "UMT5": Tiny("UMT5ForConditionalGeneration", "UMT5Config", T5.options, weights=0.1),
    "Pop2Piano": Tiny("Pop2PianoForConditionalGeneration", "Pop2PianoConfig", T5.options, weights=0.1),
    "Switch": Tiny(
        "SwitchTransformersForConditionalGeneration",
        "SwitchTransformersConfig",
        {**T5.options, **_SWITCH},
        weights=0.1,
    ),
}
# only the decoder has one, or the encoder's is of blocks or boxes
DECODERS = {
    "LongT5": Tiny("LongT5ForConditionalGeneration", "LongT5Config", {**T5.options, "local_radius": 3}, weights=0.1),
    "UDOP": Tiny(
        "UdopForConditionalGeneration",
        "UdopConfig",
        {**T5.options, **_BOXES, "relative_attention_max_distance": 128},
        weights=0.1,
    ),
    "Pix2Struct": Tiny("Pix2StructTextModel", "Pix2StructTextConfig", {**T5.options, **_TEXT}, weights=0.1),
}


def score_of(call: AttentionCall) -> list[type]:
    """What is done to the scores of a call."""
    return [type(stage) for stage in call.score.stages[1:]]


def heard(run: Any, *given: Any, **feed: Any) -> tuple[Any, list[AttentionCall]]:
    """What it returns, and the calls of attention in it."""
    seen: list[AttentionCall] = []
    with observing(seen.append):
        out = run(*given, **feed)
    return out, seen


def apart(a: Tensor, b: Tensor) -> float:
    """The largest difference, as a share of the largest number."""
    return float((a - b).detach().abs().max() / b.detach().abs().max())
