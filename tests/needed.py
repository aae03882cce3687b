"""What a test needs that may not be there, as marks that say why it is skipped."""

from __future__ import annotations

import pytest

from regard.backends.native.direct import shortcut
from regard.backends.native.ffi import runnable, why_not_built

needs_kernels = pytest.mark.skipif(
    not runnable(), reason="" if runnable() else f"needs the native kernels: {why_not_built()}"
)

needs_shortcut = pytest.mark.skipif(
    bool(runnable()) and shortcut() is None,
    reason="without the interpreter's lock Python looks at each call",
)
