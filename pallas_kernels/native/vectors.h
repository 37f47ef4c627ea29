// Vectors of as many floats as a register of the instruction set holds, and the few operations that
// the kernels need of them.
//
// Everything is static or in an unnamed namespace, here and in the headers that build on it: a
// function that two objects share would be kept once by the linker, and maybe in the version for
// the newer processor. For the same reason no header of the C++ library is included.
//
// Sums of products are fused where the instruction set can, and never where it cannot: sources are
// compiled with -ffp-contract=off, so the compiler does not choose.

#ifndef JAXPAGED_NATIVE_VECTORS_H_
#define JAXPAGED_NATIVE_VECTORS_H_

#include <stddef.h>
#include <stdint.h>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#elif defined(__ARM_NEON) && defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define JAXPAGED_WIDTH 16
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define JAXPAGED_WIDTH 8
#else
#define JAXPAGED_WIDTH 4
#endif

// Products of pairs of bfloat16, summed in float32.
#if JAXPAGED_WIDTH == 16 && defined(__AVX512BF16__)
#define JAXPAGED_PAIRS 1
#else
#define JAXPAGED_PAIRS 0
#endif

#define JAXPAGED_MEMBER inline __attribute__((always_inline))
#define JAXPAGED_INLINE static JAXPAGED_MEMBER

namespace jaxpaged {
namespace JAXPAGED_ISA {
namespace {

constexpr int kWidth = JAXPAGED_WIDTH;

typedef float Floats __attribute__((vector_size(4 * kWidth)));
typedef int32_t Ints __attribute__((vector_size(4 * kWidth)));
typedef uint32_t Words __attribute__((vector_size(4 * kWidth)));
typedef uint16_t Halves __attribute__((vector_size(2 * kWidth)));
typedef uint8_t Bytes __attribute__((vector_size(kWidth)));
typedef int8_t SignedBytes __attribute__((vector_size(kWidth)));

// Addresses in pools are aligned to elements only.
template <typename V>
JAXPAGED_INLINE V load(const void* from) {
  V value;
  __builtin_memcpy(&value, from, sizeof value);
  return value;
}

template <typename V>
JAXPAGED_INLINE void store(void* to, V value) {
  __builtin_memcpy(to, &value, sizeof value);
}

// The same bits as another type.
template <typename To, typename From>
JAXPAGED_INLINE To bits(From value) {
  static_assert(sizeof(To) == sizeof(From), "bits are neither added nor lost");
  To result;
  __builtin_memcpy(&result, &value, sizeof result);
  return result;
}

JAXPAGED_INLINE Floats all(float x) { return Floats{} + x; }
JAXPAGED_INLINE Words all_words(uint32_t x) { return Words{} + x; }

JAXPAGED_INLINE Ints iota() {
#if JAXPAGED_WIDTH == 16
  return Ints{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#elif JAXPAGED_WIDTH == 8
  return Ints{0, 1, 2, 3, 4, 5, 6, 7};
#else
  return Ints{0, 1, 2, 3};
#endif
}

JAXPAGED_INLINE Floats multiply_add(Floats a, Floats b, Floats sum) {
#if JAXPAGED_WIDTH == 16
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif JAXPAGED_WIDTH == 8
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#elif defined(__ARM_NEON) && defined(__aarch64__)
  return (Floats)vfmaq_f32((float32x4_t)sum, (float32x4_t)a, (float32x4_t)b);
#else
  return sum + a * b;
#endif
}

// A register of keys or values, as a product takes it: floats or pairs of bfloat16. It is loaded as
// what it is, because compilers load again what is loaded as one type and used as another.
template <bool kPairs>
struct Operand {
  typedef Floats type;
};
#if JAXPAGED_PAIRS
template <>
struct Operand<true> {
  typedef __m512bh type;
};
#endif

// sum + *one * others, where `one` is for all lanes: a float, or a pair.
JAXPAGED_INLINE Floats add_product(const float* one, Floats others, Floats sum) {
  return multiply_add(all(*one), others, sum);
}

#if JAXPAGED_PAIRS
JAXPAGED_INLINE Floats add_product(const float* one, __m512bh others, Floats sum) {
  const __m512i pair = _mm512_set1_epi32(load<int32_t>(one));
  return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)pair, others);
}
#endif

// The larger one; b where either is NaN.
JAXPAGED_INLINE Floats larger(Floats a, Floats b) {
#if JAXPAGED_WIDTH == 16
  return (Floats)_mm512_max_ps((__m512)a, (__m512)b);
#elif JAXPAGED_WIDTH == 8
  return (Floats)_mm256_max_ps((__m256)a, (__m256)b);
#elif defined(__SSE2__)
  return (Floats)_mm_max_ps((__m128)a, (__m128)b);
#else
  return a > b ? a : b;
#endif
}

JAXPAGED_INLINE bool any_above(Floats a, float limit) {
#if JAXPAGED_WIDTH == 16
  return _mm512_cmp_ps_mask((__m512)a, _mm512_set1_ps(limit), _CMP_GT_OQ) != 0;
#elif JAXPAGED_WIDTH == 8
  return _mm256_movemask_ps(_mm256_cmp_ps((__m256)a, _mm256_set1_ps(limit), _CMP_GT_OQ)) != 0;
#elif defined(__SSE2__)
  return _mm_movemask_ps(_mm_cmpgt_ps((__m128)a, _mm_set1_ps(limit))) != 0;
#else
  bool found = false;
  for (int lane = 0; lane < kWidth; ++lane) found |= a[lane] > limit;
  return found;
#endif
}

JAXPAGED_INLINE float largest(Floats a) {
  float top = a[0];
  for (int lane = 1; lane < kWidth; ++lane) top = a[lane] > top ? a[lane] : top;
  return top;
}

// By halves.
JAXPAGED_INLINE float sum_of(Floats a) {
  float lanes[kWidth];
  store(lanes, a);
  for (int half = kWidth / 2; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
}

// ------------------------------------------------------------------ functions

constexpr float kLog2E = 1.44269504088896340736f;

// Adding it rounds to a whole number, which then is in the low bits.
constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23

// 2^x for x <= 0: 0 below -126, NaN for NaN. The polynomials, which are 1 at 0, were fitted by
// Lawson's method to 2^x on [-1/2, 1/2]: 1.3 units in the last place, or 3e-6 where the result is
// rounded to 16 bits anyway.
template <bool kRough>
JAXPAGED_INLINE Floats exp2_of(Floats x) {
  const Floats shifted = x + kRounder;
  const Floats f = x - (shifted - kRounder);
  Floats y;
  if (kRough) {
    y = multiply_add(all(0x1.3a02ccp-7f), f, all(0x1.c9fc46p-5f));
    y = multiply_add(y, f, all(0x1.ec0378p-3f));
    y = multiply_add(y, f, all(0x1.62e12cp-1f));
  } else {
    y = multiply_add(all(0x1.41fbbcp-13f), f, all(0x1.5f3e54p-10f));
    y = multiply_add(y, f, all(0x1.3b2d4cp-7f));
    y = multiply_add(y, f, all(0x1.c6aee8p-5f));
    y = multiply_add(y, f, all(0x1.ebfbdcp-3f));
    y = multiply_add(y, f, all(0x1.62e430p-1f));
  }
  y = multiply_add(y, f, all(1.0f));
  const Floats power = bits<Floats>((bits<Words>(shifted) << 23) + 0x3f800000u);
  return x < -126.0f ? Floats{} : y * power;
}

// Up to 3 units in the last place off. The polynomial is for (tanh(x) / x - 1) / x^2.
JAXPAGED_INLINE Floats tanh_of(Floats x) {
  const Words sign = bits<Words>(x) & 0x80000000u;
  const Floats size = bits<Floats>(bits<Words>(x) ^ sign);
  const Floats e = exp2_of<false>(size * (-2.0f * kLog2E));
  const Floats far = bits<Floats>(bits<Words>((1.0f - e) / (1.0f + e)) | sign);
  const Floats square = x * x;
  Floats near = multiply_add(all(-0.00571704f), square, all(0.02065059f));
  near = multiply_add(near, square, all(-0.0537435f));
  near = multiply_add(near, square, all(0.13331491f));
  near = multiply_add(near, square, all(-0.33333284f));
  near = multiply_add(near * square, x, x);
  return size < 0.625f ? near : far;
}

// x / (1 + e^-x): a few units in the last place off.
JAXPAGED_INLINE Floats silu_of(Floats x) {
  const Floats size = bits<Floats>(bits<Words>(x) & 0x7fffffffu);
  const Floats e = exp2_of<false>(size * -kLog2E);
  return (x < 0.0f ? x * e : x) / (1.0f + e);
}

// ------------------------------------------------------------------ transposing

// Indices 0..kWidth-1 are lanes of a, the next ones lanes of b.
#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define JAXPAGED_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#endif
#endif
#ifndef JAXPAGED_SHUFFLE
#define JAXPAGED_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Words{__VA_ARGS__})
#endif

// Two rows that are `kDistance` apart exchange, in each square of 2 * kDistance lanes, a's right
// half and b's left one.
template <int kDistance>
JAXPAGED_INLINE void exchange(Words& a, Words& b) {
  const Words left = a, right = b;
#if JAXPAGED_WIDTH == 16
  if (kDistance == 1) {
    a = JAXPAGED_SHUFFLE(left, right, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30);
    b = JAXPAGED_SHUFFLE(left, right, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
  } else if (kDistance == 2) {
    a = JAXPAGED_SHUFFLE(left, right, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
    b = JAXPAGED_SHUFFLE(left, right, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  } else if (kDistance == 4) {
    a = JAXPAGED_SHUFFLE(left, right, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27);
    b = JAXPAGED_SHUFFLE(left, right, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
  } else {
    a = JAXPAGED_SHUFFLE(left, right, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
    b = JAXPAGED_SHUFFLE(left, right, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  }
#elif JAXPAGED_WIDTH == 8
  if (kDistance == 1) {
    a = JAXPAGED_SHUFFLE(left, right, 0, 8, 2, 10, 4, 12, 6, 14);
    b = JAXPAGED_SHUFFLE(left, right, 1, 9, 3, 11, 5, 13, 7, 15);
  } else if (kDistance == 2) {
    a = JAXPAGED_SHUFFLE(left, right, 0, 1, 8, 9, 4, 5, 12, 13);
    b = JAXPAGED_SHUFFLE(left, right, 2, 3, 10, 11, 6, 7, 14, 15);
  } else {
    a = JAXPAGED_SHUFFLE(left, right, 0, 1, 2, 3, 8, 9, 10, 11);
    b = JAXPAGED_SHUFFLE(left, right, 4, 5, 6, 7, 12, 13, 14, 15);
  }
#else
  if (kDistance == 1) {
    a = JAXPAGED_SHUFFLE(left, right, 0, 4, 2, 6);
    b = JAXPAGED_SHUFFLE(left, right, 1, 5, 3, 7);
  } else {
    a = JAXPAGED_SHUFFLE(left, right, 0, 1, 4, 5);
    b = JAXPAGED_SHUFFLE(left, right, 2, 3, 6, 7);
  }
#endif
}

template <int kDistance>
JAXPAGED_INLINE void exchange_all(Words (&rows)[kWidth]) {
#pragma GCC unroll 16
  for (int row = 0; row < kWidth; ++row) {
    if ((row & kDistance) == 0) exchange<kDistance>(rows[row], rows[row + kDistance]);
  }
}

JAXPAGED_INLINE void transpose(Words (&rows)[kWidth]) {
  exchange_all<1>(rows);
  exchange_all<2>(rows);
#if JAXPAGED_WIDTH >= 8
  exchange_all<4>(rows);
#endif
#if JAXPAGED_WIDTH == 16
  exchange_all<8>(rows);
#endif
}

}  // namespace
}  // namespace JAXPAGED_ISA
}  // namespace jaxpaged

#endif  // JAXPAGED_NATIVE_VECTORS_H_
