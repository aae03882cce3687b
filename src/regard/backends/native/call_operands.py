"""All operands and numbers of a call: of its mask, dropout and sink here, of its score's modifiers in modifiers/."""

from __future__ import annotations

import torch

from regard.backends.native.modifiers.table import MODIFIERS
from regard.backends.native.operands import (
    BATCH,
    BLOCK_OF_KEYS,
    BLOCK_OF_QUERIES,
    EACH_KEY,
    EACH_KEY_HEAD,
    EACH_QUERY,
    HEAD,
    INSTRUCTION,
    KEY,
    ONE,
    QUERY,
    WORD,
    Axis,
    Count,
    HeldMask,
    KernelNumber,
    KernelOperand,
)
from regard.masks.dense import Dense
from regard.masks.retained import Retained

_KEY_OF_A_BLOCK = Axis("key of a block", lambda s: s.block[1], shared=False)
_NUMBER = Axis("which", lambda s: None, shared=False)
_GROUP_OF_HEADS = Axis("group of heads", lambda s: None, shared=False)
_BOUND = "each query sees keys [start, stop); or a rule (documents: also both):"


def _numbers_of(
    name: str, axis: Axis, about: str, rule: str = "", leaf: bool = False, divided: bool = False, summary: str = ""
) -> KernelOperand:
    """An operand of the rule for intervals: int64 (*batch, n)."""
    return KernelOperand(
        name, torch.int64, (BATCH, axis), about, leaf=leaf, rule=rule, divided=divided, summary=summary
    )


DOCUMENTS = (
    _numbers_of("q_documents", EACH_QUERY, "seen are the keys of the query's number", "q_ids", summary="q_ranges"),
    _numbers_of("k_documents", EACH_KEY, "seen are the keys of the query's number", "k_ids", summary="k_ranges"),
)
# The keys that each query sees: a rule whose numbers are the same for all queries or follow from the mask's tensors.
INTERVALS = (
    KernelOperand("start", torch.int32, (BATCH, HEAD, QUERY, ONE), _BOUND, strided=True, leaf=True),
    KernelOperand("stop", torch.int32, (BATCH, HEAD, QUERY, ONE), _BOUND, strided=True, leaf=True),
    _numbers_of("shifts", ONE, "added to first and last"),
    _numbers_of("key_counts", ONE, "only so many keys are seen", "keys", leaf=True, divided=True),
    _numbers_of("key_starts", ONE, "no key before this one is seen", "first", leaf=True, divided=True),
    _numbers_of("query_counts", ONE, "only so many queries see any", "queries", leaf=True),
    *DOCUMENTS,
)
RULE_BOUNDS = (
    KernelNumber("first", "int64_t", "SymInt?", None, "query i sees no key before first + i", as_it_is=False),
    KernelNumber("last", "int64_t", "SymInt?", None, "query i sees no key from last + i on", as_it_is=False),
)
PAIRS = (
    KernelOperand(
        *("allowed", torch.bool, (BATCH, HEAD, QUERY, KEY), "whether a pair is seen"),
        strided=True,
        leaf=True,
        of_lengths=True,
        ragged=True,
        mask=HeldMask(Dense, lambda mask, frame: frame.lift(mask.allowed), "booleans"),
    ),
    KernelOperand(
        *("until", torch.int64, (BATCH, _GROUP_OF_HEADS, ONE, EACH_KEY), "a key is seen from positions below this one"),
        strided=True,
        leaf=True,
        of_lengths=True,
        ragged=True,
        placed=True,
        mask=HeldMask(Retained, Retained.of_pairs, "a number for each key, compared with positions"),
        count=Count("until_heads", lambda t: t.shape[-3]),
        summary="until_bounds",
    ),
    KernelOperand(
        *("tiles", torch.int32, (BATCH, HEAD, BLOCK_OF_QUERIES, BLOCK_OF_KEYS)),
        "-1: no pair is seen, -2: all are, else which of the bits",
        strided=True,
        of_lengths=True,
        ragged=True,
        of_positions=True,
    ),
    KernelOperand(
        *("bits", torch.int64, (_NUMBER, _KEY_OF_A_BLOCK), "bit r of word j is row r of a block, key j of it"),
        of_lengths=True,
        ragged=True,
        of_positions=True,
        count=Count("bits_count", len),
    ),
    KernelOperand(
        *("mask_code", torch.int32, (INSTRUCTION, WORD), "a program that says whether a pair is seen"),
        of_lengths=True,
        ragged=True,
        of_positions=True,
        count=Count("mask_count", len),
    ),
)
PLACES = (
    KernelOperand("q_at", torch.int64, (BATCH, EACH_QUERY), "positions, where something compares them", ragged=True),
    KernelOperand("k_at", torch.int64, (BATCH, EACH_KEY), "positions, where something compares them", ragged=True),
)
DROPOUT = (
    KernelNumber("seed", "uint64_t", "SymInt", 0, "", as_it_is=False),
    KernelNumber("threshold", "uint32_t", "int", 0, "a weight is dropped if its 24 random bits are below; 0: none is"),
    KernelNumber("keep", "float", "float", 1.0, "multiplies the weights that are not dropped"),
)
SINK = KernelOperand(
    *("sink", torch.float32, (BATCH, HEAD, ONE, ONE), "a logit, natural, that joins the sum and has no value"),
    strided=True,
    leaf=True,
    ragged=True,
)
_ROW_SCALE = (BATCH, EACH_KEY_HEAD, EACH_KEY, ONE)
# Both or neither. In pages they lie as k and v do.
SCALES = tuple(
    KernelOperand(
        *(f"{name}_scales", torch.float32, _ROW_SCALE, f"{name} is int8; its rows are multiplied by these"),
        strided=True,
        ragged=True,
    )
    for name in "kv"
)
SCALE = KernelNumber("scale", "float", "float", 1.0, "of the dot product")
INVARIANT = KernelNumber("invariant", "int32_t", "bool", False, "whether a row's bits do not depend on the other rows")

OPERANDS: dict[str, KernelOperand] = {
    operand.name: operand
    for operand in (*(own for m in MODIFIERS for own in m.operands), *INTERVALS, *PAIRS, *PLACES, SINK, *SCALES)
}
NUMBERS: dict[str, KernelNumber] = {
    number.name: number
    for number in (SCALE, *(own for m in MODIFIERS for own in m.numbers), *RULE_BOUNDS, *DROPOUT, INVARIANT)
}
LEAVES = tuple(name for name, operand in OPERANDS.items() if operand.leaf)
INTERVAL_NAMES = frozenset(one.name for one in (*INTERVALS, *RULE_BOUNDS))
OF_MASK = tuple(one.name for one in (*INTERVALS, *RULE_BOUNDS, *PAIRS))
HELD = {operand.name: operand.mask for operand in OPERANDS.values() if operand.mask is not None}
PLACED = frozenset(name for name, operand in OPERANDS.items() if operand.placed)
DIVIDED = tuple(operand for operand in OPERANDS.values() if operand.divided)
OF_LENGTHS = frozenset(name for name, operand in OPERANDS.items() if operand.of_lengths)
OF_POSITIONS = frozenset(name for name, operand in OPERANDS.items() if operand.of_positions)
RAGGED = frozenset(name for name, operand in OPERANDS.items() if operand.ragged)
