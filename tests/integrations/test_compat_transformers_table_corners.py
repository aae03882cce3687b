"""Tables of T5 where something beside the module changes its bias, and in graphs of any length."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="needs transformers: pip install 'regard[hf]'")

from torch._dynamo.testing import CompileCounter
from transformers import T5Config, T5EncoderModel
from transformers.models.t5.modeling_t5 import T5Attention

from regard.compat.transformers import relative_bias
from regard.compat.transformers.models import NAME
from regard.scores.modifiers import RelativeBias
from table_models import heard, score_of


def encoders() -> tuple[T5EncoderModel, T5EncoderModel]:
    """A random encoder in float64, by eager and by regard."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 30, "d_model": 16, "d_kv": 4, "d_ff": 8, "num_layers": 2, "num_heads": 4}
    models = [T5EncoderModel._from_config(T5Config(**sizes), attn_implementation=name) for name in ("eager", NAME)]
    eager, regard = (model.double().eval() for model in models)
    eager.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.data.normal_()
    regard.load_state_dict(eager.state_dict())
    return eager, regard


def text(n: int) -> Tensor:
    return torch.arange(n)[None] % 27 + 3


def compare(*models: T5EncoderModel, n: int = 70) -> None:
    with torch.no_grad():
        one, other = (model(text(n)).last_hidden_state for model in models)
    torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


@pytest.mark.full  # torch's compiler takes seconds
def test_one_graph_for_all_lengths() -> None:
    torch.compiler.reset()
    _, model = encoders()
    counted = CompileCounter()
    compiled = torch.compile(model, backend=counted, dynamic=True)
    with torch.no_grad():
        for n in (70, 75, 80):
            compiled(text(n))
    torch.compiler.reset()
    assert counted.frame_count <= 1  # 0: torch 2.10 may compile nothing more in a process that had threads


@pytest.mark.full
def test_an_exported_graph_is_for_short_and_long_texts() -> None:
    eager, model = encoders()
    length = torch.export.Dim("n", min=2, max=512)
    graph = torch.export.export(model, (text(70),), dynamic_shapes={"input_ids": {1: length}}, strict=False).module()
    for n in (10, 90):
        found, right = graph(text(n)).last_hidden_state, eager(text(n)).last_hidden_state
        torch.testing.assert_close(found, right, rtol=0, atol=1e-10)


def test_a_model_that_indexes_its_bias() -> None:
    def last(module: nn.Module, args: Any, options: dict[str, Any]) -> Any:
        if options.get("position_bias") is not None:
            options["position_bias"] = options["position_bias"][:, :, -70:, :]
        return args, options

    models = encoders()
    for model in models:
        model.encoder.block[1].register_forward_pre_hook(last, with_kwargs=True)
    compare(*models)


def test_a_hook_on_all_modules_sees_the_embedding() -> None:
    def tripled(module: nn.Module, given: Any, out: Any) -> Any:
        return out * 3 if isinstance(module, nn.Embedding) and module.num_embeddings == 32 else None

    models = encoders()
    hook = nn.modules.module.register_module_forward_hook(tripled)
    try:
        compare(*models)
    finally:
        hook.remove()
    _, seen = heard(models[1], input_ids=text(70))
    assert [score_of(call) for call in seen] == [[RelativeBias]] * 2  # without it, the layers have their table again


def test_a_bias_that_depends_on_more_is_not_taken() -> None:
    class Scaled(T5Attention):
        scale = 1.0

        def compute_bias(
            self, query_length: int, key_length: int, device: Any = None, past_seen_tokens: int = 0
        ) -> Tensor:
            index = torch.arange(key_length) - torch.arange(query_length)[:, None] - past_seen_tokens
            return self.relative_attention_bias(self._relative_position_bucket(index)).permute(2, 0, 1) * self.scale

        forward = T5Attention.forward

    assert relative_bias._makes_a_bias(T5Attention)
    assert not relative_bias._makes_a_bias(Scaled)
