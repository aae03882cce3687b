"""Sources: keys and values that come in parts, for `attention_over`. They may be larger than memory.

Chunks takes tensors, arrays or an iterator of them; Arrays two arrays or .npy files; Safetensors the tensors of such a
file. One of your own is a subclass of Source.

>>> import regard as rg, torch
>>> q, k, v = torch.randn(2, 8), torch.randn(5, 8), torch.randn(5, 3)
>>> out = rg.attention_over(q, rg.sources.Chunks([(k[:3], v[:3]), (k[3:], v[3:])]))
>>> torch.allclose(out, rg.attention(q, k, v), atol=1e-6)
True
"""

from typing import TYPE_CHECKING

from regard.core.wrong_calls import no_name as _no_name
from regard.core.wrong_calls import public_names as _public_names
from regard.sources.arrays import Arrays as Arrays
from regard.sources.chunks import Chunks as Chunks
from regard.sources.safetensors import Safetensors as Safetensors
from regard.sources.source import Part as Part
from regard.sources.source import Source as Source

_ARRAYS = "it is regard.sources.Arrays(k, v), of arrays or of files that numpy.save wrote"
_NAMES = dict.fromkeys(("Memmap", "MemoryMapped", "Mmap", "Numpy", "Npy", "File", "Files"), _ARRAYS)

if not TYPE_CHECKING:  # which would take every name for one of this module

    def __dir__() -> list[str]:
        """The public names: what completion shows."""
        return _public_names(globals())

    def __getattr__(name: str) -> object:
        """AttributeError, with the names that are near."""
        raise _no_name(__name__, name, _public_names(globals()), _NAMES)
