// What is asked about the weights of a call, besides its arguments (inspect/kernel.py: keep them alike).
#pragma once
#include "args.h"

extern "C" {

enum { REGARD_TOP = 64, REGARD_SETS = 64 };

// Answers lie without gaps, (batch..., head, ...) in order; a null pointer, or a count of 0, is what nobody asks for.
typedef struct {
  regard_call call;      // as the forward has it, with dv 0; its lse, out and dropout are not looked at
  float* lse;            // (.., nq) natural logarithm, the sink included
  float* max_score;      // (.., nq) natural, without the sink; NaN where a score is
  int64_t* max_key;      // (.., nq) the first key that has it, -1 for none; asked for together
  float* entropy;        // (.., nq) in nats
  int64_t* visible;      // (.., nq) keys whose score is not -inf
  int64_t* readers;      // (.., nk) queries that see a key
  int64_t top;           // how many of the heaviest keys, at most REGARD_TOP
  float* top_weights;    // (.., nq, top), heaviest first
  int64_t* top_keys;     // (.., nq, top), -1 where fewer keys are seen
  float* top_rest;       // (.., nq) the mass of all other keys
  float* received;       // (.., nk) sum of the weights on a key, times
  const float* shares;   // (.., nq) what each query counts for, or 0 for 1
  float* most;           // (.., nk) the largest weight on a key
  float* map;            // (.., map_rows, map_cols) mean over a cell's queries that see anything of the mass on its keys
  int64_t map_rows, map_cols;
  int64_t groups;        // of keys, at most REGARD_SETS
  const int32_t* group;  // (batch.., nk), the group of each key, below 0 for none
  float* mass;           // (.., nq, groups)
  const int64_t* q_at;   // (batch.., nq), (batch.., nk) positions, for what follows; they differ by less than 2^31
  const int64_t* k_at;
  float* distance;       // (.., nq) mean of |position of query - position of key|
  int64_t bands;         // ranges of that difference, at most REGARD_SETS
  const int32_t* band;   // (bands, 2) the least and the greatest of each
  float* within;         // (.., nq, bands) the mass there
  int64_t levels;        // of weights
  const float* level;    // (levels,)
  int64_t* reached;      // (.., levels) how many pairs that are not hidden weigh as much or more
} regard_fact_args;
}
