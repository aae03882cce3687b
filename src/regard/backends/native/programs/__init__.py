"""Modifiers and masks that a person wrote, as programs that the native kernels interpret: trace, then lower."""
