"""What a test needs that may not be there, as marks that say why it is skipped."""

from __future__ import annotations

import pytest

from regard.backends.native.ffi import runnable, why_not_built
from regard.core.torch_features import EXCHANGE, Feature

needs_kernels = pytest.mark.skipif(
    not runnable(), reason="" if runnable() else f"needs the native kernels: {why_not_built()}"
)


def needs_torch(feature: Feature) -> pytest.MarkDecorator:
    """Skips a test where the installed torch lacks a feature."""
    return pytest.mark.skipif(not feature.there, reason=f"needs torch {feature.since}: {feature.name}")


needs_plans = [needs_kernels, needs_torch(EXCHANGE)]
