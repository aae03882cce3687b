"""DispatchMode: what sees every operation of torch while it is open."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):
    """A TorchDispatchMode whose first operation does not import torch's compiler, which takes a second or more.

    torch would import it to leave the method __torch_dispatch__ out of what is compiled; no mode of regard's is open
    where something is compiled.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
