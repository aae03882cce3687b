// The instruction sets, and the one that this object is compiled for: Isa, with its width W and what it does in
// instructions of its own. To add one: its header in this folder, its line in the list below, and in CMakeLists.txt its
// line with the compiler's flags.
#pragma once

#if !defined(REGARD_ISA)  // the header, by its path: CMakeLists.txt gives it
#define REGARD_ISA "isa/base.h"
#endif
#include REGARD_ISA

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/auxv.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace regard {

struct InstructionSet {
  const char* name;
  bool (*runs)();  // whether this processor has it
};

#if defined(__x86_64__)
// x86-64-v3, with all that the compiler may use of it: some virtual machines hide a part.
static bool runs_avx2() {
  constexpr unsigned kMovbe = 1u << 22, kFloat16 = 1u << 29, kLeadingZeros = 1u << 5;
  unsigned a, b, features, extended, d;
  if (!__get_cpuid(1, &a, &b, &features, &d) || !__get_cpuid(0x80000001, &a, &b, &extended, &d)) return false;
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
         __builtin_cpu_supports("bmi2") && (features & kMovbe) && (features & kFloat16) && (extended & kLeadingZeros);
}
static bool runs_avx512() {
  return runs_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512cd");
}
static bool runs_avx512bf16() { return runs_avx512() && __builtin_cpu_supports("avx512bf16"); }
// Intel's cores multiply pairs at half the rate of floats, which costs more than widening: an attention in bfloat16
// took 1.5 times as long on Sapphire Rapids. AMD's have the same rate for both.
static bool slow_pairs() { return __builtin_cpu_is("intel"); }

// Whether the processor has tiles of bfloat16, and the system lets this process use them. Linux wants to be asked:
// memory for the tiles is then saved for each thread that uses them, and signals need a larger stack; where some
// thread's is too small, the answer is no.
static bool runs_amx() {
#if defined(__linux__)
  constexpr unsigned kTiles = 1u << 24 | 1u << 22;             // AMX-TILE, AMX-BF16
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // of arch_prctl
  unsigned a, b, c, d;
  if (!runs_avx512bf16() || !__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kTiles) != kTiles) return false;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
#endif

#if defined(__aarch64__)
#if defined(__APPLE__)
// What macOS says of the processor; 0 where it does not know the name.
static int64_t asked(const char* name) {
  int64_t found = 0;  // of 4 bytes or 8, the least first
  size_t bytes = sizeof found;
  return sysctlbyname(name, &found, &bytes, nullptr, 0) == 0 ? found : 0;
}
#endif

// Whether the processor has BFDOT and BFMMLA, by what the system says of it.
static bool runs_neonbf16() {
#if defined(__linux__)
  constexpr unsigned long kBFloat16 = 1ul << 14;  // HWCAP2_BF16
  return getauxval(AT_HWCAP2) & kBFloat16;
#elif defined(__APPLE__)
  return asked("hw.optional.arm.FEAT_BF16");
#else
  return false;
#endif
}

// Whether vectors of SVE have the 256 bits for which isa/sve256.h is compiled, with BFMMLA on them. Where they are
// shorter (Neoverse V2), NEON does as much in a cycle.
static bool runs_sve256() {
#if defined(__linux__)
  constexpr unsigned long kSve = 1ul << 22, kSveBFloat16 = 1ul << 12;  // HWCAP_SVE, HWCAP2_SVEBF16
  constexpr int kGetVectorLength = 51, kLengthMask = 0xffff;           // PR_SVE_GET_VL: bytes, and flags above them
  if (!(getauxval(AT_HWCAP) & kSve) || !(getauxval(AT_HWCAP2) & kSveBFloat16)) return false;
  const int length = prctl(kGetVectorLength);
  return length > 0 && (length & kLengthMask) == 32;
#else
  return false;
#endif
}

// Whether the matrix unit adds outer products of 16 floats, and of pairs of bfloat16, for which isa/sme.h is compiled.
static bool runs_sme() {
#if defined(__linux__)
  constexpr unsigned long kNeeds = 1ul << 23 | 1ul << 28 | 1ul << 29;  // HWCAP2_SME, SME_B16F32, SME_F32F32
  constexpr int kGetVectorLength = 64, kLengthMask = 0xffff;           // PR_SME_GET_VL: bytes, and flags above them
  if (!runs_neonbf16() || (getauxval(AT_HWCAP2) & kNeeds) != kNeeds) return false;
  const int length = prctl(kGetVectorLength);
  return length > 0 && (length & kLengthMask) == 64;
#elif defined(__APPLE__)
  return runs_neonbf16() && asked("hw.optional.arm.FEAT_SME") && asked("hw.optional.arm.SME_F32F32") &&
         asked("hw.optional.arm.SME_B16F32") && asked("hw.optional.arm.sme_max_svl_b") == 64;
#else
  return false;
#endif
}
#endif

constexpr InstructionSet kInstructionSets[] = {
// of this kind of processor, best first
#if defined(__x86_64__)
    {"amx_emulated", runs_avx2},  // built for tests alone, which are then to run on it
    {"amx", runs_amx},
    {"avx512bf16", [] { return runs_avx512bf16() && !slow_pairs(); }},
    {"avx512", runs_avx512},
    {"avx512bf16", [] { return runs_avx512bf16() && slow_pairs(); }},
    {"avx2", runs_avx2},
#elif defined(__aarch64__)
    {"sme", runs_sme},
    {"sve256", runs_sve256},
    {"neonbf16", runs_neonbf16},
    {"neon", [] { return true; }},  // a part of the architecture
#endif
    {"base", [] { return true; }},
};

// The n-th of those that this processor runs; null past the last.
static const char* runnable(int64_t n) {
  for (const InstructionSet& each : kInstructionSets)
    if (each.runs() && n-- == 0) return each.name;
  return nullptr;
}

}  // namespace regard
