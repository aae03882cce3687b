"""regard.patch on models of timm, torchvision and diffusers: same outputs and gradients, every call on regard."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard as rg

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.patched import let_torchvision_load

pytestmark = pytest.mark.filterwarnings("ignore")  # those of the libraries themselves
SDPA, MHA = "scaled_dot_product_attention", "multi_head_attention_forward"
Model = tuple[nn.Module, tuple[Tensor, ...], dict[str, int]]


@pytest.fixture(scope="module", autouse=True)
def torchvision_can_be_imported() -> None:
    let_torchvision_load()


def vit_of_timm() -> Model:
    timm: Any = pytest.importorskip("timm")
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2, num_classes=5)
    return model, (torch.randn(2, 3, 64, 64),), {SDPA: 2}


def vit_with_pooling_of_timm() -> Model:
    timm: Any = pytest.importorskip("timm")
    make = timm.models.vision_transformer.VisionTransformer
    model = make(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3, num_classes=5, global_pool="map")
    return model, (torch.randn(2, 3, 32, 32),), {SDPA: 3}


def swin_v2_of_timm() -> Model:
    """Its attention is written out: no call is there to be taken."""
    timm: Any = pytest.importorskip("timm")
    make = timm.models.swin_transformer_v2.SwinTransformerV2
    model = make(img_size=32, patch_size=4, embed_dim=24, depths=(1,), num_heads=(3,), window_size=4, num_classes=5)
    return model, (torch.randn(2, 3, 32, 32),), {}


def swin_of_timm() -> Model:
    timm: Any = pytest.importorskip("timm")
    make = timm.models.swin_transformer.SwinTransformer
    model = make(img_size=32, patch_size=4, embed_dim=24, depths=(2,), num_heads=(3,), window_size=4, num_classes=5)
    for module in model.modules():
        if hasattr(module, "fused_attn"):  # as timm.layers.set_fused_attn(experimental=True)
            module.fused_attn = True
    return model, (torch.randn(2, 3, 32, 32),), {SDPA: 2}


def vit_of_torchvision() -> Model:
    vision: Any = pytest.importorskip("torchvision.models.vision_transformer")
    model = vision.VisionTransformer(32, 8, 2, 3, 48, 96, num_classes=5)
    return model, (torch.randn(2, 3, 32, 32),), {MHA: 2}


def dit_of_diffusers() -> Model:
    models: Any = pytest.importorskip("diffusers.models")
    model = models.DiTTransformer2DModel(
        *(2, 12, 4, 4),
        num_layers=2,
        norm_num_groups=2,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=7,
    )
    return _Diffuser(model, class_labels=torch.tensor([1, 3])), (torch.randn(2, 4, 8, 8),), {SDPA: 2}


def unet_of_diffusers() -> Model:
    models: Any = pytest.importorskip("diffusers.models")
    model = models.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=4,
        cross_attention_dim=20,
        attention_head_dim=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )
    return _Diffuser(model, encoder_hidden_states=torch.randn(2, 5, 20)), (torch.randn(2, 4, 8, 8),), {SDPA: 8}


class _Diffuser(nn.Module):
    """A model of diffusers as a function of the noisy image alone."""

    def __init__(self, model: nn.Module, **given: Tensor) -> None:
        super().__init__()
        self.model, self.given = model, given

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x, timestep=torch.tensor([3, 5]), **self.given).sample


MAKERS = (
    *(vit_of_timm, vit_with_pooling_of_timm, swin_of_timm, swin_v2_of_timm),
    *(vit_of_torchvision, dit_of_diffusers, unet_of_diffusers),
)


@pytest.mark.parametrize("make", MAKERS)
def test_outputs_and_gradients(make: Callable[[], Model]) -> None:
    model, inputs, calls = make()
    with torch.no_grad():
        for p in model.parameters():  # some heads begin as 0
            p.add_(torch.randn_like(p) * 0.02)
    for training in (False, True):
        model.train(training)
        torch.manual_seed(1)
        expected = _results(model, inputs)
        with rg.patch(model, report=None) as patch:
            torch.manual_seed(1)
            found = _results(model, inputs)
        assert dict(patch.calls) == {(name, None): count for name, count in calls.items()}
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-3)


def _results(model: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    out = model(*inputs)
    parameters = [p for p in model.parameters() if p.requires_grad]
    return (out, *torch.autograd.grad(out.square().mean(), parameters, materialize_grads=True))
