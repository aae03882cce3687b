// Random numbers, and buffers of exactly so many of them.
#pragma once
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <utility>
#include <vector>

#include "abi/structs.h"

namespace {

struct Random {
  uint64_t state;

  uint64_t next() {  // splitmix64
    uint64_t x = state += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
  }
  int64_t between(int64_t least, int64_t most) { return least + (int64_t)(next() % (uint64_t)(most - least + 1)); }
  bool chance(int of) { return next() % (uint64_t)of == 0; }
  float real() { return (float)between(-1000, 1000) / 700; }
};

// An element of one of the kernels' dtypes, or an integer; kDtypes: as operands tell it.
enum Kind { kF32, kBF16, kF16, kF64, kI32, kI64, kByte, kI8 };
constexpr int64_t kDtypes[] = {REGARD_F32, REGARD_BF16, REGARD_F16,  REGARD_F64,
                               REGARD_I32, REGARD_I64,  REGARD_BOOL, REGARD_I8};
int64_t bytes_of(Kind kind) {
  return kind == kF32 || kind == kI32 ? 4 : kind == kF64 || kind == kI64 ? 8 : kind == kByte || kind == kI8 ? 1 : 2;
}

struct Buffer {
  void* at;
  Kind kind;
  int64_t count;
};

// Buffers that live as long as it does.
struct RandomMemory {
  Random& r;
  std::vector<Buffer> memory;
  std::vector<std::pair<int32_t*, int32_t>> touched;  // numbers that were changed, and what they were

  explicit RandomMemory(Random& random) : r(random) {}
  ~RandomMemory() {
    for (const Buffer& buffer : memory) free(buffer.at);
  }

  void* make(Kind kind, int64_t count) {
    char* p = (char*)malloc((size_t)(count * bytes_of(kind)));
    memory.push_back({p, kind, count});
    for (int64_t n = 0; n < count; ++n) {
      const float x = r.real();
      uint32_t u;
      memcpy(&u, &x, 4);
      const uint16_t half =
          kind == kBF16 ? (uint16_t)(u >> 16) : (uint16_t)(0x3000 + r.next() % 0xc00 + (r.next() & 1) * 0x8000);
      if (kind == kF32) memcpy(p + 4 * n, &x, 4);
      else if (kind == kBF16 || kind == kF16) memcpy(p + 2 * n, &half, 2);
      else
        memset(p + n * bytes_of(kind),
               kind == kByte ? (int)(r.next() & 1)
               : kind == kI8 ? (int)(r.next() & 255)
                             : 0,
               (size_t)bytes_of(kind));
    }
    return p;
  }

  template <class T>
  T* numbers(Kind kind, int64_t count, int64_t least, int64_t most) {
    T* p = (T*)make(kind, count);
    for (int64_t n = 0; n < count; ++n) p[n] = (T)r.between(least, most);
    return p;
  }

  // One number of a buffer becomes another.
  void touch(int32_t* p, int64_t value) {
    touched.push_back({p, *p});
    *p = (int32_t)value;
  }
};

}  // namespace
