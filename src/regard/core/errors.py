"""The two errors of regard's own; everything else is Python's TypeError and ValueError."""


class ShapeError(ValueError):
    """Tensors, masks or positions of one call do not fit together.

    The message names the argument, the expected shape, the actual shape, and the way out.

    >>> import torch, regard as rg
    >>> q, k = torch.zeros(4, 8), torch.zeros(9, 8)
    >>> rg.attention(q, k, k, mask=rg.Causal())
    Traceback (most recent call last):
    ...
    regard.core.errors.ShapeError: 4 queries meet 9 keys under Causal(), and their positions are not given. Pass
      positions=tail(4, 9) if the queries are the last 4 tokens (decoding), or positions=head(4, 9) if they are the
      first.
    """


class Unsupported(NotImplementedError):
    """The named backend, or every backend, cannot run this call exactly; the message says which can.

    >>> import torch, regard as rg
    >>> q = torch.zeros(2, 3, 5, 8)
    >>> rg.attention(q, q, q, backend=rg.Sdpa())
    Traceback (most recent call last):
    ...
    regard.core.errors.Unsupported: backend Sdpa() cannot run this call: it serves cuda tensors; these are on cpu.
      Native(), Tiled(), Reference() can; leave backend=None to choose. explain(...) shows the rest.
    """
