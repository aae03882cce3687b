// What is asked about the weights of a call, besides its arguments (inspect/kernel.py: keep them alike).
#pragma once
#include "args.h"

extern "C" {

// Answers lie without gaps, (batch..., head, ...) in order; a null pointer is what nobody asks for.
typedef struct {
  regard_call call;      // as the forward has it, with dv 0; its lse, out and dropout are not looked at
  float* lse;            // (.., nq) natural logarithm, the sink included
  float* max_score;      // (.., nq) natural, without the sink
  int64_t* max_key;      // (.., nq) the first key that has it, -1 for none
  float* entropy;        // (.., nq) in nats
  int64_t top;           // how many of the heaviest keys, at most REGARD_TOP
  float* top_weights;    // (.., nq, top), heaviest first
  int64_t* top_keys;     // (.., nq, top), -1 where fewer keys have any weight
  float* top_rest;       // (.., nq) the mass of all other keys
  float* received;       // (.., nk) sum of the weights on a key, times
  const float* shares;   // (.., nq) what each query counts for, or 0 for 1
  float* most;           // (.., nk) the largest weight on a key
  float* map;            // (.., map_rows, map_cols) means over a cell's queries of the mass on its keys
  int64_t map_rows, map_cols;
} regard_fact_args;

enum { REGARD_TOP = 64 };
}
