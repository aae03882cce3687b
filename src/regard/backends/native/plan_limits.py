"""Which calls a plan can serve: those where everything that varies from call to call is one of its inputs."""

from __future__ import annotations

from regard.backends.base import Example
from regard.backends.native.args import KernelArgs
from regard.backends.native.call_operands import OF_POSITIONS, SCALES
from regard.backends.native.families import KernelFamily
from regard.backends.native.per_call import PerCall
from regard.core.int8_rows import Int8Rows
from regard.core.paged import Paged

_OF_CALLER = frozenset(("q", "k", "v", *(operand.name for operand in SCALES)))
_MOST_KEPT = 1 << 20  # bytes made for a structure (intervals, tile maps) that are worth keeping


def serves_other_calls(family: KernelFamily, args: KernelArgs, example: Example, per_call: PerCall) -> bool:
    """Whether a plan can serve other calls of the example's structure: all that varies is one of its inputs."""
    problem = example.problem
    if family.copied(problem):
        return False
    repeated = [made for made in (per_call.similarity, per_call.modifiers) if made is not None]
    if not all(made.lasts for made in repeated):
        return False
    names, computed = per_call.names(), {n for made in repeated for n in made.tensors}
    given = [t.numbers if isinstance(t, Int8Rows) else t for t in example.given]
    for t, own in zip((args.q, args.k, args.v), given, strict=True):
        # converted, or read several times: then gradients are sums
        if isinstance(t, Paged) and t is not own:
            return False
        if t is not own and (t.data_ptr() != own.data_ptr() or (any(example.needs) and t.numel() != own.numel())):
            return False
    if example.positions is not None and not _follows_positions(example, args, names):
        return False
    scored = len(problem.score_tensors)
    masked = range(scored, scored + len(problem.mask_tensors) if per_call.of_mask else scored)
    read = per_call.leaves.values()
    addresses = [t.data_ptr() for n, t in enumerate(example.leaves) if n not in masked and n not in computed]
    # one tensor in two roles: the next call may have two
    if any(a not in read for a in addresses[example.spent :]) or len(set(addresses)) < len(addresses):
        return False
    learned = family.learned(problem)
    for t, need in zip(example.leaves, example.needs[3:], strict=True):
        if need and t.data_ptr() in read and (learned is None or t.data_ptr() != learned.data_ptr()):
            return False
    apart = _OF_CALLER.union(names)
    kept = [t for name, t in args.tensors().items() if name not in apart and t.data_ptr() not in addresses]
    return sum(t.nbytes for t in kept) <= _MOST_KEPT


def _follows_positions(example: Example, args: KernelArgs, computed: set[str]) -> bool:
    """Whether a plan knows what positions change: intervals of keys, the places that kernels read, what is computed."""
    others = args.operands.keys() - computed
    if not OF_POSITIONS.isdisjoint(others):
        return False
    if "allowed" not in others or not example.problem.mask.compares_positions():
        return True
    return args.operands["allowed"].data_ptr() in {t.data_ptr() for t in example.leaves}  # the caller's own booleans
