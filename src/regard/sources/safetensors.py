"""Safetensors: keys and values in tensors of such a file."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any

from torch import Tensor

from regard.core.errors import ShapeError
from regard.sources.source import Part, Source, cut, keys_of_a_part


@dataclass(frozen=True, eq=False)
class Safetensors(Source):
    """Tensors of a safetensors file: k (*batch, hk, n, dk) and v (*batch, hk, n, dv), read in slices of keys.

    k, v   the name of a tensor each, or lists of as many names: their keys follow one another
    size   how many keys a part has at most; None: as many as take 32 MB, with their values
    start  the position of the first key

    The file is opened for each part and closed behind it, so its pages do not stay in memory. Needs safetensors
    (`pip install 'regard[hf]'`). Raises KeyError for a name that the file does not have, ShapeError for tensors that do
    not belong together.

    >>> import tempfile
    >>> from safetensors.torch import save_file
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_file({"k": torch.zeros(2, 9, 4), "v": torch.zeros(2, 9, 3)}, f"{folder}/kv.safetensors")
    ...     source = Safetensors(f"{folder}/kv.safetensors", size=4)
    ...     [part.read()[1].shape for part in source.parts()]
    [torch.Size([2, 4, 3]), torch.Size([2, 4, 3]), torch.Size([2, 1, 3])]
    """

    file: str | PathLike[str]
    k: str | Sequence[str] = "k"
    v: str | Sequence[str] = "v"
    size: int | None = None
    start: int = 0

    def __post_init__(self) -> None:
        k, v = ([x] if isinstance(x, str) else list(x) for x in (self.k, self.v))
        if len(k) != len(v) or not k:
            raise ValueError(f"Safetensors names {len(k)} tensors of keys and {len(v)} of values; expected as many.")
        counts: list[int] = []
        widest = 0
        with _opened(self.file) as held:
            known = set(held.keys())
            for pair in zip(k, v, strict=True):
                missing = next((name for name in pair if name not in known), None)
                if missing is not None:
                    raise KeyError(f"{fspath(self.file)} has no tensor {missing!r}; it has {_some(sorted(known))}.")
                shapes = [tuple(held.get_slice(name).get_shape()) for name in pair]
                if any(len(shape) < 2 for shape in shapes) or shapes[0][-2] != shapes[1][-2]:
                    raise ShapeError(
                        f"{pair[0]!r} has shape {shapes[0]}, {pair[1]!r} {shapes[1]}; expected (*batch, hk, n, dk) and "
                        "(*batch, hk, n, dv), as many values as keys."
                    )
                counts.append(shapes[0][-2])
                one = [held.get_slice(name)[..., :1, :] for name in pair]
                widest = max(widest, sum(t.numel() * t.element_size() for t in one))
        step = keys_of_a_part(self.size, widest, "Safetensors")
        made = (("keys", sum(counts)), ("first_position", self.start), ("_step", step))
        for name, value in (*made, ("_tensors", tuple(zip(k, v, counts, strict=True)))):
            object.__setattr__(self, name, value)

    def parts(self) -> Generator[Part, None, None]:
        first, step = 0, self.__dict__["_step"]
        for k, v, count in self.__dict__["_tensors"]:
            yield from cut(count, step, first, self.start, lambda keys, k=k, v=v: self._read(k, v, keys))
            first += count

    def _read(self, k: str, v: str, keys: slice) -> tuple[Tensor, Tensor]:
        slices: list[Tensor] = []
        for name in (k, v):  # opened for each: what is mapped of the file goes when it is closed
            with _opened(self.file) as held:
                slices.append(held.get_slice(name)[..., keys, :])
        return slices[0], slices[1]

    def __repr__(self) -> str:
        return f"Safetensors({fspath(self.file)!r})"


def _opened(file: str | PathLike[str]) -> Any:
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise ImportError("Safetensors needs safetensors: pip install 'regard[hf]'.") from error
    return safe_open(fspath(file), framework="pt")


def _some(names: list[str]) -> str:
    return ", ".join(map(repr, names[:8])) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
