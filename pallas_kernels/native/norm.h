// What stands between the products of a layer.

#ifndef JAXPAGED_NATIVE_NORM_H_
#define JAXPAGED_NATIVE_NORM_H_

#include "elements.h"
#include "kernels.h"
#include "vectors.h"

namespace jaxpaged {
namespace JAXPAGED_ISA {
namespace {

static void round_all(const float* from, uint16_t* to, int64_t count) {
  convert<kBFloat16>(from, to, count);
}

// In lanes, and then by halves: an order that only the width decides.
JAXPAGED_INLINE float sum_of_squares(const float* x, int64_t width) {
  Floats sum = {};
  int64_t i = 0;
  for (; i + kWidth <= width; i += kWidth) {
    const Floats some = load<Floats>(x + i);
    sum = multiply_add(some, some, sum);
  }
  if (i < width) {
    const Floats some = load_some<kFloat32>(x + i, width - i);
    sum = multiply_add(some, some, sum);
  }
  return sum_of(sum);
}

template <ElementType kType>
static void normalize_rows(const RootMeanSquareNorm& n, int64_t first, int64_t end) {
  const auto* weight = static_cast<const unsigned char*>(n.weight);
  for (int64_t row = first; row < end; ++row) {
    const float* x = n.x + row * n.width;
    float* out = n.out + row * n.width;
    const float mean = sum_of_squares(x, n.width) / static_cast<float>(n.width);
    const float factor = 1.0f / __builtin_sqrtf(mean + n.eps);
    int64_t i = 0;
    for (; i + kWidth <= n.width; i += kWidth) {
      const Floats w = load_elements<kType>(weight + i * size_of(kType)) + n.offset;
      store(out + i, load<Floats>(x + i) * factor * w);
    }
    if (i < n.width) {
      const int64_t left = n.width - i;
      const Floats w = load_some<kType>(weight + i * size_of(kType), left) + n.offset;
      store_some<kFloat32>(out + i, load_some<kFloat32>(x + i, left) * factor * w, left);
    }
  }
}

static void normalize(const RootMeanSquareNorm& n, int64_t first, int64_t end) {
  switch (n.weight_type) {
    case kBFloat16: return normalize_rows<kBFloat16>(n, first, end);
    case kFloat16: return normalize_rows<kFloat16>(n, first, end);
    default: return normalize_rows<kFloat32>(n, first, end);
  }
}

}  // namespace
}  // namespace JAXPAGED_ISA
}  // namespace jaxpaged

#endif  // JAXPAGED_NATIVE_NORM_H_
