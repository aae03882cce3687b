"""The modifiers of the native kernels, a file each: the counterpart of native/steps/."""
