// Compares two shared objects of the kernels: the same random right calls, some of which hold NaN or infinity, must
// leave the same results in every buffer. Floats may differ by kUnits units of float32, relative to the largest number
// of their buffer, and half precision by one more rounding; NaN, infinities and integers may not differ. Where the two
// have blocks of other sizes, calls with a tile map, whose size is that of blocks, are left out, and floats may differ
// by kOtherOrder. Arguments: two paths, how many calls, a seed; "pairs" where one object multiplies pairs of bfloat16
// and so rounds weights to them: of the calls, those in bfloat16 with an even width are then compared, and may differ
// by that rounding in every buffer; "without bfloat16": those in other dtypes are compared; "tiles in use": while the
// second object runs, Arm's matrix unit holds numbers that it must leave as they are.
#include "native_fuzz.h"

#include <math.h>

#include "shared_object.h"
#include "tiles_in_use.h"

namespace {

constexpr double kUnits = 16, kUnit = 0x1p-24;
constexpr double kOtherOrder = 0x1p-17;  // a weight differs by the rounding of its score, which may be large
void* object;                            // whose entry points are called

template <class Result, class... Given>
Result call(const char* name, Given... given) {
  return ((Result (*)(Given...))offered(object, name))(given...);
}

}  // namespace

int64_t regard_queries() { return call<int64_t>("regard_queries"); }
int64_t regard_keys() { return call<int64_t>("regard_keys"); }
int32_t regard_forward(const regard_call* x, regard_parallel p) { return call<int32_t>("regard_forward", x, p); }
int32_t regard_backward(const regard_gradients* x, regard_parallel p) { return call<int32_t>("regard_backward", x, p); }
int32_t regard_additive_forward(const regard_additive* x, regard_parallel p) {
  return call<int32_t>("regard_additive_forward", x, p);
}
int32_t regard_additive_backward(const regard_additive_gradients* x, regard_parallel p) {
  return call<int32_t>("regard_additive_backward", x, p);
}
int32_t regard_facts(const regard_fact_args* x, regard_parallel p) { return call<int32_t>("regard_facts", x, p); }

namespace {

bool is_real(const Buffer& b) { return b.kind <= kF64; }

double real(const Buffer& b, int64_t n) {
  switch (b.kind) {
    case kF32: return ((const float*)b.at)[n];
    case kBF16: return regard::bf16_to_float(((const uint16_t*)b.at)[n]);
    case kF16: return regard::fp16_to_float(((const uint16_t*)b.at)[n]);
    default: return ((const double*)b.at)[n];
  }
}

// One number of a float operand becomes NaN or infinite, in both.
void poison(Random& r, Case& a, Case& b) {
  const int64_t which = r.between(0, (int64_t)a.memory.size() - 1);
  const Buffer to[] = {a.memory[which], b.memory[which]};
  if (to[0].kind > kF16 || to[0].count == 0) return;
  const int64_t n = r.between(0, to[0].count - 1);
  const bool lost = r.chance(2);
  const float x = lost ? NAN : INFINITY;
  const uint16_t half = to[0].kind == kBF16 ? (lost ? 0x7fc0 : 0x7f80) : (lost ? 0x7e00 : 0x7c00);
  for (const Buffer& each : to) {
    if (each.kind == kF32) ((float*)each.at)[n] = x;
    else ((uint16_t*)each.at)[n] = half;
  }
}

// The largest difference, in units of what is allowed; infinite where NaN, infinities or integers differ. rounding: of
// weights, relative to the largest number or to 1, since a gradient may be a sum of such numbers that cancel.
double difference(const Buffer& a, const Buffer& b, double rounding) {
  if (!is_real(a)) return memcmp(a.at, b.at, (size_t)(a.count * bytes_of(a.kind))) ? INFINITY : 0;
  double largest = 0, worst = 0;
  for (int64_t n = 0; n < a.count; ++n) {
    const double x = real(a, n), y = real(b, n);
    if (isnan(x) != isnan(y) || (isinf(x) || isinf(y) ? x != y : false)) return INFINITY;
    if (isfinite(x)) {
      largest = fmax(largest, fabs(x));
      worst = fmax(worst, fabs(x - y));
    }
  }
  const double half = a.kind == kBF16 ? 0x1p-7 : a.kind == kF16 ? 0x1p-10 : 0;
  return worst == 0 ? 0 : worst / (largest * (kUnits * kUnit + half) + rounding * fmax(largest, 1));
}

}  // namespace

int main(int count, char** words) {
  if (count < 5) {
    printf("expected two paths, a number of calls and a seed\n");
    return 2;
  }
  void* objects[2];
  int64_t queries[2];
  for (int n = 0; n < 2; ++n) {
    if (!(objects[n] = object = open_object(words[1 + n]))) {
      printf("%s cannot be loaded\n", words[1 + n]);
      return 2;
    }
    queries[n] = regard_queries();
    printf("%s: runs", words[1 + n]);
    for (int64_t m = 0; const char* name = call<const char*>("regard_runnable", m); ++m) printf(" %s", name);
    printf("\n");
  }
  const long long calls = atoll(words[3]), seed = atoll(words[4]);
  const bool pairs = count > 5 && strcmp(words[5], "pairs") == 0;
  const bool others = count > 5 && strcmp(words[5], "without bfloat16") == 0;
  const bool tiles = count > 5 && strcmp(words[5], "tiles in use") == 0;
  const double order = queries[0] == queries[1] ? 0 : kOtherOrder;
  int64_t compared[5] = {}, different[5] = {};
  double worst = 0;
  for (long long n = 0; n < calls; ++n) {
    Random first{(uint64_t)(seed * 1000003 + n)}, second = first;
    Case a(first, (int)(n % 3), Programs::kExact), b(second, (int)(n % 3), Programs::kExact);
    if (queries[0] != queries[1] && a.c.tiles.data) continue;
    if (others && a.c.dtype == REGARD_BF16) continue;
    if (pairs && (a.c.dtype != REGARD_BF16 || a.c.dk % 2)) continue;
    if (n % 4 == 0) poison(first, a, b);
    for (Entry entry : a.entries()) {
      // gradients of parameters are sums over all pairs of what cancels
      const double rounding = !pairs ? order : entry == kBackward ? 0x1p-5 : 0x1p-7;
      object = objects[0];
      const int32_t one = a.run(entry, nullptr);
      object = objects[1];
      if (tiles) fill_tiles((int)n);
      const int32_t other = b.run(entry, nullptr);
      if (tiles && !leave_tiles((int)n)) {
        printf("call %lld of seed %lld: %s changed the tiles\n", n, seed, kEntries[entry]);
        return 1;
      }
      if (one || other) {
        printf("call %lld of seed %lld: %s returned %d and %d\n", n, seed, kEntries[entry], one, other);
        return 1;
      }
      for (size_t m = 0; m < a.memory.size(); ++m) {
        const double found = difference(a.memory[m], b.memory[m], rounding);
        if (!(found <= 1)) {
          printf("call %lld of seed %lld: %s differs in buffer %d by %g of what is allowed\n", n, seed, kEntries[entry],
                 (int)m, found);
          return 1;
        }
        ++compared[entry];
        different[entry] += found > 0;
        worst = fmax(worst, found);
      }
    }
  }
  for (int n = 0; n < 5; ++n)
    printf("%s: %lld buffers, %lld of them with other bits\n", kEntries[n], (long long)compared[n],
           (long long)different[n]);
  printf("the largest difference is %.2g of what is allowed\n", worst);
}
