"""torch.manual_seed, without the 0.6 ms in which it writes a traceback for each kind of GPU, where there is none.

It keeps them for the day that a GPU is first used: three more with every call.
"""

from __future__ import annotations

import torch

seed_torch = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed
