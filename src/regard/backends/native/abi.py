"""What a native kernel is given: the structs of its calls, member by member, as Python and C++ both have them.

This is the one place where a member is written down; those of operands and numbers follow from their declarations
(call_operands.py). From it come the ctypes structures below and the C header, native/abi/structs.h (see header.py). The
header holds the number `ABI`, made of all members; a shared object that was built from other members is not loaded.
"""

from __future__ import annotations

import hashlib

from regard.backends.native.c_structs import AXES, SATURATED, STRUCTS, TILE, Member, Struct, laid_out, members
from regard.backends.native.call_operands import (
    DIVIDED,
    DROPOUT,
    INTERVALS,
    INVARIANT,
    OPERANDS,
    PAIRS,
    PLACES,
    RAGGED,
    RULE_BOUNDS,
    SCALE,
    SCALES,
    SINK,
)
from regard.backends.native.modifiers.slopes import DIMS
from regard.backends.native.modifiers.table import MODIFIERS
from regard.backends.native.operands import members_of
from regard.backends.native.programs.operations import OPERATIONS, PROGRAM_OPERANDS, SLOTS
from regard.core.shapes import FARTHEST

TOP, SETS = 64, 64  # keys that the fact `top` can keep; groups, bands of distance that one call can ask for
LEAVES = 8  # tensors of a score, a mask and a sink that native/python/ finds
DTYPES = {"REGARD_F32": 0, "REGARD_BF16": 1, "REGARD_F16": 2}  # of calls
# Of operands, besides those of calls.
_OTHERS = "REGARD_F64", "REGARD_I32", "REGARD_I64", "REGARD_BOOL", "REGARD_I8", "REGARD_OTHER"
OPERAND_DTYPES = {name: len(DTYPES) + n for n, name in enumerate(_OTHERS)}
ACTIVATIONS = {"REGARD_TANH": 0, "REGARD_SIGMOID": 1, "REGARD_LEAKY_RELU": 2}
# What a kernel returns. All but the first: nothing was computed.
CODES = {
    "REGARD_DONE": 0,
    "REGARD_NO_MEMORY": 1,
    "REGARD_BAD_ARGUMENT": 2,  # a size, a code, a stride or a null address
    "REGARD_BAD_INTERVAL": 3,  # start or stop, where a query sees any key at all
    "REGARD_BAD_TILE": 4,
    "REGARD_BAD_CELL": 5,
    "REGARD_BAD_GROUP": 6,
    "REGARD_BAD_PAGE": 7,
    "REGARD_BAD_POSITION": 8,  # positions of a sequence do not count up by one
}
BOUNDS = {"REGARD_FIRST": 1, "REGARD_LAST": 2}  # bits


@laid_out
class Operand(Struct):
    c_name = "regard_tensor"
    about = (
        "A tensor (batch..., head, row, column). Strides count elements; axes that are missing or broadcast have 0.\n"
        "// All zero: the call has no such operand. Every entry point compares size and dtype with what it will read."
    )
    members = (
        Member("void*", "data"),
        Member("int64_t", "batch", count=AXES),
        *members("int64_t", "head row col"),
        Member("int64_t", "size", "elements from data to the last that the tensor has, that one included"),
        Member("int64_t", "dtype"),
    )


@laid_out
class OperandPlace(Struct):
    c_name = "regard_place"
    about = "Where a struct holds what it says of one tensor: offsets of its members; -1 for such as it has not."
    members = (
        Member("int64_t", "at", "of the regard_tensor, or of the address"),
        Member("int64_t", "dtype", "of what the address leads to; -1: at is that of a regard_tensor"),
        Member("int64_t", "stride", "of the stride of the first axis"),
        Member("int64_t", "batch", "of the strides of all axes but the last; without, there are no gaps at all"),
    )


# Which keys each query sees as intervals: neighbours, which a plan fills in anew.
INTERVAL_MEMBERS = (
    *members_of(INTERVALS),
    Member("int32_t", "bounds", "REGARD_FIRST where the call has first, REGARD_LAST where it has last"),
    *members_of(RULE_BOUNDS),
)


@laid_out
class CallArguments(Struct):
    c_name, function = "regard_call", "regard_forward"
    about = "One call of attention. A null address: the call has no such operand."
    members = (
        Member("int64_t", "batch", "sizes of the batch axes, 1 where there are fewer", AXES),
        *members("int64_t", "heads key_heads nq nk dk dv"),
        Member("int32_t", "dtype", "of q, k, v and out; k and v are int8 where they have scales"),
        Member("int32_t", "out_dtype", "REGARD_F32 or dtype"),
        Member("int32_t", "threads"),
        *members("regard_tensor", "q k v out"),
        Member(
            *("const int32_t*", "block_table"),
            about="(batch..., n): pages of keys; k and v are (page, head, row, column), batch[3] strides over pages",
        ),
        Member("int64_t", "block_table_batch", count=AXES),
        Member("int64_t", "page_size", "keys of a page"),
        Member("int64_t", "pages", "of the pool"),
        Member("regard_tensor", "lse", "float (batch, head, row)"),
        Member(
            *("regard_tensor", "row_stats"),
            about="float (batch, head, row, 2): m in base 2 and 1 / l; a weight is exp2(s - m) / l; 0 for empty rows",
        ),
        *SCALE.members,
        *(member for modifier in MODIFIERS for member in members_of((*modifier.operands, *modifier.numbers))),
        *INTERVAL_MEMBERS,
        *members_of((*PAIRS, *PLACES, *DROPOUT, INVARIANT, SINK, *SCALES)),
    )


@laid_out
class RaggedArguments(Struct):
    c_name, function = "regard_ragged", "regard_forward_ragged"
    about = (
        "A call on sequences that have any number of queries each, one sequence behind another in q, out and q_at.\n"
        "// The batch of `call` is 1, nq counts all queries; batch[3] of k and v, or of block_table, strides over\n"
        "// sequences. No other operand may have a row for each query or key. A call with bounds has positions:\n"
        "// they count up by one in each sequence, k_at in all alike, and the bounds are those of positions."
    )
    members = (
        Member("regard_call", "call", "nk: the most keys of a sequence; threads: at most"),
        Member("int64_t", "sequences"),
        Member(
            "const int64_t*", "q_offsets", "(sequences + 1): sequence b has queries [q_offsets[b], q_offsets[b + 1])"
        ),
        *(Member("const int64_t*", one.name, f"(sequences): {one.about}") for one in DIVIDED),
        Member("int64_t", "thread_work", "floating-point operations for which it is worth waking another thread"),
    )


@laid_out
class GradientArguments(Struct):
    c_name, function = "regard_gradients", "regard_backward"
    about = "A call of the backward pass. A null address: that gradient is not wanted."
    members = (
        Member("regard_call", "call", "the forward call; out (of out_dtype) and row_stats hold its results"),
        Member("regard_tensor", "dout", "cotangent of out, of any dtype that a call can have"),
        Member("regard_tensor", "dlse", "cotangent of lse, float; data 0 for none"),
        *members("regard_tensor", "dq dk dv", "gradients, of the call's dtype; every element is written"),
        *(member for operand in OPERANDS.values() for member in operand.gradients),
    )


@laid_out
class AdditiveArguments(Struct):
    c_name, function = "regard_additive", "regard_additive_forward"
    about = (
        "A call whose scores are w · f(a + c), or the sum over features of a program of a and c: q and k are a and c,\n"
        "// float whatever its dtype, which is that of v."
    )
    members = (
        Member("regard_call", "call", "it has no scale"),
        Member("const float*", "w", "(heads, dk), contiguous"),
        Member("int64_t", "w_stride", "0 where the heads share it"),
        Member("int32_t", "activation"),
        Member("float", "slope", "of the leaky ReLU"),
        Member("const int32_t*", "code", "(code_count, 6) instructions of a program; null: none. It has no w"),
        Member("int64_t", "code_count"),
        Member("const float*", "parameters", "(parameter_count, heads, dk), contiguous: what a program reads besides"),
        Member("int64_t", "parameter_count"),
    )


@laid_out
class AdditiveGradientArguments(Struct):
    c_name, function = "regard_additive_gradients", "regard_additive_backward"
    about = (
        "The backward pass of an additive call. The cotangents, and the gradients of a, c and v, are float. Between\n"
        "// forward and dw it has what regard_gradients has behind its call, in the same order."
    )
    members = (
        Member("regard_additive", "forward", "out, float, and row_stats as the forward left them"),
        *GradientArguments.members[1:],
        Member("float*", "dw", "(heads, dk); of a program's parameters (parameter_count, heads, dk)"),
    )


@laid_out
class FactArguments(Struct):
    c_name, function = "regard_fact_args", "regard_facts"
    about = (
        "Facts about the weights of a call. Results are contiguous, (batch..., head, ...); a null address, or a count\n"
        "// of 0: not wanted. The call's lse, out and dropout are not read; its dv is 0."
    )
    members = (
        Member("regard_call", "call"),
        Member("float*", "lse", "(.., nq) natural logarithm, the sink included"),
        Member("float*", "max_score", "(.., nq) natural, without the sink; NaN where a score is"),
        Member("int64_t*", "max_key", "(.., nq) the first key that has it, -1 for none; wanted with max_score"),
        Member("float*", "entropy", "(.., nq) in nats"),
        Member("float*", "concentration", "(.., nq) sum of the squared weights"),
        Member("int64_t*", "visible", "(.., nq) keys whose score is not -inf"),
        Member("int64_t*", "readers", "(.., nk) queries that see a key"),
        Member("int64_t", "top", "how many of the heaviest keys, at most REGARD_TOP"),
        Member("float*", "top_weights", "(.., nq, top), heaviest first"),
        Member("int64_t*", "top_keys", "(.., nq, top), -1 where fewer keys are seen"),
        Member("float*", "top_rest", "(.., nq) the mass of all other keys"),
        Member("float*", "received", "(.., nk) sum over queries of weight times share"),
        Member("const float*", "shares", "(.., nq) share of each query; null: 1"),
        Member("float*", "most", "(.., nk) the largest weight on a key"),
        Member("float*", "map", "(.., map_rows, map_cols) mean mass on a cell's keys, over queries that see a key"),
        *members("int64_t", "map_rows map_cols"),
        Member("int64_t", "groups", "of keys, at most REGARD_SETS"),
        Member("const int32_t*", "group", "(batch.., nk), the group of each key, below 0 for none"),
        Member("float*", "mass", "(.., nq, groups)"),
        *members("const int64_t*", "q_at k_at", "(batch.., n) positions, less than 2^31 apart, for what follows"),
        Member("float*", "distance", "(.., nq) mean of |position of query - position of key|"),
        Member("int64_t", "bands", "ranges of that difference, at most REGARD_SETS"),
        Member("const int32_t*", "band", "(bands, 2) the least and the greatest of each"),
        Member("float*", "within", "(.., nq, bands) the mass there"),
        Member("int64_t", "levels", "of weights"),
        Member("const float*", "level", "(levels,)"),
        Member("int64_t*", "reached", "(.., levels) how many visible pairs have a weight of at least that"),
    )


@laid_out
class PageWrite(Struct):
    c_name, function = "regard_page_write", "regard_write_pages"
    about = (
        "New keys and values of a batch of sequences, to be copied to their pages, whose columns are neighbours.\n"
        "// batch[3] is the stride from sequence to sequence, or from page to page."
    )
    members = (
        *members("int64_t", "batch heads n dk dv"),
        Member("int64_t", "element", "bytes of a number: 1, 2, 4 or 8"),
        *members("regard_tensor", "k v", "(batch, head, row, column)"),
        *members("regard_tensor", "k_pages v_pages", "(page, head, row, column)"),
        *members("int64_t", "page_size pages"),
        Member("const int32_t*", "block_table", "(batch, room)"),
        Member("int64_t", "room"),
        Member("const int64_t*", "lengths", "(batch): rows of each sequence so far"),
        Member(
            *("const int64_t*", "offsets"),
            about="(batch + 1), or null: k and v have n rows in all, and sequence b gets [offsets[b], offsets[b + 1])",
        ),
    )


# The caller's tensors that a call leads to, of plans.
LEAF_MEMBERS = (
    Member("int32_t", "leaves", "tensors of score, mask and sink that are read where they lie"),
    Member("int64_t", "leaf", "which of all such tensors, depth first", LEAVES),
    Member("int64_t", "leaf_at", "where the call has its address", LEAVES),
)


@laid_out
class PlanArguments(Struct):
    c_name = "regard_plan"
    about = "What native/python/ makes the calls of one structure from: see plan.py."
    members = (
        Member("const regard_call*", "call", "what is the same for all of them"),
        *members("void*", "entry parallel"),
        Member("int64_t", "axes", "of q, k, v and out, heads included"),
        Member("int64_t", "lead", "sizes of out's axes before that of the queries, as the caller has them", AXES + 1),
        Member("int64_t", "leads", "how many"),
        Member("int64_t", "dv"),
        Member("int64_t", "pair_work", "floating-point operations of a query and a key, over the batch and all heads"),
        Member("int64_t", "thread_work", "of those, for which it is worth waking another thread"),
        *members("int64_t", "before after", "with bounded: -after <= position of query - position of key <= before"),
        Member("int32_t", "bounded"),
        Member("int32_t", "positional", "whether anything compares positions"),
        Member("int32_t", "float_out", "out is float, whatever v is"),
        Member("int64_t", "queries", "how many there must be, where a tensor has a number for each; 0: any number"),
        *LEAF_MEMBERS,
    )


@laid_out
class BackwardPlanArguments(Struct):
    c_name = "regard_backward_plan"
    about = "What native/python/ makes the backward calls of one structure from, where q, k and v alone have gradients."
    members = (
        Member("const regard_gradients*", "gradients", "what is the same for all of them, but for the forward call"),
        *members("void*", "entry parallel"),
        Member("int64_t", "axes", "of q, k, v and out, heads included"),
        Member("int32_t", "needs", "whether q, k and v have gradients", 3),
        *LEAF_MEMBERS,
    )


# Sizes that both sides know, and all that C++ has as an enum.
SIZES = {
    "REGARD_BATCH_AXES": AXES,
    "REGARD_DIMS": DIMS,
    "REGARD_TOP": TOP,
    "REGARD_SETS": SETS,
    "REGARD_LEAVES": LEAVES,
    "REGARD_SLOTS": SLOTS,
    "REGARD_PROGRAM_OPERANDS": PROGRAM_OPERANDS,
}
# Other numbers that both sides know, with their types in C++.
CONSTANTS = {
    "REGARD_TILE": ("int64_t", TILE),
    "REGARD_FARTHEST": ("int64_t", FARTHEST),
    "REGARD_SATURATED": ("float", SATURATED),
}
_OPERATIONS = {f"REGARD_DO_{name}": n for n, name in enumerate((*OPERATIONS, "COUNT"))}  # of programs


ENTRIES = tuple(struct.function for struct in STRUCTS.values() if struct.function)
ENUMS = (DTYPES | OPERAND_DTYPES, ACTIVATIONS, CODES, BOUNDS, _OPERATIONS)


def _abi() -> int:
    """A number that changes with any name, type or order of a member, not with what is said about it."""
    layout = [(name, [(m.type, m.name, m.count) for m in struct.members]) for name, struct in STRUCTS.items()]
    constants = *ENUMS, SIZES, CONSTANTS
    return int.from_bytes(hashlib.sha256(repr((layout, *constants, sorted(RAGGED))).encode()).digest()[:7], "big")


ABI = _abi()
