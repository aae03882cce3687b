"""torch's attention under torch's own names, on regard: a changed import, and nothing else.

    from regard.compat.torch import MultiheadAttention, flex_attention, scaled_dot_product_attention

Signatures, masks (here True may mean hidden), shapes and state_dict are torch's.
"""

from regard.compat.torch.flex import explain_flex_attention as explain_flex_attention
from regard.compat.torch.flex import flex_attention as flex_attention
from regard.compat.torch.multihead import MultiheadAttention as MultiheadAttention
from regard.compat.torch.sdpa import scaled_dot_product_attention as scaled_dot_product_attention
