// Written by src/regard/backends/native/header.py, which tells how to write it again. Do not edit.
#pragma once
#include <stdint.h>

#define REGARD_ABI 0x68ecb507b9bd88  // what regard_abi() of a shared object answers, for Python to compare

extern "C" {

enum {
  REGARD_F32 = 0,
  REGARD_BF16 = 1,
  REGARD_F16 = 2,
  REGARD_F64 = 3,
  REGARD_I32 = 4,
  REGARD_I64 = 5,
  REGARD_BOOL = 6,
  REGARD_I8 = 7,
  REGARD_OTHER = 8,
};

enum {
  REGARD_TANH = 0,
  REGARD_SIGMOID = 1,
  REGARD_LEAKY_RELU = 2,
};

enum {
  REGARD_DONE = 0,
  REGARD_NO_MEMORY = 1,
  REGARD_BAD_ARGUMENT = 2,
  REGARD_BAD_INTERVAL = 3,
  REGARD_BAD_TILE = 4,
  REGARD_BAD_CELL = 5,
  REGARD_BAD_GROUP = 6,
  REGARD_BAD_PAGE = 7,
  REGARD_BAD_POSITION = 8,
};

enum {
  REGARD_FIRST = 1,
  REGARD_LAST = 2,
};

enum {
  REGARD_DO_NUMBER = 0,
  REGARD_DO_LOAD = 1,
  REGARD_DO_GATHER = 2,
  REGARD_DO_RESULT = 3,
  REGARD_DO_LOAD_GRADIENT = 4,
  REGARD_DO_GATHER_GRADIENT = 5,
  REGARD_DO_DERIVATIVE = 6,
  REGARD_DO_WHERE = 7,
  REGARD_DO_ADD = 8,
  REGARD_DO_SUB = 9,
  REGARD_DO_MUL = 10,
  REGARD_DO_DIV = 11,
  REGARD_DO_MUL_NONZERO = 12,
  REGARD_DO_DIV_NONZERO = 13,
  REGARD_DO_MIN = 14,
  REGARD_DO_MAX = 15,
  REGARD_DO_POW = 16,
  REGARD_DO_REMAINDER = 17,
  REGARD_DO_NEG = 18,
  REGARD_DO_ABS = 19,
  REGARD_DO_ABS_SUB = 20,
  REGARD_DO_SIGN = 21,
  REGARD_DO_FLOOR = 22,
  REGARD_DO_CEIL = 23,
  REGARD_DO_SQRT = 24,
  REGARD_DO_EXP = 25,
  REGARD_DO_EXP2 = 26,
  REGARD_DO_LOG = 27,
  REGARD_DO_TANH = 28,
  REGARD_DO_SIGMOID = 29,
  REGARD_DO_LOG1P = 30,
  REGARD_DO_EXPM1 = 31,
  REGARD_DO_ERF = 32,
  REGARD_DO_SIN = 33,
  REGARD_DO_COS = 34,
  REGARD_DO_LT = 35,
  REGARD_DO_LE = 36,
  REGARD_DO_EQ = 37,
  REGARD_DO_INT_ADD = 38,
  REGARD_DO_INT_SUB = 39,
  REGARD_DO_INT_MUL = 40,
  REGARD_DO_INT_MIN = 41,
  REGARD_DO_INT_MAX = 42,
  REGARD_DO_INT_DIV = 43,
  REGARD_DO_INT_ABS = 44,
  REGARD_DO_INT_LT = 45,
  REGARD_DO_INT_LE = 46,
  REGARD_DO_INT_EQ = 47,
  REGARD_DO_AND = 48,
  REGARD_DO_OR = 49,
  REGARD_DO_XOR = 50,
  REGARD_DO_NOT = 51,
  REGARD_DO_INT_TO_FLOAT = 52,
  REGARD_DO_BOOL_TO_FLOAT = 53,
  REGARD_DO_BOOL_TO_INT = 54,
  REGARD_DO_COUNT = 55,
};

enum {
  REGARD_BATCH_AXES = 4,
  REGARD_DIMS = 4,
  REGARD_TOP = 64,
  REGARD_SETS = 64,
  REGARD_LEAVES = 8,
  REGARD_SLOTS = 48,
  REGARD_PROGRAM_OPERANDS = 12,
};

constexpr int64_t REGARD_TILE = 128;
constexpr int64_t REGARD_FARTHEST = 4611686018427387904;
constexpr float REGARD_SATURATED = 3.4027e+38;

// A tensor (batch..., head, row, column). Strides count elements; axes that are missing or broadcast have 0.
// All zero: the call has no such operand. Every entry point compares size and dtype with what it will read.
typedef struct {
  void* data;
  int64_t batch[4];
  int64_t head;
  int64_t row;
  int64_t col;
  int64_t size;  // elements from data to the last that the tensor has, that one included
  int64_t dtype;
} regard_tensor;
static_assert(sizeof(regard_tensor) == 80, "ctypes lays regard_tensor out in another way");

// Where a struct holds what it says of one tensor: offsets of its members; -1 for such as it has not.
typedef struct {
  int64_t at;  // of the regard_tensor, or of the address
  int64_t dtype;  // of what the address leads to; -1: at is that of a regard_tensor
  int64_t stride;  // of the stride of the first axis
  int64_t batch;  // of the strides of all axes but the last; without, there are no gaps at all
} regard_place;
static_assert(sizeof(regard_place) == 32, "ctypes lays regard_place out in another way");

// One call of attention. A null address: the call has no such operand.
typedef struct {
  int64_t batch[4];  // sizes of the batch axes, 1 where there are fewer
  int64_t heads;
  int64_t key_heads;
  int64_t nq;
  int64_t nk;
  int64_t dk;
  int64_t dv;
  int32_t dtype;  // of q, k, v and out; k and v are int8 where they have scales
  int32_t out_dtype;  // REGARD_F32 or dtype
  int32_t threads;
  regard_tensor q;
  regard_tensor k;
  regard_tensor v;
  regard_tensor out;
  const int32_t* block_table;  // (batch..., n): pages of keys; k and v are (page, head, row, column), batch[3] strides over pages
  int64_t block_table_batch[4];
  int64_t page_size;  // keys of a page
  int64_t pages;  // of the pool
  regard_tensor lse;  // float (batch, head, row)
  regard_tensor row_stats;  // float (batch, head, row, 2): m in base 2 and 1 / l; a weight is exp2(s - m) / l; 0 for empty rows
  float scale;  // of the dot product
  const float* caps;  // float32 (head): a cap for each head; then the number `cap` says only that there are some
  int64_t caps_stride;  // from head to head; 0 where they share it
  float cap;  // soft cap, 0 for none
  int32_t cap_last;  // whether it comes after the other modifiers, not before
  const float* temperatures;  // float32 (head): what scores are divided by
  int64_t temperatures_stride;  // from head to head; 0 where they share it
  float clamp_low;  // natural; no score is below it, if it is below clamp_high
  float clamp_high;  // natural; no score is above it, if it is above clamp_low
  const float* slopes;  // float32 (head): what a step of distance costs
  int64_t slopes_stride;  // from head to head; 0 where they share it
  const float* points_of_q;  // float32 (coordinate, query): coordinates of points, whose distance the slopes multiply; dims: at most REGARD_DIMS
  int64_t dims;
  const float* points_of_k;  // float32 (coordinate, key): coordinates of points, whose distance the slopes multiply
  const float* log_distance_weights;  // float32 (head): of ln(1 + rate · distance), which is subtracted
  int64_t log_distance_weights_stride;  // from head to head; 0 where they share it
  const float* log_distance_rates;  // float32 (head): of the distance
  int64_t log_distance_rates_stride;  // from head to head; 0 where they share it
  const float* power_distance_weights;  // float32 (head): of distance^power, which is subtracted
  int64_t power_distance_weights_stride;  // from head to head; 0 where they share it
  const float* power_distance_powers;  // float32 (head): to which distances are raised; 0 stays 0
  int64_t power_distance_powers_stride;  // from head to head; 0 where they share it
  const float* offsets;  // float32 (head, difference of cells, and room): what is added for a difference of cells
  int64_t offsets_stride;  // from head to head; 0 where they share it
  int64_t offsets_count;
  const int32_t* q_cell;  // int32 (batch, query): added is offsets[q_cell[i] - k_cell[j]]; without cells those of query i and key j are i + nk - 1 and j
  int64_t q_cell_batch[4];
  const int32_t* k_cell;  // int32 (batch, key): added is offsets[q_cell[i] - k_cell[j]]; without cells those of query i and key j are i + nk - 1 and j
  int64_t k_cell_batch[4];
  regard_tensor bias;  // (batch, head, query, key): added to the scores
  const int32_t* program_code;  // int32 (instruction, number): a program that modifies scores
  int64_t program_count;
  regard_tensor program_0;  // (...): what programs read: (batch, head, query, key), or a table
  regard_tensor program_1;  // (...): what programs read: (batch, head, query, key), or a table
  regard_tensor program_2;  // (...): what programs read: (batch, head, query, key), or a table
  regard_tensor program_3;  // (...): what programs read: (batch, head, query, key), or a table
  regard_tensor program_4;  // (...): what programs read: (batch, head, query, key), or a table
  regard_tensor program_5;  // (...): what programs read: (batch, head, query, key), or a table
  regard_tensor program_6;  // (...): what programs read: (batch, head, query, key), or a table
  regard_tensor program_7;  // (...): what programs read: (batch, head, query, key), or a table
  regard_tensor program_8;  // (...): what programs read: (batch, head, query, key), or a table
  regard_tensor program_9;  // (...): what programs read: (batch, head, query, key), or a table
  regard_tensor program_10;  // (...): what programs read: (batch, head, query, key), or a table
  regard_tensor program_11;  // (...): what programs read: (batch, head, query, key), or a table
  regard_tensor start;  // int32 (batch, head, query, 1): each query sees keys [start, stop); or a rule (documents: also both):
  regard_tensor stop;  // int32 (batch, head, query, 1): each query sees keys [start, stop); or a rule (documents: also both):
  const int64_t* shifts;  // int64 (batch, 1): added to first and last
  int64_t shifts_batch[4];
  const int64_t* key_counts;  // int64 (batch, 1): only so many keys are seen
  int64_t key_counts_batch[4];
  const int64_t* key_starts;  // int64 (batch, 1): no key before this one is seen
  int64_t key_starts_batch[4];
  const int64_t* query_counts;  // int64 (batch, 1): only so many queries see any
  int64_t query_counts_batch[4];
  const int64_t* q_documents;  // int64 (batch, query): seen are the keys of the query's number
  int64_t q_documents_batch[4];
  regard_tensor q_ranges;  // a summary of q_documents, which the kernels make
  const int64_t* k_documents;  // int64 (batch, key): seen are the keys of the query's number
  int64_t k_documents_batch[4];
  regard_tensor k_ranges;  // a summary of k_documents, which the kernels make
  int32_t bounds;  // REGARD_FIRST where the call has first, REGARD_LAST where it has last
  int64_t first;  // query i sees no key before first + i
  int64_t last;  // query i sees no key from last + i on
  regard_tensor allowed;  // bool (batch, head, query, key): whether a pair is seen
  regard_tensor until;  // int64 (batch, group of heads, 1, key): a key is seen from positions below this one
  int64_t until_heads;
  regard_tensor until_bounds;  // a summary of until, which the kernels make
  regard_tensor tiles;  // int32 (batch, head, block of queries, block of keys): -1: no pair is seen, -2: all are, else which of the bits
  const int64_t* bits;  // int64 (which, key of a block): bit r of word j is row r of a block, key j of it
  int64_t bits_count;
  const int32_t* mask_code;  // int32 (instruction, number): a program that says whether a pair is seen
  int64_t mask_count;
  const int64_t* q_at;  // int64 (batch, query): positions, where something compares them
  int64_t q_at_batch[4];
  const int64_t* k_at;  // int64 (batch, key): positions, where something compares them
  int64_t k_at_batch[4];
  uint64_t seed;
  uint32_t threshold;  // a weight is dropped if its 24 random bits are below; 0: none is
  float keep;  // multiplies the weights that are not dropped
  int32_t invariant;  // whether a row's bits do not depend on the other rows
  regard_tensor sink;  // float32 (batch, head, 1, 1): a logit, natural, that joins the sum and has no value
  regard_tensor k_scales;  // float32 (batch, key head, key, 1): k is int8; its rows are multiplied by these
  regard_tensor v_scales;  // float32 (batch, key head, key, 1): v is int8; its rows are multiplied by these
} regard_call;
static_assert(sizeof(regard_call) == 3240, "ctypes lays regard_call out in another way");

// A call on sequences that have any number of queries each, one sequence behind another in q, out and q_at.
// The batch of `call` is 1, nq counts all queries; batch[3] of k and v, or of block_table, strides over
// sequences. No other operand may have a row for each query or key. A call with bounds has positions:
// they count up by one in each sequence, k_at in all alike, and the bounds are those of positions.
typedef struct {
  regard_call call;  // nk: the most keys of a sequence; threads: at most
  int64_t sequences;
  const int64_t* q_offsets;  // (sequences + 1): sequence b has queries [q_offsets[b], q_offsets[b + 1])
  const int64_t* key_counts;  // (sequences): only so many keys are seen
  const int64_t* key_starts;  // (sequences): no key before this one is seen
  int64_t thread_work;  // floating-point operations for which it is worth waking another thread
} regard_ragged;
static_assert(sizeof(regard_ragged) == 3280, "ctypes lays regard_ragged out in another way");

// A call of the backward pass. A null address: that gradient is not wanted.
typedef struct {
  regard_call call;  // the forward call; out (of out_dtype) and row_stats hold its results
  regard_tensor dout;  // cotangent of out, of any dtype that a call can have
  regard_tensor dlse;  // cotangent of lse, float; data 0 for none
  regard_tensor dq;  // gradients, of the call's dtype; every element is written
  regard_tensor dk;  // gradients, of the call's dtype; every element is written
  regard_tensor dv;  // gradients, of the call's dtype; every element is written
  float* dtemperatures;  // for each head, written
  float* dslopes;  // for each head, written
  float* dlog_distance_weights;  // for each head, written
  float* dlog_distance_rates;  // for each head, written
  float* dpower_distance_weights;  // for each head, written
  float* dpower_distance_powers;  // for each head, written
  float* doffsets;  // for each head, written
  regard_tensor dbias;  // added to, float; double where it sums queries or keys
  regard_tensor dprogram_0;  // added to, float; double where it sums queries or keys
  regard_tensor dprogram_1;  // added to, float; double where it sums queries or keys
  regard_tensor dprogram_2;  // added to, float; double where it sums queries or keys
  regard_tensor dprogram_3;  // added to, float; double where it sums queries or keys
  regard_tensor dprogram_4;  // added to, float; double where it sums queries or keys
  regard_tensor dprogram_5;  // added to, float; double where it sums queries or keys
  regard_tensor dprogram_6;  // added to, float; double where it sums queries or keys
  regard_tensor dprogram_7;  // added to, float; double where it sums queries or keys
  regard_tensor dprogram_8;  // added to, float; double where it sums queries or keys
  regard_tensor dprogram_9;  // added to, float; double where it sums queries or keys
  regard_tensor dprogram_10;  // added to, float; double where it sums queries or keys
  regard_tensor dprogram_11;  // added to, float; double where it sums queries or keys
} regard_gradients;
static_assert(sizeof(regard_gradients) == 4736, "ctypes lays regard_gradients out in another way");

// A call whose scores are w · f(a + c), or the sum over features of a program of a and c: q and k are a and c,
// float whatever its dtype, which is that of v.
typedef struct {
  regard_call call;  // it has no scale
  const float* w;  // (heads, dk), contiguous
  int64_t w_stride;  // 0 where the heads share it
  int32_t activation;
  float slope;  // of the leaky ReLU
  const int32_t* code;  // (code_count, 6) instructions of a program; null: none. It has no w
  int64_t code_count;
  const float* parameters;  // (parameter_count, heads, dk), contiguous: what a program reads besides
  int64_t parameter_count;
} regard_additive;
static_assert(sizeof(regard_additive) == 3296, "ctypes lays regard_additive out in another way");

// The backward pass of an additive call. The cotangents, and the gradients of a, c and v, are float. Between
// forward and dw it has what regard_gradients has behind its call, in the same order.
typedef struct {
  regard_additive forward;  // out, float, and row_stats as the forward left them
  regard_tensor dout;  // cotangent of out, of any dtype that a call can have
  regard_tensor dlse;  // cotangent of lse, float; data 0 for none
  regard_tensor dq;  // gradients, of the call's dtype; every element is written
  regard_tensor dk;  // gradients, of the call's dtype; every element is written
  regard_tensor dv;  // gradients, of the call's dtype; every element is written
  float* dtemperatures;  // for each head, written
  float* dslopes;  // for each head, written
  float* dlog_distance_weights;  // for each head, written
  float* dlog_distance_rates;  // for each head, written
  float* dpower_distance_weights;  // for each head, written
  float* dpower_distance_powers;  // for each head, written
  float* doffsets;  // for each head, written
  regard_tensor dbias;  // added to, float; double where it sums queries or keys
  regard_tensor dprogram_0;  // added to, float; double where it sums queries or keys
  regard_tensor dprogram_1;  // added to, float; double where it sums queries or keys
  regard_tensor dprogram_2;  // added to, float; double where it sums queries or keys
  regard_tensor dprogram_3;  // added to, float; double where it sums queries or keys
  regard_tensor dprogram_4;  // added to, float; double where it sums queries or keys
  regard_tensor dprogram_5;  // added to, float; double where it sums queries or keys
  regard_tensor dprogram_6;  // added to, float; double where it sums queries or keys
  regard_tensor dprogram_7;  // added to, float; double where it sums queries or keys
  regard_tensor dprogram_8;  // added to, float; double where it sums queries or keys
  regard_tensor dprogram_9;  // added to, float; double where it sums queries or keys
  regard_tensor dprogram_10;  // added to, float; double where it sums queries or keys
  regard_tensor dprogram_11;  // added to, float; double where it sums queries or keys
  float* dw;  // (heads, dk); of a program's parameters (parameter_count, heads, dk)
} regard_additive_gradients;
static_assert(sizeof(regard_additive_gradients) == 4800, "ctypes lays regard_additive_gradients out in another way");

// Facts about the weights of a call. Results are contiguous, (batch..., head, ...); a null address, or a count
// of 0: not wanted. The call's lse, out and dropout are not read; its dv is 0.
typedef struct {
  regard_call call;
  float* lse;  // (.., nq) natural logarithm, the sink included
  float* max_score;  // (.., nq) natural, without the sink; NaN where a score is
  int64_t* max_key;  // (.., nq) the first key that has it, -1 for none; wanted with max_score
  float* entropy;  // (.., nq) in nats
  float* concentration;  // (.., nq) sum of the squared weights
  int64_t* visible;  // (.., nq) keys whose score is not -inf
  int64_t* readers;  // (.., nk) queries that see a key
  int64_t top;  // how many of the heaviest keys, at most REGARD_TOP
  float* top_weights;  // (.., nq, top), heaviest first
  int64_t* top_keys;  // (.., nq, top), -1 where fewer keys are seen
  float* top_rest;  // (.., nq) the mass of all other keys
  float* received;  // (.., nk) sum over queries of weight times share
  const float* shares;  // (.., nq) share of each query; null: 1
  float* most;  // (.., nk) the largest weight on a key
  float* map;  // (.., map_rows, map_cols) mean mass on a cell's keys, over queries that see a key
  int64_t map_rows;
  int64_t map_cols;
  int64_t groups;  // of keys, at most REGARD_SETS
  const int32_t* group;  // (batch.., nk), the group of each key, below 0 for none
  float* mass;  // (.., nq, groups)
  const int64_t* q_at;  // (batch.., n) positions, less than 2^31 apart, for what follows
  const int64_t* k_at;  // (batch.., n) positions, less than 2^31 apart, for what follows
  float* distance;  // (.., nq) mean of |position of query - position of key|
  int64_t bands;  // ranges of that difference, at most REGARD_SETS
  const int32_t* band;  // (bands, 2) the least and the greatest of each
  float* within;  // (.., nq, bands) the mass there
  int64_t levels;  // of weights
  const float* level;  // (levels,)
  int64_t* reached;  // (.., levels) how many visible pairs have a weight of at least that
} regard_fact_args;
static_assert(sizeof(regard_fact_args) == 3472, "ctypes lays regard_fact_args out in another way");

// New keys and values of a batch of sequences, to be copied to their pages, whose columns are neighbours.
// batch[3] is the stride from sequence to sequence, or from page to page.
typedef struct {
  int64_t batch;
  int64_t heads;
  int64_t n;
  int64_t dk;
  int64_t dv;
  int64_t element;  // bytes of a number: 1, 2, 4 or 8
  regard_tensor k;  // (batch, head, row, column)
  regard_tensor v;  // (batch, head, row, column)
  regard_tensor k_pages;  // (page, head, row, column)
  regard_tensor v_pages;  // (page, head, row, column)
  int64_t page_size;
  int64_t pages;
  const int32_t* block_table;  // (batch, room)
  int64_t room;
  const int64_t* lengths;  // (batch): rows of each sequence so far
  const int64_t* offsets;  // (batch + 1), or null: k and v have n rows in all, and sequence b gets [offsets[b], offsets[b + 1])
} regard_page_write;
static_assert(sizeof(regard_page_write) == 416, "ctypes lays regard_page_write out in another way");

// What native/python/ makes the calls of one structure from: see plan.py.
typedef struct {
  const regard_call* call;  // what is the same for all of them
  void* entry;
  void* parallel;
  int64_t axes;  // of q, k, v and out, heads included
  int64_t lead[5];  // sizes of out's axes before that of the queries, as the caller has them
  int64_t leads;  // how many
  int64_t dv;
  int64_t pair_work;  // floating-point operations of a query and a key, over the batch and all heads
  int64_t thread_work;  // of those, for which it is worth waking another thread
  int64_t before;  // with bounded: -after <= position of query - position of key <= before
  int64_t after;  // with bounded: -after <= position of query - position of key <= before
  int32_t bounded;
  int32_t positional;  // whether anything compares positions
  int32_t float_out;  // out is float, whatever v is
  int64_t queries;  // how many there must be, where a tensor has a number for each; 0: any number
  int32_t leaves;  // tensors of score, mask and sink that are read where they lie
  int64_t leaf[8];  // which of all such tensors, depth first
  int64_t leaf_at[8];  // where the call has its address
} regard_plan;
static_assert(sizeof(regard_plan) == 280, "ctypes lays regard_plan out in another way");

// What native/python/ makes the backward calls of one structure from, where q, k and v alone have gradients.
typedef struct {
  const regard_gradients* gradients;  // what is the same for all of them, but for the forward call
  void* entry;
  void* parallel;
  int64_t axes;  // of q, k, v and out, heads included
  int32_t needs[3];  // whether q, k and v have gradients
  int32_t leaves;  // tensors of score, mask and sink that are read where they lie
  int64_t leaf[8];  // which of all such tensors, depth first
  int64_t leaf_at[8];  // where the call has its address
} regard_backward_plan;
static_assert(sizeof(regard_backward_plan) == 176, "ctypes lays regard_backward_plan out in another way");

// Whether a call has an operand that sequences of any lengths cannot share.
static inline int32_t regard_not_ragged(const regard_call* c) {
  return c->points_of_q ||
         c->points_of_k ||
         c->offsets ||
         c->q_cell ||
         c->k_cell ||
         c->start.data ||
         c->stop.data ||
         c->shifts ||
         c->key_counts ||
         c->key_starts ||
         c->query_counts ||
         c->q_documents ||
         c->k_documents;
}

// The n-th of the operands of which each sequence of a ragged call has a part; null after the last.
static inline regard_tensor* regard_parted(regard_call* c, int n) {
  regard_tensor* const all[] = {
    &c->bias,
    &c->program_0,
    &c->program_1,
    &c->program_2,
    &c->program_3,
    &c->program_4,
    &c->program_5,
    &c->program_6,
    &c->program_7,
    &c->program_8,
    &c->program_9,
    &c->program_10,
    &c->program_11,
    &c->allowed,
    &c->until,
    &c->tiles,
    &c->sink,
  };
  return n < 17 ? all[n] : nullptr;
}

typedef void (*regard_body)(int64_t begin, int64_t end, void* context);
typedef int32_t (*regard_parallel)(int64_t begin, int64_t end, int64_t grain, regard_body body, void* context);
}
