// Rotary positions (Su et al., 2021), in the layout that turns element i with element i + half.

#ifndef JAXPAGED_NATIVE_ROTATE_H_
#define JAXPAGED_NATIVE_ROTATE_H_

#include "elements.h"
#include "kernels.h"
#include "vectors.h"

namespace jaxpaged {
namespace JAXPAGED_ISA {
namespace {

// Elements beyond the first 2 * half stay.
template <ElementType kType>
JAXPAGED_INLINE void turn_head(const Rotation& r, const float* from, const float* cos,
                               const float* sin, unsigned char* to) {
  constexpr int kSize = size_of(kType);
  int64_t i = 0;
  for (; i + kWidth <= r.half; i += kWidth) {
    const Floats a = load<Floats>(from + i), b = load<Floats>(from + r.half + i);
    const Floats c = load<Floats>(cos + i), s = load<Floats>(sin + i);
    store_elements<kType>(to + i * kSize, a * c - b * s);
    store_elements<kType>(to + (r.half + i) * kSize, b * c + a * s);
  }
  if (i < r.half) {
    const int64_t left = r.half - i;
    const Floats a = load_some<kFloat32>(from + i, left);
    const Floats b = load_some<kFloat32>(from + r.half + i, left);
    const Floats c = load_some<kFloat32>(cos + i, left);
    const Floats s = load_some<kFloat32>(sin + i, left);
    store_some<kType>(to + i * kSize, a * c - b * s, left);
    store_some<kType>(to + (r.half + i) * kSize, b * c + a * s, left);
  }
  convert<kType>(from + 2 * r.half, to + 2 * r.half * kSize, r.dim - 2 * r.half);
}

template <ElementType kType>
static void rotate_rows(const Rotation& r, int64_t first, int64_t end) {
  const int64_t bytes = r.dim * size_of(kType);
  for (int64_t row = first; row < end; ++row) {
    const float* cos = r.cos + row * r.half;
    const float* sin = r.sin + row * r.half;
    for (int64_t head = row * r.kv_heads; head < (row + 1) * r.kv_heads; ++head) {
      const float* from = r.x + head * (r.group + 2) * r.dim;
      unsigned char* q = static_cast<unsigned char*>(r.q) + head * r.group * bytes;
      for (int64_t g = 0; g < r.group; ++g, from += r.dim) {
        turn_head<kType>(r, from, cos, sin, q + g * bytes);
      }
      turn_head<kType>(r, from, cos, sin, static_cast<unsigned char*>(r.k) + head * bytes);
      convert<kType>(from + r.dim, static_cast<unsigned char*>(r.v) + head * bytes, r.dim);
    }
  }
}

static void rotate(const Rotation& r, int64_t first, int64_t end) {
  switch (r.type) {
    case kBFloat16: return rotate_rows<kBFloat16>(r, first, end);
    case kFloat16: return rotate_rows<kFloat16>(r, first, end);
    default: return rotate_rows<kFloat32>(r, first, end);
  }
}

}  // namespace
}  // namespace JAXPAGED_ISA
}  // namespace jaxpaged

#endif  // JAXPAGED_NATIVE_ROTATE_H_
