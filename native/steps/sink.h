// The sink: a logit of each head that joins the sum and has no value.
#pragma once
#include "core/place.h"

namespace regard {

// In base 2; -inf where there is none.
REGARD_INLINE float sink_of(const regard_call& c, const Place& p, int64_t head) {
  return c.sink.data ? plus_natural(vf{}, splat(*at<float>(c.sink, p, head)))[0] : -kInf;
}

}  // namespace regard
