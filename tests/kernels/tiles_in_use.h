// Arm's matrix unit as a function leaves it that calls another one while it holds numbers: ZA on, with its contents.
#pragma once
#include <stdint.h>
#include <string.h>

#if defined(__aarch64__)
constexpr int kTileRows = 64;  // of 64 bytes: vectors of 512 bits

static void fill_tiles(int with) {
  alignas(64) char row[kTileRows];
  __asm__ volatile(".arch_extension sme\nsmstart za" ::: "memory");
  for (int64_t n = 0; n < kTileRows; ++n) {
    memset(row, (int)(with + n) % 256, sizeof row);
    __asm__ volatile(".arch_extension sme\nmov w12, %w0\nldr za[w12, 0], [%1]" ::"r"(n), "r"(row) : "memory", "x12");
  }
}

// Whether they hold what fill_tiles put there; gives them back.
static bool leave_tiles(int with) {
  alignas(64) char row[kTileRows], right[kTileRows];
  uint64_t state;
  __asm__ volatile("mrs %0, s3_3_c4_c2_2" : "=r"(state));  // SVCR
  bool same = state == 2;                                  // tiles, and vectors of NEON
  for (int64_t n = 0; same && n < kTileRows; ++n) {
    memset(right, (int)(with + n) % 256, sizeof right);
    __asm__ volatile(".arch_extension sme\nmov w12, %w0\nstr za[w12, 0], [%1]" ::"r"(n), "r"(row) : "memory", "x12");
    same = memcmp(row, right, sizeof row) == 0;
  }
  __asm__ volatile(".arch_extension sme\nsmstop za" ::: "memory");
  return same;
}
#else
static void fill_tiles(int) {}
static bool leave_tiles(int) { return true; }
#endif
