// The two products of attention, in blocks that stay in registers.
//
// A row's result never depends on the block that it is in: each is a sum in ascending order, of one
// term at a time (of two in pairs), in lanes of its own.

#ifndef JAXPAGED_NATIVE_PRODUCTS_H_
#define JAXPAGED_NATIVE_PRODUCTS_H_

#include "context.h"
#include "vectors.h"

namespace jaxpaged {
namespace JAXPAGED_ISA {
namespace {

#if JAXPAGED_WIDTH == 16 || defined(__aarch64__)  // 32 registers
constexpr int kBlockRows = 6, kBlockVectors = 4;
#elif JAXPAGED_WIDTH == 8  // 16
constexpr int kBlockRows = 6, kBlockVectors = 2;
#else  // 16, and products take one of their own
constexpr int kBlockRows = 4, kBlockVectors = 2;
#endif

// ------------------------------------------------------------------ queries and keys

// scores[row][lane] = sum over d of queries[row][d] * keys[d][lane], for kVectors of lanes.
template <int kRows, int kVectors, bool kPairs>
static void score_block(const float* queries, int64_t depth, const float* keys, float* scores) {
  typedef typename Operand<kPairs>::type Lanes;
  Floats sums[kRows][kVectors] = {};
  for (int64_t d = 0; d < depth; ++d) {
    Lanes lanes[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) lanes[v] = load<Lanes>(keys + d * kChunk + v * kWidth);
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        sums[row][v] = add_product(queries + row * depth + d, lanes[v], sums[row][v]);
      }
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      store(scores + row * kChunk + v * kWidth, sums[row][v]);
    }
  }
}

template <int kVectors, bool kPairs>
static void score_rows(const float* queries, int64_t rows, int64_t depth, const float* keys,
                       float* scores) {
  for (; rows >= kBlockRows; rows -= kBlockRows) {
    score_block<kBlockRows, kVectors, kPairs>(queries, depth, keys, scores);
    queries += kBlockRows * depth;
    scores += kBlockRows * kChunk;
  }
  switch (rows) {
    case 1: return score_block<1, kVectors, kPairs>(queries, depth, keys, scores);
    case 2: return score_block<2, kVectors, kPairs>(queries, depth, keys, scores);
    case 3: return score_block<3, kVectors, kPairs>(queries, depth, keys, scores);
#if JAXPAGED_WIDTH != 4 || defined(__aarch64__)
    case 4: return score_block<4, kVectors, kPairs>(queries, depth, keys, scores);
    case 5: return score_block<5, kVectors, kPairs>(queries, depth, keys, scores);
#endif
    default: return;
  }
}

// The scores of all `rows` for the tokens in `seen`, and for more, which mean nothing.
// `depth` is that of packed keys.
template <bool kPairs>
static void score(const float* queries, int64_t rows, int64_t depth, const float* keys, Range seen,
                  float* scores) {
  int64_t vector = seen.begin / kWidth;
  const int64_t end = (seen.end + kWidth - 1) / kWidth;
  while (vector < end) {
    const float* some = keys + vector * kWidth;
    float* to = scores + vector * kWidth;
    if (end - vector >= kBlockVectors) {
      score_rows<kBlockVectors, kPairs>(queries, rows, depth, some, to);
      vector += kBlockVectors;
    } else if (kBlockVectors > 2 && end - vector >= 2) {
      score_rows<2, kPairs>(queries, rows, depth, some, to);
      vector += 2;
    } else {
      score_rows<1, kPairs>(queries, rows, depth, some, to);
      vector += 1;
    }
  }
}

// ------------------------------------------------------------------ weights and values

// sums[row][lane] += sum over tokens of weights[row][token] * values[token][lane].
template <int kRows, int kVectors, bool kPairs>
static void mix_block(const float* weights, Range tokens, const float* values, int64_t stride,
                      float* sums) {
  typedef typename Operand<kPairs>::type Lanes;
  Floats mixed[kRows][kVectors];
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      mixed[row][v] = load<Floats>(sums + row * stride + v * kWidth);
    }
  }
  constexpr uint32_t kWhole = 0xffffffff;
  const auto step = [&](int64_t at, uint32_t mask) __attribute__((always_inline)) {
    Lanes lanes[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      lanes[v] = load<Lanes>(values + at * stride + v * kWidth);
      if (mask != kWhole) lanes[v] = bits<Lanes>(bits<Words>(lanes[v]) & mask);
    }
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        mixed[row][v] = add_product(weights + row * kChunk + at, lanes[v], mixed[row][v]);
      }
    }
  };
  if (!kPairs) {
    for (int64_t token = tokens.begin; token < tokens.end; ++token) step(token, kWhole);
  } else {
    // Of a pair that the row sees half of, the other half may be anything, infinity included.
    const int64_t begin = (tokens.begin + 1) / 2, end = tokens.end / 2;
    if (tokens.begin % 2) step(begin - 1, 0xffff0000u);
    for (int64_t pair = begin; pair < end; ++pair) step(pair, kWhole);
    if (tokens.end % 2) step(end, 0x0000ffffu);
  }
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) store(sums + row * stride + v * kWidth, mixed[row][v]);
  }
}

template <int kVectors, bool kPairs>
static void mix_rows(const float* weights, int64_t rows, Range tokens, const float* values,
                     int64_t stride, float* sums) {
  for (; rows >= kBlockRows; rows -= kBlockRows) {
    mix_block<kBlockRows, kVectors, kPairs>(weights, tokens, values, stride, sums);
    weights += kBlockRows * kChunk;
    sums += kBlockRows * stride;
  }
  switch (rows) {
    case 1: return mix_block<1, kVectors, kPairs>(weights, tokens, values, stride, sums);
    case 2: return mix_block<2, kVectors, kPairs>(weights, tokens, values, stride, sums);
    case 3: return mix_block<3, kVectors, kPairs>(weights, tokens, values, stride, sums);
#if JAXPAGED_WIDTH != 4 || defined(__aarch64__)
    case 4: return mix_block<4, kVectors, kPairs>(weights, tokens, values, stride, sums);
    case 5: return mix_block<5, kVectors, kPairs>(weights, tokens, values, stride, sums);
#endif
    default: return;
  }
}

// Adds what `rows` that all see the same `tokens` of a chunk get from them.
template <bool kPairs>
static void mix(const float* weights, int64_t rows, Range tokens, const float* values,
                int64_t stride, float* sums) {
  int64_t d = 0;
  for (; stride - d >= kBlockVectors * kWidth; d += kBlockVectors * kWidth) {
    mix_rows<kBlockVectors, kPairs>(weights, rows, tokens, values + d, stride, sums + d);
  }
  for (; kBlockVectors > 2 && stride - d >= 2 * kWidth; d += 2 * kWidth) {
    mix_rows<2, kPairs>(weights, rows, tokens, values + d, stride, sums + d);
  }
  for (; d < stride; d += kWidth) {
    mix_rows<1, kPairs>(weights, rows, tokens, values + d, stride, sums + d);
  }
}

}  // namespace
}  // namespace JAXPAGED_ISA
}  // namespace jaxpaged

#endif  // JAXPAGED_NATIVE_PRODUCTS_H_
