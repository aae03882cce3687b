"""What to write for a mask where something else was passed."""

from __future__ import annotations

from typing import Any

from regard.core.value import Value, written
from regard.masks.causal_bias import is_causal_bias


def way_to_mask(x: Any, name: str = "") -> str | None:
    """What to write where x is passed for a mask; None where nothing is known. name: "mask=", where it is to be named.

    >>> way_to_mask(lambda b, h, i, j: i >= j)
    'write Where(fn), of fn(b, h, i, j) as in FlexAttention'
    """
    if type(x).__name__ == "BlockMask":  # FlexAttention's
        return f"write {name}Where(block_mask.mask_mod), or call regard.compat.torch.flex_attention, which takes it"
    if hasattr(x, "dtype"):
        return _of_array(x, name)
    if isinstance(getattr(type(x), "mask", None), property):  # Packed, caches
        return f"write {name}x.mask, the mask that it has"
    if isinstance(x, type):
        return f"write {name}{written(x)}" if issubclass(x, Value) else None
    if isinstance(x, Value):
        return f"pass it as {x.argument}=" if x.argument not in ("", "mask") else None
    if x is None:
        return "leave it out where every query may see every key, or write Everything()"
    if isinstance(x, str) and x.lower() == "causal":
        return f"write {name}Causal()"
    if isinstance(x, (list, tuple)) and x and all(isinstance(each, Value) and each.argument == "mask" for each in x):
        return f"write {name}{' & '.join(map(repr, x))} for the keys that all of them let through, | for any"
    if isinstance(x, (list, tuple)):
        return f"write {name}Dense(torch.tensor(...)), True = may attend"
    return f"write {name}Where(fn), of fn(b, h, i, j) as in FlexAttention" if callable(x) else None


def _of_array(array: Any, name: str) -> str:
    if is_causal_bias(array):
        return (
            "write mask=Causal(), at positions=head(nq, nk) for causal_upper_left, tail(nq, nk) for causal_lower_right"
        )
    dtype = str(array.dtype).removeprefix("torch.")
    if dtype == "bool":
        return f"write {name}Dense(mask), True = may attend"
    if dtype.startswith(("float", "bfloat")):
        return (
            "write score=ScaledDot() >> Bias(mask) if it is added to the scores, Dense(mask != 0) if 1 means may attend"
        )
    return f"write {name}Dense(mask != 0) if 1 means may attend, Dense(mask == 0) if 1 means masked"
