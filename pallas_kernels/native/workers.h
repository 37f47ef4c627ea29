// Sharing work among the threads of XLA's pool.

#ifndef JAXPAGED_NATIVE_WORKERS_H_
#define JAXPAGED_NATIVE_WORKERS_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <utility>
#include <utility>

#include "xla/ffi/api/ffi.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace jaxpaged {

// The same floating-point mode on all threads: to the nearest, denormals are 0. XLA's threads and
// the callers of XLA differ in that, and a result must not tell who computed it.
class FloatMode {
 public:
#if defined(__x86_64__)
  FloatMode() : before_(_mm_getcsr()) { _mm_setcsr(0x9fc0); }
  ~FloatMode() { _mm_setcsr(before_); }

 private:
  unsigned before_;
#else
  FloatMode() {}
  ~FloatMode() {}
#endif
  FloatMode(const FloatMode&) = delete;
  FloatMode& operator=(const FloatMode&) = delete;
};

// Memory of a thread to work in, which grows to what was needed most.
class Scratch {
 public:
  ~Scratch() { std::free(memory_); }

  // Null if there is no memory.
  void* of_size(size_t bytes) {
    if (bytes > size_) {
      std::free(memory_);
      size_ = (bytes + 4095) / 4096 * 4096;
      memory_ = std::aligned_alloc(64, size_);
      if (memory_ == nullptr) size_ = 0;
    }
    return memory_;
  }

 private:
  void* memory_ = nullptr;
  size_t size_ = 0;
};

// `run(i)` for i from 0 to total - 1, by the calling thread and up to `helpers` of the pool, in
// this order as far as they begin. Returns when all are done.
//
// A helper may get a thread long after the work is over: while others run the same program, all
// threads of the pool may be callers themselves. So nobody waits for one that has not begun, and
// the counters live until the last helper has seen that nothing is left.
template <typename Run>
void share(xla::ffi::ThreadPool& pool, int64_t total, int64_t helpers, const Run& run) {
  struct Counters {
    std::atomic<int64_t> next{0};
    std::atomic<int64_t> done{0};
    std::mutex guard;
    std::condition_variable all_done;
  };
  if (helpers <= 0 || total <= 1) {
    const FloatMode mode;
    for (int64_t i = 0; i < total; ++i) run(i);
    return;
  }
  const auto counters = std::make_shared<Counters>();
  const Run* work = &run;  // valid while something is left to do
  const auto help = [counters, work, total] {
    const FloatMode mode;
    for (;;) {
      const int64_t i = counters->next.fetch_add(1, std::memory_order_relaxed);
      if (i >= total) return;
      (*work)(i);
      if (counters->done.fetch_add(1, std::memory_order_acq_rel) + 1 == total) {
        const std::lock_guard<std::mutex> lock(counters->guard);
        counters->all_done.notify_one();
      }
    }
  };
  for (int64_t i = 0; i < helpers && i < total - 1; ++i) {
    auto copy = help;
    pool.Schedule(std::move(copy));
  }
  help();
  const auto finished = [&] { return counters->done.load(std::memory_order_acquire) == total; };
  constexpr int kSpins = 2000;  // a few microseconds: pieces of work are short
  for (int spin = 0; spin < kSpins && !finished(); ++spin) {
#if defined(__x86_64__)
    _mm_pause();
#endif
  }
  std::unique_lock<std::mutex> lock(counters->guard);
  counters->all_done.wait(lock, finished);
}

}  // namespace jaxpaged

#endif  // JAXPAGED_NATIVE_WORKERS_H_
