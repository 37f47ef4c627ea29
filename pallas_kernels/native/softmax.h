// The online softmax (Milakov and Gimelshein, 2018), in base 2.
//
// A row's running maximum is rounded up to a whole number, so that rescaling its sums is exact, and
// does not have to be done while the maximum stays.

#ifndef JAXPAGED_NATIVE_SOFTMAX_H_
#define JAXPAGED_NATIVE_SOFTMAX_H_

#include "context.h"
#include "vectors.h"

namespace jaxpaged {
namespace JAXPAGED_ISA {
namespace {

// The maximum of a row that has seen nothing.
constexpr float kLowest = -0x1p30f;

// 2^exponent, for a whole number <= 0, exactly; 0 below the smallest normal number.
JAXPAGED_INLINE float power_of_two(float exponent) {
  if (!(exponent >= -126.0f)) return 0.0f;
  return bits<float>(static_cast<uint32_t>(static_cast<int32_t>(exponent) + 127) << 23);
}

// Sums of one row: of weights, lane by lane, and of weighted values.
struct RowSums {
  float* top;
  float* total;  // [kWidth]
  float* mixed;  // [stride]
};

// Factors of the tokens of a chunk in 8-bit caches, else null.
struct Factors {
  const float* keys;
  const float* values;
};

JAXPAGED_INLINE void raise(const RowSums& sums, float top, int64_t stride) {
  if (*sums.top != kLowest) {
    const float keep = power_of_two(*sums.top - top);
    store(sums.total, load<Floats>(sums.total) * keep);
    for (int64_t d = 0; d < stride; d += kWidth) {
      store(sums.mixed + d, load<Floats>(sums.mixed + d) * keep);
    }
  }
  *sums.top = top;
}

// Turns a row's dot products with a chunk's keys into weights for its values, in place, as
// floats or (pairs) bfloat16. Only tokens in `seen` count.
template <bool kPairs>
JAXPAGED_INLINE void weigh(const Attention& call, Range seen, const Factors& factors, float* row,
                           int64_t stride, const RowSums& sums) {
  const int begin = static_cast<int>(seen.begin / kWidth);
  const int end = static_cast<int>((seen.end + kWidth - 1) / kWidth);
  const Ints first = Ints{} + static_cast<int32_t>(seen.begin);
  const Ints last = Ints{} + static_cast<int32_t>(seen.end);
  Floats scores[kChunkVectors];
  Floats highest = all(-__builtin_inff());
  for (int v = begin; v < end; ++v) {
    Floats x = load<Floats>(row + v * kWidth);
    if (factors.keys) x *= load<Floats>(factors.keys + v * kWidth);
    x *= call.scale;
    if (call.cap != 0.0f) x = tanh_of(x) * call.cap;
    const Ints lane = iota() + v * kWidth;
    x = lane >= first ? x : all(-__builtin_inff());
    x = lane < last ? x : all(-__builtin_inff());
    scores[v] = x;
    highest = larger(x, highest);
  }
  if (any_above(highest, *sums.top)) raise(sums, __builtin_ceilf(largest(highest)), stride);
  const float top = *sums.top;
  Floats total = load<Floats>(sums.total);
  for (int v = begin; v < end; ++v) {
    Floats weight = exp2_of<kPairs>(scores[v] - top);
#if JAXPAGED_PAIRS
    if (kPairs) {
      // What is summed is what the values are multiplied with.
      const Halves rounded = bits<Halves>(_mm512_cvtneps_pbh((__m512)weight));
      total += bits<Floats>(__builtin_convertvector(rounded, Words) << 16);
      // A row of words is half as long, and never written before it was read.
      store(reinterpret_cast<uint16_t*>(row) + v * kWidth, rounded);
      continue;
    }
#endif
    total += weight;
    if (factors.values) weight *= load<Floats>(factors.values + v * kWidth);
    store(row + v * kWidth, weight);
  }
  store(sums.total, total);
}

}  // namespace
}  // namespace JAXPAGED_ISA
}  // namespace jaxpaged

#endif  // JAXPAGED_NATIVE_SOFTMAX_H_
