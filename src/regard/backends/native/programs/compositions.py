"""Operations of torch written as others, for which programs have instructions: activations, rounding, bits.

Values and derivatives are torch's; at a kink, where a derivative jumps, the derivative too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard.backends.native.programs.graph import NotTraced


def _sinh(x: Tensor) -> Tensor:
    return (torch.expm1(x) - torch.expm1(-x)) * 0.5


def _cosh(x: Tensor) -> Tensor:
    return (torch.exp(x) + torch.exp(-x)) * 0.5


def _asinh(x: Tensor) -> Tensor:
    def of_positive(y: Tensor) -> Tensor:
        near = torch.log1p(y + y * y / (torch.sqrt(y * y + 1) + 1))
        return torch.where(y > 1e9, torch.log(y) + math.log(2), near)  # where squares may overflow

    return torch.where(x < 0, -of_positive(-x), of_positive(x))


def _atanh(x: Tensor) -> Tensor:
    return 0.5 * torch.log1p(2 * x / (1 - x))


def _softplus(x: Tensor, beta: float = 1, threshold: float = 20) -> Tensor:
    y = x * beta
    return torch.where(y > threshold, x, torch.log1p(torch.exp(y)) / beta)


def _log_sigmoid(x: Tensor) -> Tensor:
    return torch.minimum(x, torch.zeros_like(x)) - torch.log1p(torch.exp(-x.abs()))


def _log_of_sum(a: Tensor, b: Tensor) -> Tensor:
    more = torch.maximum(a, b) + torch.log1p(torch.exp(-(a - b).abs()))
    return torch.where(a == b, (a + b) * 0.5 + math.log(2), more)  # infinities too, whose difference is NaN


def _gelu(x: Tensor, approximate: str = "none") -> Tensor:
    if approximate == "tanh":
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))
    return 0.5 * x * (1 + torch.erf(x * math.sqrt(0.5)))


def _mish(x: Tensor) -> Tensor:
    return x * torch.tanh(_softplus(x))


def _hardtanh(x: Tensor, min_val: float = -1, max_val: float = 1) -> Tensor:
    return torch.where(x <= min_val, min_val, torch.where(x >= max_val, max_val, x))


def _hardsigmoid(x: Tensor) -> Tensor:
    return _hardtanh(x + 3, 0.0, 6.0) / 6


def _elu(x: Tensor, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Tensor:
    return torch.where(x <= 0, torch.expm1(x * input_scale) * (alpha * scale), x * scale)


def _threshold(x: Tensor, threshold: float, value: float) -> Tensor:
    return torch.where(x <= threshold, value, x)


def _logit(x: Tensor, eps: float | None = None) -> Tensor:
    x = x if eps is None else x.clamp(eps, 1 - eps)
    return torch.log(x / (1 - x))


def _lerp(a: Tensor, b: Tensor, weight: Any) -> Tensor:
    """From the nearer end: it is b where the weight is 1."""
    near = weight.abs() < 0.5 if isinstance(weight, Tensor) else abs(weight) < 0.5
    from_a, from_b = a + weight * (b - a), b - (b - a) * (1 - weight)
    if isinstance(near, bool):
        return from_a if near else from_b
    return torch.where(near, from_a, from_b)


def _round(x: Tensor, decimals: int = 0) -> Tensor:
    """To the nearest whole number, to the even one of two: exactly, as x - floor(x) is."""
    if decimals:
        raise NotTraced("aten.round.decimals rounds to decimals")
    if not x.is_floating_point():
        return x.clone()
    down = torch.floor(x)
    rest, odd = (x - down).detach(), down - 2 * torch.floor(down * 0.5)
    return torch.where(rest == 0.5, down + odd, torch.where(rest > 0.5, down + 1, down))


def _trunc(x: Tensor) -> Tensor:
    return torch.where(x < 0, torch.ceil(x), torch.floor(x)) if x.is_floating_point() else x.clone()


def _fmod(a: Tensor, b: Any) -> Tensor:
    """The remainder of a quotient that is rounded to 0: it has the sign of a."""
    b = b.abs() if isinstance(b, Tensor) else abs(b)
    return torch.where(a < 0, -torch.remainder(-a, b), torch.remainder(a, b))


def _isinf(x: Tensor) -> Tensor:
    return x.abs() == math.inf


def _nan_to_num(
    x: Tensor, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> Tensor:
    most = torch.finfo(x.dtype).max
    x = torch.where(x != x, nan or 0.0, x)
    x = torch.where(x == math.inf, most if posinf is None else posinf, x)
    return torch.where(x == -math.inf, -most if neginf is None else neginf, x)


def _shifted(x: Tensor, bits: Any, left: bool) -> Tensor:
    if isinstance(bits, Tensor) or not 0 <= bits < 31:
        raise NotTraced("it shifts bits by a number that depends on the pair")
    return x * 2**bits if left else torch.div(x, 2**bits, rounding_mode="floor")


def _selu(x: Tensor) -> Tensor:
    return _elu(x, 1.6732632423543772848170429916717, 1.0507009873554804934193349852946)


COMPOSED: dict[str, Callable[..., Any]] = {  # by the name of the operation
    "sinh": _sinh,
    "cosh": _cosh,
    "tan": lambda x: torch.sin(x) / torch.cos(x),
    "asinh": _asinh,
    "atanh": _atanh,
    "softplus": _softplus,
    "log_sigmoid_forward": lambda x: (_log_sigmoid(x), x),
    "logaddexp": _log_of_sum,
    "gelu": _gelu,
    "mish": _mish,
    "hardtanh": _hardtanh,
    "relu6": lambda x: _hardtanh(x, 0.0, 6.0),
    "hardsigmoid": _hardsigmoid,
    "hardswish": lambda x: x * _hardsigmoid(x),
    "elu": _elu,
    "selu": _selu,
    "celu": lambda x, alpha=1.0: _elu(x, alpha, 1.0, 1 / alpha),
    "threshold": _threshold,
    "logit": _logit,
    "lerp": _lerp,
    "addcmul": lambda x, a, b, value=1: x + value * (a * b),
    "addcdiv": lambda x, a, b, value=1: x + value * (a / b),
    "round": _round,
    "trunc": _trunc,
    "frac": lambda x: x - _trunc(x),
    "fmod": _fmod,
    "isnan": lambda x: x != x,
    "isinf": _isinf,
    "isfinite": lambda x: x.abs() < math.inf,
    "nan_to_num": _nan_to_num,
    "__lshift__": lambda x, bits: _shifted(x, bits, left=True),
    "__rshift__": lambda x, bits: _shifted(x, bits, left=False),
    "bitwise_left_shift": lambda x, bits: _shifted(x, bits, left=True),
    "bitwise_right_shift": lambda x, bits: _shifted(x, bits, left=False),
}
EXACTLY_COMPOSED = {  # those whose results are torch's to the last bit
    name: COMPOSED[name]
    for name in (
        *(
            "round",
            "trunc",
            "frac",
            "fmod",
            "isnan",
            "isinf",
            "isfinite",
            "nan_to_num",
            "hardtanh",
            "relu6",
            "threshold",
        ),
        *("__lshift__", "__rshift__", "bitwise_left_shift", "bitwise_right_shift"),
    )
}
