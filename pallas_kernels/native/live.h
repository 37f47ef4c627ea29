// The rows of a call that mean something. The token axis of a step is padded to one of a few sizes:
// decode rows, then padding, then the tokens of prompts, then padding.

#ifndef JAXPAGED_NATIVE_LIVE_H_
#define JAXPAGED_NATIVE_LIVE_H_

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "arguments.h"

namespace jaxpaged {

// Rows [0, head) and [first, first + tail) of `total`.
struct LiveRows {
  int64_t total = 0, first = 0, head = 0, tail = 0;

  int64_t count() const { return head + tail; }
  // What lies between the two.
  int64_t gap() const { return first - head; }
  // The row that is number i of the live ones.
  int64_t row(int64_t i) const { return i < head ? i : i + gap(); }
  // The row that is number i of the others.
  int64_t dead_row(int64_t i) const { return i < gap() ? head + i : i + count(); }
  int64_t dead() const { return total - count(); }

  // Does `work(begin, end)` for the stretches of rows that live ones [i, i_end) are.
  template <typename Work>
  void stretches(int64_t i, int64_t i_end, const Work& work) const {
    if (i < std::min(i_end, head)) work(i, std::min(i_end, head));
    if (std::max(i, head) < i_end) work(row(std::max(i, head)), i_end + gap());
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

// Sets the other rows of a result to 0, in pieces for several threads.
struct Blank {
  LiveRows live;
  void* out;
  int64_t row_bytes;

  int64_t rows_of_piece() const {
    constexpr int64_t kBytesOfPiece = 256 * 1024;
    return std::max<int64_t>(kBytesOfPiece / std::max<int64_t>(row_bytes, 1), 1);
  }
  int64_t pieces() const { return (live.dead() + rows_of_piece() - 1) / rows_of_piece(); }
  void clear(int64_t piece) const {
    const int64_t begin = piece * rows_of_piece();
    const int64_t end = std::min(begin + rows_of_piece(), live.dead());
    for (int64_t i = begin; i < end; ++i) {
      std::memset(static_cast<char*>(out) + live.dead_row(i) * row_bytes, 0,
                  static_cast<size_t>(row_bytes));
    }
  }
};

}  // namespace jaxpaged

#endif  // JAXPAGED_NATIVE_LIVE_H_
