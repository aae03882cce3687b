// What a call of the backward pass says besides the forward's own arguments (backends/training.py: keep them alike).
#pragma once
#include "args.h"

extern "C" {

typedef struct {
  regard_call call;     // as the forward had it; out and norm hold its results, and out_dtype is out's
  regard_tensor dout;   // cotangent of out, of dout_dtype
  regard_tensor dlse;   // cotangent of lse, float; data 0 for none
  regard_tensor dq;     // gradients, of gradient_dtype, every element is written; data 0 where not wanted
  regard_tensor dk, dv;
  regard_tensor dbias;  // added to, float, or double where row or col is 0; data 0 where not wanted
  float* dslopes;       // (heads,), written, or 0
  float* doffsets;      // (heads, offset_count), written, or 0
  int32_t dout_dtype, gradient_dtype;
} regard_gradients;
}
