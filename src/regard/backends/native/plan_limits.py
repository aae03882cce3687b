"""Which calls a plan can serve: those where everything that varies from call to call is one of its inputs."""

from __future__ import annotations

from collections.abc import Iterable

from regard.backends.base import Example
from regard.backends.native.args import KernelArgs
from regard.backends.native.call_operands import HELD, INTERVALS, OF_POSITIONS, SCALES
from regard.backends.native.families import KernelFamily
from regard.backends.native.repeated_mask import RepeatedMask, has_code
from regard.call.problem import Problem
from regard.core.int8_rows import Int8Rows
from regard.core.paged import Paged
from regard.masks.algebra import Mask

_OF_CALLER = frozenset(("q", "k", "v", *(operand.name for operand in SCALES)))
_MOST_KEPT = 1 << 20  # bytes made for a structure (intervals, tile maps) that are worth keeping


def repeats(family: KernelFamily, args: KernelArgs, example: Example) -> bool:
    """Whether a plan can serve other calls of the example's structure: all that varies is one of its inputs."""
    problem = example.problem
    if family.copied(problem) or 0 in (*args.shape, *args.k.shape[-2:], args.v.shape[-1]):
        return False
    repeated = family.repeated(problem)
    if repeated is not None and not repeated.lasts:
        return False
    names, computed = ((), ()) if repeated is None else (repeated.names, repeated.tensors)
    code = has_code(problem.mask)
    if code:
        names = (*names, *RepeatedMask(problem, args, repeated).names)
    given = [t.numbers if isinstance(t, Int8Rows) else t for t in example.given]
    for t, own in zip((args.q, args.k, args.v), given, strict=True):
        # converted, or read several times: then gradients are sums
        if isinstance(t, Paged) and t is not own:
            return False
        if t is not own and (t.data_ptr() != own.data_ptr() or (any(example.needs) and t.numel() != own.numel())):
            return False
    if example.positions is not None and not _follows_positions(problem, args, names):
        return False
    scored = len(problem.score.tensors())
    anew = code or decided_by_tensors(problem.mask, args)
    masked = range(scored, scored + len(problem.mask.tensors()) if anew else scored)
    read = [t.data_ptr() for t in family.leaves(problem, args).values() if t is not None]
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


def decided_by_tensors(mask: Mask, args: KernelArgs) -> bool:
    """Whether the mask is intervals that its tensors decide, call by call: Documents, a Prefix a sequence.

    Not lengths, and starts and stops, that the kernels read where they are: then a plan sets an address.
    """
    if "tiles" in args.operands or not HELD.keys().isdisjoint(args.operands):
        return False
    leaves = ((one, args.operands[one.name]) for one in INTERVALS if one.leaf and one.name in args.operands)
    read = {t.data_ptr() for one, t in leaves if one.strided or t.is_contiguous()}
    return any(t.data_ptr() not in read for t in mask.tensors())


def _follows_positions(problem: Problem, args: KernelArgs, computed: Iterable[str]) -> bool:
    """Whether a plan knows what positions change: intervals of keys, the places that kernels read, what is computed."""
    if not OF_POSITIONS.isdisjoint(args.operands.keys() - set(computed)):
        return False
    return "allowed" not in args.operands.keys() - set(computed) or not problem.mask.compares_positions()
