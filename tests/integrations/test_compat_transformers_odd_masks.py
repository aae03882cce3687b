"""Models whose masks, or whose modules, say other things than most: the numbers of "eager"."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="needs transformers: pip install 'regard[hf]'")

import transformers

from regard.compat.transformers import NAME
from regard.compat.transformers.models import FirstForward

Run = Callable[[Any], Tensor]
hf: Any = transformers


def phi4_vision() -> tuple[Any, Run]:
    """Its modules say that they are causal. No patch is padding, and there is no mask."""
    module: Any = pytest.importorskip("transformers.models.phi4_multimodal.modeling_phi4_multimodal")
    config = module.Phi4MultimodalVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, image_size=28, patch_size=14
    )
    image = torch.randn(1, 3, 28, 28)
    return module.Phi4MultimodalVisionModel(config), lambda model: model(image).last_hidden_state


def rt_detr() -> tuple[Any, Run]:
    """In training with labels it makes a mask (nq, nk) of numbers, for the queries that it denoises."""
    widths = {"embedding_size": 8, "hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1], "layer_type": "basic"}
    config = hf.RTDetrConfig(
        backbone_config=hf.RTDetrResNetConfig(**widths, out_features=["stage2", "stage3", "stage4"]),
        encoder_hidden_dim=16,
        encoder_in_channels=[8, 8, 8],
        d_model=16,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        num_queries=6,
        decoder_attention_heads=2,
        encoder_attention_heads=2,
        decoder_layers=2,
        decoder_in_channels=[16, 16, 16],
        num_denoising=4,
        num_labels=3,
    )
    image = torch.randn(1, 3, 64, 64)
    labels = [{"class_labels": torch.tensor([1]), "boxes": torch.tensor([[0.5, 0.5, 0.2, 0.2]])}]

    def run(model: Any) -> Tensor:
        for module in model.train().modules():
            if isinstance(module, (torch.nn.Dropout, torch.nn.BatchNorm2d)):
                module.eval()
        return model(pixel_values=image, labels=labels).auxiliary_outputs[-1]["logits"]

    return hf.RTDetrForObjectDetection(config), run


def bridge_tower() -> tuple[Any, Run]:
    """It asks for masks of one query, gives images none, and modules that see everything say that they are causal."""
    text = {"vocab_size": 61, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = hf.BridgeTowerConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        text_config=text | {"intermediate_size": 40, "max_position_embeddings": 40},
        vision_config={"hidden_size": 64, "num_hidden_layers": 2, "patch_size": 8, "image_size": 16},
    )
    ids, image = torch.randint(3, 60, (2, 4)), torch.randn(2, 3, 16, 16)
    real = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    return hf.BridgeTowerModel(config), lambda model: torch.cat(
        [
            model(ids, attention_mask=mask, pixel_values=image, pixel_mask=torch.ones(2, 16, 16)).pooler_output
            for mask in (real, torch.ones_like(real))
        ]
    )


def light_glue() -> tuple[Any, Run]:
    """Its masks have one query, which stands for all."""
    points = {"model_type": "superpoint", "encoder_hidden_sizes": [8, 8, 8, 8], "decoder_hidden_size": 8}
    config = hf.LightGlueConfig(
        keypoint_detector_config=points
        | {"keypoint_decoder_dim": 65, "descriptor_decoder_dim": 32, "keypoint_threshold": 0.0, "max_keypoints": 9},
        descriptor_dim=32,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    images = torch.rand(1, 2, 1, 64, 64)
    return hf.LightGlueForKeypointMatching(config), lambda model: model(images).matching_scores


def lfm3_vision() -> tuple[Any, Run]:
    """It hands the size of the grid of patches to every layer."""
    module: Any = pytest.importorskip("transformers.models.lfm3_vl.modeling_lfm3_vl")
    config = module.Lfm3VlVisionConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        layer_types=["conv", "full_attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        patch_size=4,
    )
    patches, grid = torch.randn(16, 96), torch.tensor([[1, 4, 4]])
    return module.Lfm3VlVisionModel(config), lambda model: model(patches, grid_thw=grid).last_hidden_state


@pytest.mark.filterwarnings("ignore:.*computes with its attention mask")
@pytest.mark.parametrize("make", [phi4_vision, rt_detr, bridge_tower, light_glue, lfm3_vision])
def test_as_eager(make: Callable[[], tuple[Any, Run]]) -> None:
    torch.manual_seed(0)
    model, run = make()
    model.eval()
    found: dict[str, Tensor] = {}
    for name in ("eager", NAME):
        model.set_attn_implementation(name)
        torch.manual_seed(3)  # of what is denoised
        before = FirstForward.reached
        found[name] = run(model).detach()
        assert (FirstForward.reached > before) == (name == NAME)
    torch.testing.assert_close(found[NAME], found["eager"], rtol=1e-4, atol=1e-5)
