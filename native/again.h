// A call like one before, on other tensors of the same structure.
#pragma once
#include "args.h"

namespace regard {

// Null for those that stay where they are.
static regard_call again(const regard_call& like, void* q, void* k, void* v, void* out, void* norm, void* allowed, void* bias,
                         const float* slopes, void* sink) {
  regard_call call = like;
  call.q.data = q, call.k.data = k, call.v.data = v, call.out.data = out;
  if (norm) call.norm.data = norm;
  if (allowed) call.allowed.data = allowed;
  if (bias) call.bias.data = bias;
  if (slopes) call.slopes = slopes;
  if (sink) call.sink.data = sink;
  return call;
}

}  // namespace regard
