"""Functions and layers with the names and arguments of other libraries, each loaded when it is asked for.

flash_attention  flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
jax              dot_product_attention
keras            a layer
onnx             export of models that call regard
torch            scaled_dot_product_attention, flex_attention, MultiheadAttention
transformers     attn_implementation="regard", and caches for generate
"""

from importlib import import_module as _import_module

from regard.core.wrong_calls import no_name as _no_name

_ELSEWHERE = {
    "xformers": "regard.masks.peers.from_xformers makes a mask of an attn_bias, for regard.attention",
    "flashinfer": "regard.masks.peers.from_flashinfer makes a mask of its arguments, for regard.attention",
}
_ON_DEMAND = ("flash_attention", "jax", "keras", "onnx", "torch", "transformers")


def __dir__() -> list[str]:
    return list(_ON_DEMAND)


def __getattr__(name: str) -> object:
    """One of the modules."""
    if name not in _ON_DEMAND:
        raise _no_name(__name__, name, _ON_DEMAND, _ELSEWHERE)
    return _import_module(f"{__name__}.{name}")
