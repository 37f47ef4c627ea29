// New keys and values into a pool, quantised where it has 8 bits: the bits of
// pallas_kernels/quantize.py, step by step.

#ifndef JAXPAGED_NATIVE_WRITE_H_
#define JAXPAGED_NATIVE_WRITE_H_

#include "elements.h"
#include "kernels.h"
#include "vectors.h"

namespace jaxpaged {
namespace JAXPAGED_ISA {
namespace {

constexpr float kSmallestScale = 0x1p-100f;

// The lane as one of 8 bits, for sizes up to 448: to the nearest, halves to even.
JAXPAGED_INLINE Words to_float8(Floats x) {
  const Words sign = bits<Words>(x) >> 24 & 0x80;
  const Words w = bits<Words>(x) & 0x7fffffff;
  // The sum's last bit is worth as much as that of a denormal float8.
  const Words small = bits<Words>(bits<Floats>(w) + 0x1p14f) - bits<Words>(all(0x1p14f));
  const Words normal = (w + 0x7ffff + (w >> 20 & 1) - (120u << 23)) >> 20;
  return (w < (121u << 23) ? small : normal) | sign;
}

JAXPAGED_INLINE Words to_int8(Floats x) {
  const Floats moved = x + (x < 0.0f ? all(-0.5f) : all(0.5f));
  return bits<Words>(__builtin_convertvector(moved, Ints)) & 0xff;
}

template <ElementType kType>
JAXPAGED_INLINE Floats load_up_to(const void* row, int64_t d, int64_t count) {
  const char* from = static_cast<const char*>(row) + d * size_of(kType);
  return count - d >= kWidth ? load_elements<kType>(from) : load_some<kType>(from, count - d);
}

// Writes `dim` elements, and returns their scale.
template <ElementType kType, ElementType kCache>
static float quantize_row(const void* row, int64_t dim, void* to) {
  constexpr float kLimit = kCache == kInt8 ? 127.0f : 448.0f;
  const Floats infinity = all(__builtin_inff());
  Floats tops = {};
  for (int64_t d = 0; d < dim; d += kWidth) {
    const Words size = bits<Words>(load_up_to<kType>(row, d, dim)) & 0x7fffffff;
    tops = larger(bits<Floats>(size > 0x7f800000u ? bits<Words>(infinity) : size), tops);
  }
  const float top = largest(tops);
  const bool good = top < __builtin_inff();
  float scale = top * static_cast<float>(1.0 / kLimit);
  scale = scale > kSmallestScale ? scale : kSmallestScale;
  const float inverse = good ? 1.0f / scale : 0.0f;
  for (int64_t d = 0; d < dim; d += kWidth) {
    Floats x = load_up_to<kType>(row, d, dim);
    x = (bits<Words>(x) & 0x7fffffff) < 0x7f800000u ? x : Floats{};
    x *= inverse;
    x = x < -kLimit ? all(-kLimit) : x;
    x = x > kLimit ? all(kLimit) : x;
    const Words narrow = kCache == kInt8 ? to_int8(x) : to_float8(x);
    const Bytes bytes = __builtin_convertvector(narrow, Bytes);
    copy_bytes(static_cast<char*>(to) + d, &bytes, dim - d < kWidth ? dim - d : kWidth);
  }
  return good ? scale : __builtin_nanf("");
}

template <ElementType kType>
static float quantize_as(ElementType cache, const void* row, int64_t dim, void* to) {
  return cache == kInt8 ? quantize_row<kType, kInt8>(row, dim, to)
                        : quantize_row<kType, kFloat8>(row, dim, to);
}

static void write(const Write& call, int64_t first, int64_t end) {
  const int64_t row_bytes = call.dim * size_of(call.type);
  const int64_t stored_bytes = call.dim * size_of(call.cache_type);
  for (int64_t token = first; token < end; ++token) {
    const int64_t slot = call.to[token];
    if (slot < 0 || slot >= call.slots) continue;
    const char* rows =
        static_cast<const char*>(call.rows) + token * call.kv_heads * row_bytes;
    char* to = static_cast<char*>(call.pool) + slot * call.kv_heads * stored_bytes;
    if (!call.scales) {
      __builtin_memcpy(to, rows, static_cast<size_t>(call.kv_heads * row_bytes));
      continue;
    }
    for (int64_t head = 0; head < call.kv_heads; ++head) {
      const char* row = rows + head * row_bytes;
      char* narrow = to + head * stored_bytes;
      call.scales[slot * call.kv_heads + head] =
          call.type == kFloat32    ? quantize_as<kFloat32>(call.cache_type, row, call.dim, narrow)
          : call.type == kBFloat16 ? quantize_as<kBFloat16>(call.cache_type, row, call.dim, narrow)
                                   : quantize_as<kFloat16>(call.cache_type, row, call.dim, narrow);
    }
  }
}

}  // namespace
}  // namespace JAXPAGED_ISA
}  // namespace jaxpaged

#endif  // JAXPAGED_NATIVE_WRITE_H_
