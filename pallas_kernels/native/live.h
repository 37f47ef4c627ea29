// The rows of a call that mean something. The token axis of a step is padded to one of a few sizes:
// decode rows, then padding, then the tokens of prompts, then padding. Rows of padding are neither
// read nor written: clearing them would take as long as computing a few.

#ifndef JAXPAGED_NATIVE_LIVE_H_
#define JAXPAGED_NATIVE_LIVE_H_

#include <algorithm>
#include <cstdint>

#include "arguments.h"

namespace jaxpaged {

// Rows [0, head) and [first, first + tail) of `total`.
struct LiveRows {
  int64_t total = 0, first = 0, head = 0, tail = 0;

  int64_t count() const { return head + tail; }
  // What lies between the two.
  int64_t gap() const { return first - head; }

  // Does `work(begin, end)` for the stretches of rows that live ones [i, i_end) are.
  template <typename Work>
  void stretches(int64_t i, int64_t i_end, const Work& work) const {
    if (i < std::min(i_end, head)) work(i, std::min(i_end, head));
    if (std::max(i, head) < i_end) work(std::max(i, head) + gap(), i_end + gap());
  }
};

// From the argument `live`, their numbers: i32 [2].
inline LiveRows take_live(Arguments& args, int64_t total, int64_t first) {
  LiveRows live{total, first};
  args.require(0 <= first && first <= total,
               "first is " + words(first) + ", expected 0 to " + words(total));
  const auto counts = args.take("live", {ffi::S32}, {2});
  if (!counts || !args.good()) return live;
  const int32_t* found = counts->typed_data<int32_t>();
  live.head = std::clamp<int64_t>(found[0], 0, first);
  live.tail = std::clamp<int64_t>(found[1], 0, total - first);
  return live;
}

}  // namespace jaxpaged

#endif  // JAXPAGED_NATIVE_LIVE_H_
