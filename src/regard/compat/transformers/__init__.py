"""transformers' models on regard: attn_implementation="regard".

    import regard.compat.transformers
    model = AutoModel.from_pretrained(..., attn_implementation="regard")

Importing this package registers the name, with transformers' AttentionInterface and, so that padding and windows
arrive, with its AttentionMaskInterface. Models that do not ask the interface are not reached: a warning says so.
"""

from transformers import AttentionInterface, AttentionMaskInterface

from regard.compat.transformers.interface import RECENT
from regard.compat.transformers.interface import attention_forward as attention_forward
from regard.compat.transformers.mask_interface import lazy_mask
from regard.compat.transformers.models import NAME, install
from regard.compat.transformers.packing import packed as packed
from regard.compat.transformers.relative_bias import take_modules_of
from regard.compat.transformers.sharding import sharded as sharded

AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, lazy_mask)
install(take_modules_of)
if RECENT:
    from regard.compat.transformers.batching import BatchingConfig as BatchingConfig
    from regard.compat.transformers.batching import install as install_batching
    from regard.compat.transformers.cache import FixedCache as FixedCache
    from regard.compat.transformers.cache import GrowingCache as GrowingCache
    from regard.compat.transformers.cache import PagedCache as PagedCache
    from regard.compat.transformers.continuous import install as install_continuous

    install_batching()
    install_continuous()
