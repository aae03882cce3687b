// The entry points, once for each instruction set. No state, no STL, nothing at load time.
#include <math.h>
#include <stdlib.h>

#include "decode.h"
#include "forward.h"

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
  int64_t pairs, parts, keys, next;  // (batch element, key head); parts of a pair, keys of a part
  float* states;
  int64_t* left;  // of each pair: the parts that are not finished
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
  Few f(c);
  decode_places(f, (float*)memory);
  for (;;) {
    int64_t item = __atomic_fetch_add(&job.next, 1, __ATOMIC_RELAXED);
    if (item >= job.pairs * job.parts) break;
    const int64_t pair = item / job.parts, from = item % job.parts * job.keys, to = from + job.keys;
    f.p = element_of(c, pair / c.key_heads);
    f.states = job.states + item * part_size(c);
    run_part(f, pair % c.key_heads, from, to < c.nk ? to : c.nk);
    if (__atomic_sub_fetch(&job.left[pair], 1, __ATOMIC_ACQ_REL) == 0)
      merge_parts(c, f.p, pair % c.key_heads, job.states + pair * job.parts * part_size(c), job.parts);
  }
  free(memory);
}

int32_t forward_few(const regard_call* call, int64_t elements, regard_parallel parallel) {
  const regard_call& c = *call;
  FewJob job{call, elements * c.key_heads, 0, 0, 0, nullptr, nullptr, 0};
  job.keys = part_keys(c, job.pairs);
  job.parts = (c.nk + job.keys - 1) / job.keys;
  const int64_t items = job.pairs * job.parts;
  job.left = (int64_t*)malloc((size_t)job.pairs * sizeof(int64_t) + (size_t)(items * part_size(c)) * sizeof(float));
  if (!job.left) return 1;
  job.states = (float*)(job.left + job.pairs);
  for (int64_t n = 0; n < job.pairs; ++n) job.left[n] = job.parts;
  const int64_t threads = c.threads < items ? c.threads : items;
  if (threads <= 1 || !parallel)
    work_few(0, 1, &job);
  else
    parallel(0, threads, 1, work_few, &job);
  free(job.left);
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

// The sum of `count` floats, for measuring how fast memory is read.
REGARD_API float regard_bandwidth(const float* data, int64_t count) {
  constexpr int kSums = 8;
  vf acc[1][kSums];
  clear(acc);
  for (int64_t n = 0; n + kSums * W <= count; n += kSums * W)
#pragma GCC unroll 8
    for (int i = 0; i < kSums; ++i) acc[0][i] += load(data + n + i * W);
  vf sum = vf{};
  for (int i = 0; i < kSums; ++i) sum += acc[0][i];
  float total = 0;
  for (int n = 0; n < W; ++n) total += sum[n];
  for (int64_t n = count / (kSums * W) * (kSums * W); n < count; ++n) total += data[n];
  return total;
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
  if (few(*call)) return forward_few(call, elements, parallel);
  int64_t threads = call->threads < job.items ? call->threads : job.items;
  if (threads <= 1 || !parallel)
    work(0, 1, &job);
  else
    parallel(0, threads, 1, work, &job);
  return job.failed;
}

// The same call on other tensors of the same structure; null for those that stay where they are.
REGARD_API int32_t regard_again(const regard_call* like, regard_parallel parallel, void* q, void* k, void* v, void* out,
                                void* allowed, void* bias, const float* slopes, void* sink) {
  regard_call call = *like;
  call.q.data = q, call.k.data = k, call.v.data = v, call.out.data = out;
  if (allowed) call.allowed.data = allowed;
  if (bias) call.bias.data = bias;
  if (slopes) call.slopes = slopes;
  if (sink) call.sink.data = sink;
  return regard_forward(&call, parallel);
}
