// Elements of queries and caches as vectors of floats, and back.
//
// Arithmetic here never meets a denormal float32, which a processor may have been told to flush.

#ifndef JAXPAGED_NATIVE_ELEMENTS_H_
#define JAXPAGED_NATIVE_ELEMENTS_H_

#include "kernels.h"
#include "vectors.h"

namespace jaxpaged {
namespace JAXPAGED_ISA {
namespace {

constexpr int size_of(ElementType type) {
  return type == kFloat32 ? 4 : type == kBFloat16 || type == kFloat16 ? 2 : 1;
}

// ------------------------------------------------------------------ one element a lane

// float16 in the low half of each lane.
JAXPAGED_INLINE Floats of_float16(Words w) {
#if JAXPAGED_WIDTH == 16
  return (Floats)_mm512_cvtph_ps(bits<__m256i>(__builtin_convertvector(w, Halves)));
#elif JAXPAGED_WIDTH == 8
  return (Floats)_mm256_cvtph_ps(bits<__m128i>(__builtin_convertvector(w, Halves)));
#else
  const Words size = (w & 0x7fff) << 13, sign = (w & 0x8000) << 16;
  // Both are normal: 1.m of the smallest normal exponent, and 1.0 of it.
  const Floats small = bits<Floats>(size + (113u << 23)) - 0x1p-14f;
  Words magnitude = size + (112u << 23);
  magnitude = (w & 0x7c00) == 0x7c00 ? size | 0x7f800000 : magnitude;
  magnitude = (w & 0x7c00) == 0 ? bits<Words>(small) : magnitude;
  return bits<Floats>(magnitude | sign);
#endif
}

// float8_e4m3fn in the low byte of each lane.
JAXPAGED_INLINE Floats of_float8(Words w) {
  const Words size = (w & 0x7f) << 20, sign = (w & 0x80) << 24;
  const Floats small = bits<Floats>(size + (121u << 23)) - 0x1p-6f;
  Words magnitude = size + (120u << 23);
  magnitude = (w & 0x7f) == 0x7f ? all_words(0x7fc00000) : magnitude;
  magnitude = (w & 0x78) == 0 ? bits<Words>(small) : magnitude;
  return bits<Floats>(magnitude | sign);
}

JAXPAGED_INLINE Floats of_int8(Ints x) { return __builtin_convertvector(x, Floats); }

// Each lane has as many elements as fit into 32 bits: the one at `kPlace`.
template <ElementType kType, int kPlace>
JAXPAGED_INLINE Floats element(Words w) {
  if (kType == kFloat32) return bits<Floats>(w);
  if (kType == kBFloat16) return bits<Floats>(kPlace == 0 ? w << 16 : w & 0xffff0000u);
  if (kType == kFloat16) return of_float16(w >> (16 * kPlace) & 0xffff);
  if (kType == kInt8) return of_int8(bits<Ints>(w << (24 - 8 * kPlace)) >> 24);
  return of_float8(w >> (8 * kPlace) & 0xff);
}

// ------------------------------------------------------------------ from and to memory

JAXPAGED_INLINE Words load_halves(const void* from) {
  return __builtin_convertvector(load<Halves>(from), Words);
}

// kWidth elements that follow each other.
template <ElementType kType>
JAXPAGED_INLINE Floats load_elements(const void* from) {
  if (kType == kFloat32) return load<Floats>(from);
  if (kType == kBFloat16) return bits<Floats>(load_halves(from) << 16);
  if (kType == kFloat16) return of_float16(load_halves(from));
  if (kType == kInt8) {
    return of_int8(__builtin_convertvector(load<SignedBytes>(from), Ints));
  }
  return of_float8(__builtin_convertvector(load<Bytes>(from), Words));
}

// To the nearest, halves to even; NaN stays NaN.
JAXPAGED_INLINE Halves to_bfloat16(Floats x) {
  const Words w = bits<Words>(x);
  const Words rounded = (w + 0x7fff + (w >> 16 & 1)) >> 16;
  const Words nan = w >> 16 | 0x40;
  return __builtin_convertvector((w & 0x7fffffff) > 0x7f800000 ? nan : rounded, Halves);
}

JAXPAGED_INLINE Halves to_float16(Floats x) {
#if JAXPAGED_WIDTH == 16
  return bits<Halves>(_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
#elif JAXPAGED_WIDTH == 8
  return bits<Halves>(_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
#else
  const Words sign = bits<Words>(x) >> 16 & 0x8000;
  const Words w = bits<Words>(x) & 0x7fffffff;
  // The sum's last bit is worth as much as that of a denormal float16.
  const Words small = bits<Words>(bits<Floats>(w) + 0.5f) - 0x3f000000u;
  Words half = (w + 0xfff + (w >> 13 & 1) - (112u << 23)) >> 13;
  half = w < (113u << 23) ? small : half;
  half = w >= 0x477ff000u ? all_words(0x7c00) : half;  // 65520 and above
  half = w > 0x7f800000u ? all_words(0x7e00) : half;
  return __builtin_convertvector(half | sign, Halves);
#endif
}

template <ElementType kType>
JAXPAGED_INLINE void store_elements(void* to, Floats x) {
  if (kType == kFloat32) {
    store(to, x);
  } else if (kType == kBFloat16) {
    store(to, to_bfloat16(x));
  } else {
    store(to, to_float16(x));
  }
}

JAXPAGED_INLINE void copy_bytes(void* to, const void* from, int64_t count) {
  unsigned char* target = static_cast<unsigned char*>(to);
  const unsigned char* source = static_cast<const unsigned char*>(from);
  for (int64_t i = 0; i < count; ++i) target[i] = source[i];
}

// The first `count` elements; the other lanes are 0.
template <ElementType kType>
JAXPAGED_INLINE Floats load_some(const void* from, int64_t count) {
  unsigned char whole[4 * kWidth] = {};
  copy_bytes(whole, from, count * size_of(kType));
  return load_elements<kType>(whole);
}

template <ElementType kType>
JAXPAGED_INLINE void store_some(void* to, Floats x, int64_t count) {
  unsigned char whole[4 * kWidth];
  store_elements<kType>(whole, x);
  copy_bytes(to, whole, count * size_of(kType));
}

// Floats as elements of a type.
template <ElementType kType>
JAXPAGED_INLINE void convert(const float* from, void* to, int64_t count) {
  auto* out = static_cast<unsigned char*>(to);
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) {
    store_elements<kType>(out + i * size_of(kType), load<Floats>(from + i));
  }
  if (i < count) {
    store_some<kType>(out + i * size_of(kType), load_some<kFloat32>(from + i, count - i),
                      count - i);
  }
}

}  // namespace
}  // namespace JAXPAGED_ISA
}  // namespace jaxpaged

#endif  // JAXPAGED_NATIVE_ELEMENTS_H_
