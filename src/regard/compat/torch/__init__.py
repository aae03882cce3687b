"""torch's attention under torch's own names, on regard: a changed import, and nothing else.

    from regard.compat.torch import scaled_dot_product_attention

Signatures, masks and shapes are torch's.
"""

from regard.compat.torch.sdpa import scaled_dot_product_attention as scaled_dot_product_attention
