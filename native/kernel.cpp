// The entry points, once for each instruction set. No state, no STL, nothing at load time.
#include <math.h>
#include <stdlib.h>

#include "decode.h"

using namespace regard;

namespace {

struct Job {
  const regard_call* call;
  int64_t items, group, groups, next;
  int failed;
};

Place place_of(const regard_call& c, int64_t item, int64_t group, int64_t groups) {
  Place p;
  // the last blocks of queries see most under a causal mask: heaviest first
  int64_t rest = item;
  int64_t number = groups - 1 - rest % groups;
  rest /= groups;
  p.h = rest % c.heads;
  p.b = rest / c.heads;
  int64_t b = p.b;
  for (int n = REGARD_BATCH_AXES - 1; n >= 0; --n) p.at[n] = b % c.batch[n], b /= c.batch[n];
  p.row = number * group * kQueries;
  p.rows = c.nq - p.row < group * kQueries ? c.nq - p.row : group * kQueries;
  return p;
}

void work(int64_t, int64_t, void* context) {
  Job& job = *(Job*)context;
  const regard_call& c = *job.call;
  void* memory = nullptr;
  if (posix_memalign(&memory, 64, (size_t)forward_scratch(c, job.group) * sizeof(float))) {
    __atomic_store_n(&job.failed, 1, __ATOMIC_RELAXED);
    return;
  }
  Scratch w = forward_places(c, job.group, (float*)memory);
  for (;;) {
    int64_t item = __atomic_fetch_add(&job.next, 1, __ATOMIC_RELAXED);
    if (item >= job.items) break;
    run_item(c, w, place_of(c, item, job.group, job.groups));
  }
  free(memory);
}

// --- few rows ---

struct FewJob {
  const regard_call* call;
  float* states;
  int64_t items, parts, next;
  int failed;
};

Place element_of(const regard_call& c, int64_t b) {
  Place p{};
  p.b = b;
  for (int n = REGARD_BATCH_AXES - 1; n >= 0; --n) p.at[n] = b % c.batch[n], b /= c.batch[n];
  return p;
}

void work_few(int64_t, int64_t, void* context) {
  FewJob& job = *(FewJob*)context;
  const regard_call& c = *job.call;
  void* memory = nullptr;
  if (posix_memalign(&memory, 64, (size_t)decode_scratch(c) * sizeof(float))) {
    __atomic_store_n(&job.failed, 1, __ATOMIC_RELAXED);
    return;
  }
  float* at = (float*)memory;
  Decode w{};
  const int64_t width = round_up(c.dk);
  w.q = at, at += few_rows(c) * width;
  w.s = at, at += few_rows(c) * kChunk;
  w.k = at, at += kChunk * width;
  w.v = at;
  for (;;) {
    int64_t item = __atomic_fetch_add(&job.next, 1, __ATOMIC_RELAXED);
    if (item >= job.items) break;
    int64_t pair = item / job.parts;
    run_part(c, w, element_of(c, pair / c.key_heads), pair % c.key_heads, item % job.parts, job.states + item * part_size(c));
  }
  free(memory);
}

int32_t forward_few(const regard_call* call, int64_t elements, regard_parallel parallel) {
  const regard_call& c = *call;
  FewJob job{call, nullptr, 0, (c.nk + kPart - 1) / kPart, 0, 0};
  job.items = elements * c.key_heads * job.parts;
  job.states = (float*)malloc((size_t)(job.items * part_size(c)) * sizeof(float));
  if (!job.states) return 1;
  int64_t threads = c.threads < job.items ? c.threads : job.items;
  if (threads <= 1 || !parallel)
    work_few(0, 1, &job);
  else
    parallel(0, threads, 1, work_few, &job);
  if (!job.failed)
    for (int64_t pair = 0; pair < elements * c.key_heads; ++pair)
      merge_parts(c, element_of(c, pair / c.key_heads), pair % c.key_heads, job.states + pair * job.parts * part_size(c), job.parts);
  free(job.states);
  return job.failed;
}

}  // namespace

#define REGARD_API extern "C" __attribute__((visibility("default")))

REGARD_API int64_t regard_queries() { return kQueries; }
// Whether this processor runs an instruction set, by name.
REGARD_API int32_t regard_runs(const char* isa) {
  auto same = [isa](const char* name) { return __builtin_strcmp(isa, name) == 0; };
  if (same("base")) return 1;
#if defined(__x86_64__)
  bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (same("avx2")) return avx2;
  bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512cd");
  if (same("avx512")) return avx512;
  if (same("avx512bf16")) return avx512 && __builtin_cpu_supports("avx512bf16");
#endif
  return 0;
}

// `count` times as many independent vector multiply-adds as registers hold, for measuring the peak; returns how many
// floating-point operations that was.
REGARD_API double regard_peak(int64_t count) {
  constexpr int kChains = W == 16 ? 24 : 12;
  vf acc[kChains];
  for (int n = 0; n < kChains; ++n) acc[n] = splat((float)n);
  const vf a = splat(0.999f), b = splat(1e-3f);
  for (int64_t k = 0; k < count; ++k) {
#pragma GCC unroll 24
    for (int n = 0; n < kChains; ++n) acc[n] = acc[n] * a + b;
  }
  vf sum = vf{};
  for (int n = 0; n < kChains; ++n) sum += acc[n];
  volatile float keep = sum[0];
  (void)keep;
  return 2.0 * W * kChains * (double)count;
}

REGARD_API int64_t regard_keys() { return kKeys; }

// 0, or 1 where memory ran out.
REGARD_API int32_t regard_forward(const regard_call* call, regard_parallel parallel) {
  Job job{call, 0, 0, 0, 0, 0};
  int64_t elements = 1;
  for (int n = 0; n < REGARD_BATCH_AXES; ++n) elements *= call->batch[n];
  const int64_t blocks = (call->nq + kQueries - 1) / kQueries;
  job.group = group_of(*call, elements);
  job.groups = (blocks + job.group - 1) / job.group;
  job.items = job.groups * call->heads * elements;
  if (job.items == 0) return 0;
  if (few_rows(*call) < kFew && !call->tiles.data) return forward_few(call, elements, parallel);
  int64_t threads = call->threads < job.items ? call->threads : job.items;
  if (threads <= 1 || !parallel)
    work(0, 1, &job);
  else
    parallel(0, threads, 1, work, &job);
  return job.failed;
}

// The same call on other tensors of the same structure; null for those that stay where they are.
REGARD_API int32_t regard_again(const regard_call* like, regard_parallel parallel, void* q, void* k, void* v, void* out,
                                void* allowed, void* bias, const float* slopes) {
  regard_call call = *like;
  call.q.data = q, call.k.data = k, call.v.data = v, call.out.data = out;
  if (allowed) call.allowed.data = allowed;
  if (bias) call.bias.data = bias;
  if (slopes) call.slopes = slopes;
  return regard_forward(&call, parallel);
}
