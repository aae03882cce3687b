// Prints a number that follows from every bit that random right calls compute: the same one, whatever memory held
// before. Arguments: how many calls, a seed.
#include <math.h>

#include "native_fuzz.h"

namespace {

// Of the bits of one element; those of all NaN are the same.
uint64_t bits_of(const Buffer& buffer, int64_t n) {
  uint64_t bits = 0;
  memcpy(&bits, (const char*)buffer.at + n * bytes_of(buffer.kind), (size_t)bytes_of(buffer.kind));
  double x = 0;
  if (buffer.kind == kF32) x = ((const float*)buffer.at)[n];
  if (buffer.kind == kF64) x = ((const double*)buffer.at)[n];
  if (buffer.kind == kBF16) x = regard::bf16_to_float((uint16_t)bits);
  if (buffer.kind == kF16) x = regard::fp16_to_float((uint16_t)bits);
  return isnan(x) ? ~(uint64_t)0 : bits;
}

}  // namespace

int main(int count, char** words) {
  if (count < 3) {
    printf("expected a number of calls and a seed\n");
    return 2;
  }
  uint64_t found = 0;
  for (long long n = 0; n < atoll(words[1]); ++n) {
    Random random{(uint64_t)(atoll(words[2]) * 1000003 + n)};
    Case one(random, (int)(n % 3), Programs::kWritten);
    for (Entry entry : one.entries()) {
      if (const int32_t code = one.run(entry, nullptr)) {
        printf("call %lld: %s returned %d\n", n, kEntries[entry], code);
        return 1;
      }
      for (const Buffer& buffer : one.memory)
        for (int64_t k = 0; k < buffer.count; ++k) found = found * 0x100000001b3u + bits_of(buffer, k);
    }
    if (n % 100 == 99) printf("%lld calls: %llx\n", n + 1, (unsigned long long)found);
  }
}
