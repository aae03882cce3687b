// What one call says, as a plain C struct that Python fills through ctypes (see backends/native.py: keep them alike).
#pragma once
#include <stdint.h>

extern "C" {

enum { REGARD_F32 = 0, REGARD_BF16 = 1, REGARD_F16 = 2 };
enum { REGARD_BATCH_AXES = 4, REGARD_DIMS = 4 };
// What entry points return; all but the first: nothing was computed (backends/library.py: keep them alike).
enum {
  REGARD_DONE = 0,
  REGARD_NO_MEMORY = 1,
  REGARD_BAD_ARGUMENT = 2,  // a size, a code, a stride or a null address
  REGARD_BAD_INTERVAL = 3,  // start or stop, where a query sees any key at all
  REGARD_BAD_TILE = 4,
  REGARD_BAD_CELL = 5,
  REGARD_BAD_GROUP = 6,
};

// A tensor of one element a (batch..., head, row, feature); strides count elements. Missing axes have stride 0.
typedef struct {
  void* data;
  int64_t batch[REGARD_BATCH_AXES];
  int64_t head, row, col;
} regard_tensor;

typedef struct {
  int64_t batch[REGARD_BATCH_AXES];  // sizes of the batch axes, 1 where there are fewer
  int64_t heads, key_heads, nq, nk, dk, dv;
  int32_t dtype;       // of q, k, v and out
  int32_t bias_dtype;  // of bias
  int32_t out_dtype;   // REGARD_F32 or dtype
  int32_t threads;
  regard_tensor q, k, v, out;
  regard_tensor lse;          // float (batch, head, row)
  float scale;                // of the dot product
  float cap;                  // soft cap, 0 for none
  int32_t cap_last;           // whether it comes after slopes, offsets and bias, instead of before
  const float* caps;          // (heads,): a cap for each head, where cap is not 0; or 0
  int64_t cap_stride;
  regard_tensor start, stop;  // int32 (batch, head, row): the keys that each query sees; data 0 for all
  regard_tensor bias;         // (batch, head, row, key); data 0 for none
  regard_tensor allowed;      // bool bytes (batch, head, row, key); data 0 for none
  regard_tensor tiles;        // int32 (batch, head, row block, key block): -1 none, -2 all, else which bits; data 0 for none
  const uint64_t* bits;       // [which][regard_keys()]: bit r of word j is row r of the block, key j of the block
  int64_t bit_count;          // of which there are
  const float* slopes;        // (heads,) or 0
  int64_t slope_stride;
  const float* points_of_q;   // (dims, nq), (dims, nk): coordinates, whose distance the slopes multiply; or 0
  const float* points_of_k;
  int64_t dims;               // at most REGARD_DIMS
  const float* offsets;       // (heads, offset_count and some): what is added for a difference of cells, or 0
  int64_t offset_stride, offset_count;
  const int32_t* q_cell;      // (nq), (nk): the offset of a pair is that of q_cell[i] - k_cell[j]; 0 for i + nk - 1 and j
  const int32_t* k_cell;
  int64_t q_cell_batch[REGARD_BATCH_AXES], k_cell_batch[REGARD_BATCH_AXES];
  const int64_t* q_at;        // positions (nq), (nk) for slopes without points and for dropout, or 0
  const int64_t* k_at;
  int64_t q_at_batch[REGARD_BATCH_AXES], k_at_batch[REGARD_BATCH_AXES];
  uint64_t seed;
  uint32_t threshold;  // of 2^24: a weight is dropped when its bits are below; 0 for no dropout
  float keep;          // what kept weights are multiplied by
  int32_t invariant;   // whether a row's bits must not depend on how many rows there are: no kernel of its own for few
  regard_tensor sink;  // float (batch, head): a logit, natural, that joins the sum and has no value; data 0 for none
  // float (batch, head, row, 2): m, base 2, and 1 / l, what scores become weights by, to the last digit, as an lse does not
  // tell; 0, 0 for rows that see nothing; data 0 for none
  regard_tensor norm;
} regard_call;

typedef void (*regard_body)(int64_t begin, int64_t end, void* context);
typedef int32_t (*regard_parallel)(int64_t begin, int64_t end, int64_t grain, regard_body body, void* context);
}
