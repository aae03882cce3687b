// What Intel's matrix unit can do, for results/matrix-unit.md: how long a product of tiles takes with operands from
// each level of the cache, what it costs that sums lie in memory, what the vector units do meanwhile, and how it
// sleeps. By itself, on an idle machine:
//
//   g++ -O2 -std=c++17 -march=sapphirerapids benchmarks/matrix_unit.cpp -o matrix_unit && ./matrix_unit
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

namespace {

#define MULTIPLY(sum, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #sum:::)
#define LOAD(tile, at) __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile::"r"(at), "r"((int64_t)64) : "memory")

#define STORE(tile, at) __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(at), "r"((int64_t)64) : "memory")

// Tile of a block of sums: the one in registers goes to memory, the next one comes.
#define EXCHANGE(tile, before, block)   \
  do {                                  \
    STORE(tile, before + tile * kTile); \
    LOAD(tile, block + tile * kTile);   \
  } while (false)

constexpr long kBytes = 8 << 20, kTile = 1024, kStep = 24;  // kStep: products of a step of float32, six of 2 × 2 tiles
constexpr long kSums = 64 << 10;
alignas(4096) uint16_t operands[kBytes / 2];
alignas(4096) char sums[kSums];

double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// The shortest time of many short runs, in seconds: no other program interrupted that one.
template <class Body>
double shortest(const Body& body) {
  double least = 1e9;
  for (int run = 0; run < 200; ++run) {
    const double start = seconds();
    body();
    const double took = seconds() - start;
    least = took < least ? took : least;
  }
  return least;
}

// Seconds of a cycle, by products of whole numbers that wait for each other: each takes three.
double cycle() {
  constexpr int kCount = 100000;
  return shortest([] {
           uint64_t x = 1;
           for (int n = 0; n < kCount; ++n) __asm__ volatile("imul $3, %0, %0" : "+r"(x));
         }) /
         (3 * kCount);
}

// Steps of float32 products, 24 each, whose 16 tiles of operands are the next ones of `bytes`.
void multiply(long steps, long bytes) {
  const char* base = (const char*)operands;
  long at = 0;
  const auto next = [&] {
    const char* tile = base + at;
    at = (at + kTile) & (bytes - 1);
    return tile;
  };
  for (long n = 0; n < steps; ++n)
#pragma GCC unroll 6
    for (int term = 0; term < 6; ++term) {
      const bool both = term == 0 || term == 5, left = both || term % 2, right = both || term % 2 == 0;
      if (left) LOAD(4, next());
      if (right) LOAD(6, next());
      MULTIPLY(0, 4, 6);
      if (right) LOAD(7, next());
      MULTIPLY(1, 4, 7);
      if (left) LOAD(5, next());
      MULTIPLY(2, 5, 6);
      MULTIPLY(3, 5, 7);
    }
}

// Blocks of 2 × 2 tiles of sums that lie in memory, the next ones of `bytes`: `depth` steps of four products are added
// to each. The operands are those of 16 kB.
template <int depth>
void add_to_sums(long blocks, long bytes) {
  const char* base = (const char*)operands;
  long at = 0, to = 0;
  const auto next = [&] {
    const char* tile = base + at;
    at = (at + kTile) & ((16 << 10) - 1);
    return tile;
  };
  char* before = sums;
  for (long n = 0; n < blocks; ++n) {
    to = (to + 4 * kTile) & (bytes - 1);
    char* block = sums + to;
#pragma GCC unroll 8
    for (int step = 0; step < depth; ++step) {
      LOAD(4, next());
      LOAD(6, next());
      if (!step) EXCHANGE(0, before, block);
      MULTIPLY(0, 4, 6);
      LOAD(7, next());
      if (!step) EXCHANGE(1, before, block);
      MULTIPLY(1, 4, 7);
      LOAD(5, next());
      if (!step) EXCHANGE(2, before, block);
      MULTIPLY(2, 5, 6);
      if (!step) EXCHANGE(3, before, block);
      MULTIPLY(3, 5, 7);
    }
    before = block;
  }
}

template <int depth>
void print_sums(double cycles) {
  constexpr long kBlocks = 500;
  double took[2];
  for (int n = 0; n < 2; ++n)
    took[n] = shortest([&] { add_to_sums<depth>(kBlocks, n ? kSums : 8 << 10); }) / (4 * depth * kBlocks) / cycles;
  printf("| %d | %.1f | %.1f |\n", 4 * depth, took[0], took[1]);
}

// Cycles of a vector that is stored, the next one of `bytes`.
double store_vectors(long bytes, double cycles) {
  constexpr long kCount = 4096;
  const __m512 x = _mm512_set1_ps(1);
  return shortest([&] {
           for (long n = 0; n < kCount; ++n)
             __asm__ volatile("vmovaps %1, %0" : "=m"(*(__m512*)(sums + (n * 64 & (bytes - 1)))) : "v"(x));
         }) /
         kCount / cycles;
}

enum class Vector { kMultiplyAdd, kAdd };

// Groups of four products, where the unit works, and `count` vector instructions after each product, of 12 chains.
template <Vector kind, bool unit, int count>
void beside(long groups) {
  __m512 x[12];
  for (__m512& one : x) one = _mm512_set1_ps(1);
  const __m512 a = _mm512_set1_ps(0.999f), b = _mm512_set1_ps(0.001f);
  for (long n = 0; n < groups; ++n)
#pragma GCC unroll 4
    for (int tile = 0; tile < 4; ++tile) {
      if (unit && tile == 0) MULTIPLY(0, 4, 6);
      if (unit && tile == 1) MULTIPLY(1, 4, 7);
      if (unit && tile == 2) MULTIPLY(2, 5, 6);
      if (unit && tile == 3) MULTIPLY(3, 5, 7);
#pragma GCC unroll 64
      for (int m = 0; m < count; ++m) {
        __m512& one = x[(tile * count + m) % 12];
        if (kind == Vector::kMultiplyAdd) __asm__ volatile("vfmadd213ps %2, %1, %0" : "+v"(one) : "v"(a), "v"(b));
        else __asm__ volatile("vaddps %1, %0, %0" : "+v"(one) : "v"(b));
      }
    }
}

template <Vector kind, int count>
void print_beside(const char* name, double cycles) {
  constexpr long kGroups = 500;
  const double alone = shortest([] { beside<kind, false, count>(kGroups); }) / (4 * kGroups) / cycles;
  const double both = shortest([] { beside<kind, true, count>(kGroups); }) / (4 * kGroups) / cycles;
  printf("| %d %s | %.1f | %.1f |\n", count, name, alone, both);
}

// Cycles that a product and the store of its sums take behind `work` multiply-adds that wait for each other, of four
// cycles each. kept: whether an unused product stands in each 64 of these.
double after_vectors(long work, bool kept, double cycles) {
  constexpr long kCount = 100;
  __m512 x = _mm512_set1_ps(1);
  const auto run = [&](bool product) {
    for (long n = 0; n < kCount; ++n) {
      for (long m = 0; m < work; ++m) {
        __asm__ volatile("vfmadd213ps %0, %0, %0" : "+v"(x));
        if (kept && m % 64 == 0) MULTIPLY(1, 4, 7);
      }
      if (!product) continue;
      MULTIPLY(0, 4, 6);
      STORE(0, sums);
      __asm__ volatile("lfence" ::: "memory");
    }
  };
  return (shortest([&] { run(true); }) - shortest([&] { run(false); })) / kCount / cycles;
}

void fill(bool zeros) {
  for (uint16_t& one : operands) {
    const float x = zeros ? 0 : 2.0f * (float)rand() / (float)RAND_MAX - 1;
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    one = (uint16_t)(bits >> 16);
  }
}

}  // namespace

int main() {
  constexpr long kPermit = 0x1023, kTiles = 18;
  if (syscall(SYS_arch_prctl, kPermit, kTiles)) return puts("no matrix unit"), 1;
  struct {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } config;
  __asm__ volatile("ldtilecfg %0" ::"m"(config));
  const double one = cycle();
  printf("%.2f GHz\n\n| operands | zeros | random |\n| --- | ---: | ---: |\n", 1e-9 / one);
  double took[2][4];
  const long sizes[] = {16 << 10, 256 << 10, 1 << 20, 8 << 20};
  for (int random = 0; random < 2; ++random) {
    fill(!random);
    for (int n = 0; n < 4; ++n) took[random][n] = shortest([&] { multiply(600, sizes[n]); }) / (600 * kStep) / one;
  }
  for (int n = 0; n < 4; ++n) printf("| of %ld kB | %.1f | %.1f |\n", sizes[n] >> 10, took[0][n], took[1][n]);
  printf("\n| products a block of sums | sums of 8 kB | of 64 kB |\n| --- | ---: | ---: |\n");
  print_sums<1>(one);
  print_sums<2>(one);
  print_sums<4>(one);
  print_sums<8>(one);
  printf("\nA vector that is stored: %.1f cycles in 8 kB, %.1f in 64 kB\n", store_vectors(8 << 10, one),
         store_vectors(kSums, one));
  printf("\n| vector instructions a product | alone | beside it |\n| --- | ---: | ---: |\n");
  LOAD(4, operands);
  LOAD(5, operands + 512);
  LOAD(6, operands + 1024);
  LOAD(7, operands + 1536);
  print_beside<Vector::kMultiplyAdd, 8>("multiply-adds", one);
  print_beside<Vector::kMultiplyAdd, 16>("multiply-adds", one);
  print_beside<Vector::kMultiplyAdd, 32>("multiply-adds", one);
  print_beside<Vector::kMultiplyAdd, 64>("multiply-adds", one);
  print_beside<Vector::kAdd, 16>("additions", one);
  print_beside<Vector::kAdd, 32>("additions", one);
  print_beside<Vector::kAdd, 64>("additions", one);
  printf(
      "\n| cycles of vector work before a product | its cycles | where the unit is kept awake |\n| ---: | ---: | ---: "
      "|\n");
  for (const long work : {100, 400, 500, 600, 1000, 4000})
    printf("| %ld | %.0f | %.0f |\n", 4 * work, after_vectors(work, false, one), after_vectors(work, true, one));
  __asm__ volatile("tilerelease");
}
