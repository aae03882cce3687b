// Items of work: threads take them from an atomic counter, each with scratch of its own.
#pragma once
#include "core/memory.h"
#include "core/place.h"

namespace regard {

// The memory of one thread while it works; `at` is null if there is not enough.
struct Workspace {
  size_t size;
  void* const at;

  explicit Workspace(size_t bytes) : size(bytes), at(large() ? map_memory(size) : take_aligned(size)) {}
  ~Workspace() {
    if (!large()) free_aligned(at);
    else if (at) unmap_memory(at, size);
  }
  Workspace(const Workspace&) = delete;
  bool large() const { return size >= 1 << 20; }
};

template <class Task>
struct Work {
  const Task* task;
  int64_t items, next;
  int failed;

  static void join(int64_t, int64_t, void* context) {
    Work& work = *(Work*)context;
    const Workspace memory((size_t)work.task->scratch() * sizeof(float));
    if (!memory.at) {
      __atomic_store_n(&work.failed, 1, __ATOMIC_RELAXED);
      return;
    }
    for (;;) {
      int64_t item = __atomic_fetch_add(&work.next, 1, __ATOMIC_RELAXED);
      if (item >= work.items) break;
      work.task->run(item, (float*)memory.at);
    }
  }
};

// Calls task.run(item, scratch) for every item, with task.scratch() floats; returns 1 if memory ran out, or if torch
// could not run all threads.
template <class Task>
static int32_t share(const Task& task, int64_t items, int64_t threads, regard_parallel parallel) {
  Work<Task> work{&task, items, 0, 0};
  threads = threads < items ? threads : items;
  if (threads <= 1 || !parallel) Work<Task>::join(0, 1, &work);
  else if (parallel(0, threads, 1, Work<Task>::join, &work)) return 1;
  return work.failed;
}

}  // namespace regard
