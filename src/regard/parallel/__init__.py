"""Attention over several processes and machines, on torch.distributed.

    import regard.parallel

ring_attention        keys and values travel around the ranks
ring_attention_state  the same, as a State
ulysses_attention     each rank computes some of the heads, for all tokens
usp_attention         both, on a mesh
tree_decode           few queries over a cache that is split over the ranks
Shards                which tokens each rank holds; shard and unshard cut and join a tensor
SequenceParallel      what a layer of regard.nn takes as parallel=
PeerError             a rank has ended, is late, has raised an error, or makes another call
"""

from regard.parallel.peers import PeerError as PeerError
from regard.parallel.ring import ring_attention as ring_attention
from regard.parallel.ring import ring_attention_state as ring_attention_state
from regard.parallel.sequence import SequenceParallel as SequenceParallel
from regard.parallel.shards import Shards as Shards
from regard.parallel.shards import shard as shard
from regard.parallel.shards import unshard as unshard
from regard.parallel.tree import tree_decode as tree_decode
from regard.parallel.ulysses import ulysses_attention as ulysses_attention
from regard.parallel.usp import usp_attention as usp_attention
