// The two microkernels of the forward, and what turns scores into weights between them, as the kernels hold them, for
// benchmarks/predicted.py: compiled to assembly, or as a program that prints how many cycles a multiply-add takes, both
// operands in the first-level cache.
#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "attention/tile.h"

namespace regard {

constexpr int kRows = rows_at_once(kVectors);

// Where there are no products of pairs, Pairs are Floats.
extern "C" __attribute__((used)) const void* const inner_loops[] = {
    (const void*)&dot_rows<kVectors, Floats, kRows>, (const void*)&value_rows<kVectors, Floats, kRows>,
    (const void*)&dot_rows<kVectors, Pairs, kRows>,  (const void*)&value_rows<kVectors, Pairs, kRows>,
    (const void*)&weigh_plain<kVectors, false>,      (const void*)&weigh_plain<kVectors, Isa::kPairs>};

}  // namespace regard

#if defined(REGARD_MEASURE)
namespace {

using namespace regard;

double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// The shortest time of many short runs: no other program interrupted that one.
template <class Body>
double shortest(const Body& body) {
  double best = 1;
  for (int n = 0; n < 20000; ++n) {
    const double from = seconds();
    body();
    const double took = seconds() - from;
    best = took < best ? took : best;
  }
  return best;
}

// Seconds of a cycle: additions that depend on each other take one each.
double cycle() {
  constexpr int kAdditions = 20000;
  return shortest([] {
           int64_t x = 1;
           for (int n = 0; n < kAdditions / 4; ++n)
             __asm__ volatile("add %0, %0\n\tadd %0, %0\n\tadd %0, %0\n\tadd %0, %0" : "+r"(x));
         }) /
         kAdditions;
}

template <class Op>
double products_per_cycle(int64_t elements) {
  constexpr int64_t kWidth = 96, kCount = 16;  // of numbers, or of pairs
  const auto floats = [](int64_t count) { return (float*)aligned_alloc(64, (size_t)(4 * count)); };
  float *s = floats(kCount * kQueries), *k = floats(kCount * kWidth), *q = floats(kWidth * kQueries);
  for (int64_t n = 0; n < kCount * kWidth; ++n) k[n] = 0.5f;
  for (int64_t n = 0; n < kWidth * kQueries; ++n) q[n] = 0.25f;
  vf top[kVectors] = {};
  const double took =
      shortest([&] { dot_rows<kVectors, Op, kRows>(s, top, k, kWidth, q, kWidth, kCount, 1, Prefetch{}, 0); });
  return (double)(kCount * kWidth * kQueries * elements) / (took / cycle());
}

}  // namespace

int main() {
  printf("Floats %.2f\n", products_per_cycle<Floats>(1));
  if (Isa::kPairs) printf("Pairs %.2f\n", products_per_cycle<Pairs>(2));
}
#endif
