// Memory that begins at a multiple of 64 bytes: of the heap, or mapped by itself, on each system.
#pragma once
#include <stdlib.h>
#if defined(_WIN32)
#include <malloc.h>
// Declared here: <windows.h> defines macros by the names of functions, such as min and max.
extern "C" __declspec(dllimport) void* __stdcall VirtualAlloc(void*, size_t, unsigned long kind, unsigned long access);
extern "C" __declspec(dllimport) int __stdcall VirtualFree(void*, size_t, unsigned long kind);
#else
#include <sys/mman.h>
#endif

namespace regard {

// Null if there is not enough.
static inline void* take_aligned(size_t bytes) {
#if defined(_WIN32)
  return _aligned_malloc(bytes, 64);
#else
  void* at = nullptr;
  return posix_memalign(&at, 64, bytes) ? nullptr : at;
#endif
}

static inline void free_aligned(void* at) {
#if defined(_WIN32)
  _aligned_free(at);
#else
  free(at);
#endif
}

// Memory of the heap for as long as this lives, which later calls get again as it is: its pages are there. `at` is null
// if there is not enough.
struct HeapMemory {
  void* const at;

  explicit HeapMemory(size_t bytes) : at(take_aligned(bytes)) {}
  ~HeapMemory() { free_aligned(at); }
  HeapMemory(const HeapMemory&) = delete;
};

// For much of it: in the heap it would lie next to the caller's tensors, and freeing it would leave a hole. Null if
// there is not enough.
static inline void* map_memory(size_t bytes) {
#if defined(_WIN32)
  constexpr unsigned long kReserveAndCommit = 0x3000, kReadWrite = 4;
  return VirtualAlloc(nullptr, bytes, kReserveAndCommit, kReadWrite);
#else
  void* const at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return at == MAP_FAILED ? nullptr : at;
#endif
}

static inline void unmap_memory(void* at, size_t bytes) {
#if defined(_WIN32)
  (void)bytes;
  constexpr unsigned long kRelease = 0x8000;
  VirtualFree(at, 0, kRelease);
#else
  munmap(at, bytes);
#endif
}

}  // namespace regard
