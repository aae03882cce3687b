"""transformers' encoders without padding: each layer runs on the real tokens alone, one sequence behind another."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from typing_extensions import Self

from regard.compat.transformers.mask import LazyMask
from regard.compat.transformers.models import NAME
from regard.core.errors import Unsupported
from regard.core.shapes import count_of
from regard.core.wrong_calls import kind_of

# Layers that mix tokens only in attention, which regard runs: by their folder in transformers.models.
# tests/integrations/test_compat_packed_sweep.py builds an encoder of each, small, and compares.
LAYERS = {
    "albert": "AlbertLayer",
    "bert": "BertLayer",
    "bert_generation": "BertGenerationLayer",
    "camembert": "CamembertLayer",
    "data2vec": "Data2VecTextLayer",
    "distilbert": "TransformerBlock",
    "electra": "ElectraLayer",
    "embedding_gemma2": "EmbeddingGemma2EncoderLayer",
    "ernie": "ErnieLayer",
    "esm": "EsmLayer",
    "esmc": "EsmcLayer",
    "eurobert": "EuroBertDecoderLayer",
    "gte": "GteLayer",
    "jina_embeddings_v3": "JinaEmbeddingsV3Layer",
    "mobilebert": "MobileBertLayer",
    "modernbert": "ModernBertEncoderLayer",
    "nomic_bert": "NomicBertLayer",
    "openai_privacy_filter": "OpenAIPrivacyFilterEncoderLayer",
    "roberta": "RobertaLayer",
    "roberta_prelayernorm": "RobertaPreLayerNormLayer",
    "roc_bert": "RoCBertLayer",
    "splinter": "SplinterLayer",
    "tipsv2": "Tipsv2TextEncoderLayer",
    "ultrabert": "UltrabertDecoderLayer",
    "xlm_roberta": "XLMRobertaLayer",
    "xlm_roberta_xl": "XLMRobertaXLLayer",
}


@dataclass(eq=False, repr=False)
class Packing:
    """A model that runs packed, until `remove()` or the end of a `with` block. Printed, it shows what that saved.

    Each call of a layer counts, so a batch counts as often as there are layers:

    calls   calls of layers; `packed` of them ran without padding, the others had none, or had it where it must stay
    padded  their tokens, padding included
    real    the tokens that were computed; padded - real is what packing saved
    """

    model: nn.Module
    layers: tuple[nn.Module, ...] = ()
    former: dict[PreTrainedModel, Any] = field(default_factory=dict[PreTrainedModel, Any])
    calls: int = 0
    packed: int = 0
    padded: int = 0
    real: int = 0

    def remove(self) -> None:
        """Gives the layers their forward back, and the model its implementation of attention; twice is once."""
        for layer in self.layers:
            del layer.forward
        for model, implementation in self.former.items():
            model.set_attn_implementation(implementation)
        self.layers, self.former = (), {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def count(self, padded: int, real: int) -> None:
        self.calls += 1
        self.packed += real < padded
        self.padded += padded
        self.real += real

    def __repr__(self) -> str:
        state = f"{count_of(len(self.layers), 'layer')} run packed" if self.layers else "no longer packed"
        calls = f"{count_of(self.calls, 'call', ',')} of layers {'was' if self.packed == 1 else 'were'} packed"
        share = (self.padded - self.real) / max(1, self.padded)
        return (
            f"{type(self.model).__name__}: {state}; {self.packed:,} of {calls}, "
            f"{self.real:,} of {count_of(self.padded, 'token', ',')} computed ({share:.0%} saved)"
        )


@dataclass(eq=False)
class PackedForward:
    """The forward of one layer: takes padding out of the arguments, and puts it back into what the layer returns.

    So what is around the layer (embeddings, pooling, hooks, hidden states that are collected) has padded tensors.
    """

    layer: nn.Module
    packing: Packing

    def __call__(self, *given: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling():
            raise Unsupported(
                "a packed model cannot be compiled: how many tokens are real is not known before they are there. Call "
                "remove() of what packed(model) returned, then torch.compile."
            )
        forward = type(self.layer).forward
        hidden: Tensor = given[0] if given else named["hidden_states"]
        tokens = hidden.shape[0] * hidden.shape[1]
        lazy = next((x for x in (*given, *named.values()) if isinstance(x, LazyMask)), None)
        packed = None if lazy is None else lazy.packed
        if packed is None:
            self.packing.count(tokens, tokens)
            return forward(self.layer, *given, **named)
        pack, mask = packed
        self.packing.count(tokens, len(pack.index))
        given = tuple(mask if x is lazy else pack.take(x) for x in given)
        named = {name: mask if x is lazy else pack.take(x) for name, x in named.items()}
        return pack.put(forward(self.layer, *given, **named))


def packed(model: nn.Module) -> Packing:
    """Makes an encoder of transformers, or a module with one (SentenceTransformer, CrossEncoder), run without padding.

    The model stays the same object and is called as before, in inference and training. Its attention runs on regard,
    and each of its layers runs on the tokens whose attention_mask is 1, one sequence after another. Embeddings run
    before that, so positions and token types are those of the padded batch; outputs keep their shapes. The output of a
    layer at padding is 0: in last_hidden_state, in hidden_states except the first of them (the embeddings), and in the
    input of a later norm or head, such as BERT's pooler, which reads the first token.

    A batch runs padded, without packing, if no token is padding or all are, or if its attention_mask has four axes; so
    does a layer with a window if there is padding between real tokens.

    Returns a Packing: its `remove()`, or the end of a `with` block, undoes the change; it prints how many tokens were
    saved. Raises Unsupported for layers that are not among `LAYERS`, for decoders, if the model is packed already, and
    in a forward that torch.compile traces.

    >>> from regard.compat.transformers import packed
    >>> from transformers import BertConfig, BertModel
    >>> sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    >>> model = BertModel(BertConfig(vocab_size=9, **sizes)).eval()
    >>> with packed(model) as packing:
    ...     out = model(torch.tensor([[5, 6, 7], [8, 0, 0]]), attention_mask=torch.tensor([[1, 1, 1], [1, 0, 0]]))
    ...     print(packing)
    BertModel: 2 layers run packed; 2 of 2 calls of layers were packed, 8 of 12 tokens computed (33% saved)
    >>> out.last_hidden_state.shape
    torch.Size([2, 3, 8])
    """
    layers = tuple(each for each in model.modules() if _known(each))
    models = [each for each in model.modules() if isinstance(each, PreTrainedModel)]
    _refuse(model, layers, models)
    inner = {part for each in models for part in each.modules() if part is not each}
    outer = [each for each in models if each not in inner]
    former: dict[PreTrainedModel, Any] = {each: each.config._attn_implementation for each in outer}  # pyright: ignore[reportPrivateUsage]
    packing = Packing(model, layers, former)
    for each in outer:
        each.set_attn_implementation(NAME)
    for layer in layers:
        layer.forward = PackedForward(layer, packing)
    return packing


def _known(layer: nn.Module) -> bool:
    home = type(layer).__module__.split(".")[:3]
    return home[:2] == ["transformers", "models"] and LAYERS.get(home[-1]) == type(layer).__name__


def _refuse(model: nn.Module, layers: tuple[nn.Module, ...], models: list[PreTrainedModel]) -> None:
    name = type(model).__name__
    others = {type(m).__name__ for m in model.modules() if isinstance(m, GradientCheckpointingLayer) and not _known(m)}
    if others or not layers:
        what = f"layers of class {', '.join(sorted(others))}" if others else "no layers of a known class"
        raise Unsupported(
            f"{name} has {what}. Packing needs layers that mix tokens only in attention that regard runs: "
            f"the encoders of {', '.join(LAYERS)}. Pass one of these, or leave the model padded."
        )
    for layer in layers:
        if "forward" in vars(layer):
            raise Unsupported(
                f"{kind_of(layer)} of {name} has a forward that is not its class's: the model is packed "
                "already, or another library replaced it. Call remove() of what packed(model) returned first."
            )
    for each in models:
        if getattr(each.config, "is_decoder", False):
            raise Unsupported(f"{type(each).__name__} is a decoder (config.is_decoder); packed(model) serves encoders.")
