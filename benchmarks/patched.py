"""Whole models of torch, timm, torchvision and diffusers, as they are and under regard.patch."""

from __future__ import annotations

import copy
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import regard as rg
from benchmarks.candidates import Unable, Way
from benchmarks.cases import Case
from benchmarks.inputs import Inputs
from regard.compat.torch import MultiheadAttention

HEAD = 64  # features of a head of torch's layers
LAYERS = 2


def plain_way(x: Inputs) -> Way:
    """The model as it is."""
    model = model_of(x.case)
    return Way("as it is", lambda: results(model, x.q), lambda out: _without_dropout(x, out, lambda model: model))


def patched_ways(x: Inputs) -> list[Way]:
    """The model under regard.patch; and with regard's layers in the place of torch's, where it has any."""
    model = model_of(x.case)
    patch = rg.patch(model, report=None)  # for good: it is in place only while this model's forward runs

    def run() -> list[Tensor]:
        found = results(model, x.q)
        if not any(why is None for _, why in patch.calls):
            raise Unable("no call of the model ran on regard")
        return found

    def patched(model: nn.Module) -> nn.Module:
        rg.patch(model, report=None)
        return model

    found = [Way("patched", run, lambda out: _without_dropout(x, out, patched))]
    if any(type(module) is nn.MultiheadAttention for module in model.modules()):
        own = with_own_layers(model_of(x.case))
        name = "regard.compat.torch.MultiheadAttention"
        found.append(Way(name, lambda: results(own, x.q), lambda out: _without_dropout(x, out, with_own_layers)))
    return found


def _without_dropout(x: Inputs, out: list[Tensor], prepare: Callable[[nn.Module], nn.Module]) -> list[Tensor]:
    """Results that can be compared: `out`, or those of the same model, prepared alike, that drops nothing."""
    return out if x.case.dropout == 0 else results(prepare(without_dropout(model_of(x.case))), x.q)


def results(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The output; of a model in training also the gradients of all parameters, as one vector."""
    if not model.training:
        with torch.no_grad():
            return [model(x)]
    with torch.enable_grad():
        out = model(x)
        parameters = [p for p in model.parameters() if p.requires_grad]
        gradients = torch.autograd.grad(out.square().mean(), parameters, materialize_grads=True)
    return [out.detach(), torch.cat([g.reshape(-1) for g in gradients])]


def without_dropout(model: nn.Module) -> nn.Module:
    """A copy that drops nothing."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    return model


def with_own_layers(model: nn.Module) -> nn.Module:
    """A copy whose nn.MultiheadAttention are regard's, with the same parameters."""
    model = copy.deepcopy(model)
    for parent in list(model.modules()):
        for name, layer in parent.named_children():
            if type(layer) is nn.MultiheadAttention:
                own = MultiheadAttention(layer.embed_dim, layer.num_heads, layer.dropout, batch_first=layer.batch_first)
                own.load_state_dict(layer.state_dict())
                setattr(parent, name, own.train(layer.training))
    return model


@dataclass
class Outputs:
    """What a model must give: its own results in float64. The limit is torch's error in float32, `worse` times."""

    x: Inputs
    worse: float

    def error(self, found: list[Tensor]) -> float:
        """The larger of the output's and the gradients', relatively, root mean square."""
        return max(float((t - r).norm() / r.norm()) for t, r in zip(found, self._right, strict=True))

    @cached_property
    def limit(self) -> float:
        return self.worse * self.error(results(self._model, self.x.q))

    @cached_property
    def _right(self) -> list[Tensor]:
        return results(copy.deepcopy(self._model).double(), self.x.q.double())

    @cached_property
    def _model(self) -> nn.Module:
        return without_dropout(model_of(self.x.case))


def model_of(case: Case) -> nn.Module:
    """The model of a case, a function of one tensor, with numbers from a fixed seed; in the mode of its passes."""
    state = torch.random.get_rng_state()
    torch.manual_seed(0)
    model = MAKERS[case.what](case)
    torch.random.set_rng_state(state)
    return model.train(case.passes != "forward")


class Encoder(nn.Module):
    """nn.TransformerEncoder; where sequences are padded, its output without the padding, one behind the other."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        n, width = case.shape[-2:]
        layer = nn.TransformerEncoderLayer(width, width // HEAD, 2 * width, case.dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, LAYERS)
        self.padding = torch.arange(n) >= torch.tensor(case.lengths)[:, None] if case.lengths else None

    def forward(self, x: Tensor) -> Tensor:
        out = self.encoder(x, src_key_padding_mask=self.padding)
        return out if self.padding is None else out[~self.padding[:, : out.shape[1]]]


class Decoder(nn.Module):
    """nn.TransformerDecoder: causal, and reading a memory of half as many tokens."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        n, width = case.shape[-2:]
        layer = nn.TransformerDecoderLayer(width, width // HEAD, 2 * width, case.dropout, batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, LAYERS)
        self.memory = torch.randn(case.shape[0], n // 2, width)
        self.mask = nn.Transformer.generate_square_subsequent_mask(n)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(x, self.memory.to(x), tgt_mask=self.mask.to(x), tgt_is_causal=True)


def _vit(case: Case) -> nn.Module:
    timm = _timm()
    return timm.create_model("vit_small_patch16_224", img_size=case.shape[-1], depth=4, num_classes=10)


def _swin(case: Case) -> nn.Module:
    timm = _timm()
    timm.layers.set_fused_attn(True, experimental=True)
    return timm.create_model("swin_tiny_patch4_window7_224", img_size=case.shape[-1], drop_path_rate=0.0)


def _timm() -> Any:
    let_torchvision_load()
    import timm

    return timm


def _vit_of_torchvision(case: Case) -> nn.Module:
    let_torchvision_load()
    from torchvision.models import VisionTransformer

    model = VisionTransformer(case.shape[-1], 16, 4, 6, 384, 1536, num_classes=10)
    for p in model.heads.parameters():  # they begin as 0, and would hide the layers
        nn.init.normal_(p, std=0.02)
    return model


class Denoiser(nn.Module):
    """A model of diffusers as a function of the noisy image alone."""

    def __init__(self, model: nn.Module, **given: Tensor) -> None:
        super().__init__()
        self.model, self.given = model, given

    def forward(self, x: Tensor) -> Tensor:
        given = {name: t.to(x.dtype) if t.is_floating_point() else t for name, t in self.given.items()}
        return self.model(x, timestep=torch.full(x.shape[:1], 3), **given).sample


def _unet(case: Case) -> nn.Module:
    let_torchvision_load()
    from diffusers.models import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=case.shape[-1],
        block_out_channels=(64, 128),
        layers_per_block=1,
        cross_attention_dim=64,
        attention_head_dim=8,
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
    )
    return Denoiser(model, encoder_hidden_states=torch.randn(case.shape[0], 77, 64))


def _dit(case: Case) -> nn.Module:
    let_torchvision_load()
    from diffusers.models import DiTTransformer2DModel

    model = DiTTransformer2DModel(6, HEAD, 4, num_layers=4, sample_size=case.shape[-1], patch_size=2)
    with torch.no_grad():
        for p in model.parameters():  # its gates begin as 0, and would hide the layers
            p.add_(torch.randn_like(p) * 0.02)
    return Denoiser(model, class_labels=torch.arange(case.shape[0]))


MAKERS: dict[str, Callable[[Case], nn.Module]] = {
    "encoder": Encoder,
    "padded": Encoder,
    "decoder": Decoder,
    "vit": _vit,
    "swin": _swin,
    "torchvision": _vit_of_torchvision,
    "unet": _unet,
    "dit": _dit,
}


def let_torchvision_load() -> None:
    """Lets torchvision be imported beside a build of torch that its operators do not load with.

    It asks for their schemas when it is imported; the models here call none of them.
    """
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None or "torchvision" in sys.modules:
        return
    try:
        torch.ops.load_library(Path(spec.origin).parent / "_C.so")
    except OSError:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float threshold) -> Tensor")
