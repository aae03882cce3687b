"""What regard uses of torch that not every release it runs on has: asked of torch itself, here alone."""

from __future__ import annotations

from dataclasses import dataclass
from pkgutil import resolve_name

import torch


@dataclass(frozen=True)
class Feature:
    """Something of torch that regard can do without, or that one way of using regard needs.

    name   what it is, as a noun
    since  the first release of torch that has it
    at     where torch has it, as module:name
    """

    name: str
    since: str
    at: str

    @property
    def there(self) -> bool:
        """Whether the installed torch has it; loads the module that would hold it."""
        try:
            resolve_name(self.at)
        except (ImportError, AttributeError):
            return False
        return True

    def why_not(self) -> str | None:
        """Why what needs it cannot run here, as a clause; None where torch has it.

        >>> Feature("wings", since="9.0", at="torch:wings").why_not().partition("; ")[2]
        'torch 9.0 and later have it'
        """
        if self.there:
            return None
        return f"torch {torch.__version__} has no {self.name}; torch {self.since} and later have it"


# The functions by which native/python/ reads a tensor without the interpreter.
EXCHANGE = Feature("DLPack exchange API", since="2.10", at="torch:Tensor.__dlpack_c_exchange_api__")
# How the log-sum-exp is asked of flex_attention; before, by return_lse=True.
AUX_REQUEST = Feature("AuxRequest for flex_attention", since="2.9", at="torch.nn.attention.flex_attention:AuxRequest")
# Before, torch's definition of ONNX' Attention, run directly, hides what a mask of booleans shows. The release that
# mended it is told by a function that came with it.
ONNX_MASKS = Feature(
    "right masks of booleans in torch.onnx.ops.attention",
    since="2.10",
    at="torch.onnx.ops._impl:_attention_23_fake_impl",
)
