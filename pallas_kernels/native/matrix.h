// Products of a few to a few hundred rows with a bfloat16 matrix, on processors that multiply pairs
// of bfloat16 and add them up in float32 (AVX-512 BF16).
//
// A matrix [O, E] is stored by its rows, each of which gives one column of the result. 32 of them
// are a block: their pairs of elements are turned so that one register holds the same pair of 16
// rows, which is then multiplied with that pair of each row of x. Every element of the result is so
// the sum of its pairs in ascending order, in one register's lane, whatever the number of rows.

#ifndef JAXPAGED_NATIVE_MATRIX_H_
#define JAXPAGED_NATIVE_MATRIX_H_

#include "elements.h"
#include "kernels.h"
#include "vectors.h"

namespace jaxpaged {
namespace JAXPAGED_ISA {
namespace {

#if JAXPAGED_PAIRS

constexpr int kLanes = 16;  // rows of the matrix in a register
constexpr int kStep = 32;   // elements of a row in a register
constexpr int kRowsAtOnce = 12;  // of x: with two registers each, 24 sums
constexpr int kFewRows = 8;

// Turns 16 registers of 16 pairs, one a row, into 16 registers of 16 rows, one a pair.
JAXPAGED_INLINE void turn(__m512i r[kLanes]) {
  __m512i t[kLanes];
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 4; ++i) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

// Elements [at, at + 32) of up to 16 rows of E elements; 0 beyond their end. The same place of
// `ahead`, rows that are wanted soon, is fetched meanwhile.
JAXPAGED_INLINE void load_turned(const uint16_t* matrix, int rows, int64_t depth, int64_t at,
                                 const uint16_t* ahead, __m512i out[kLanes]) {
  const int64_t left = depth - at;
  const __mmask32 mask = left >= kStep ? ~0u : (1u << left) - 1;
  for (int i = 0; i < kLanes; ++i) {
    out[i] = i < rows ? _mm512_maskz_loadu_epi16(mask, matrix + i * depth + at)
                      : _mm512_setzero_si512();
    if (ahead != nullptr) {
      _mm_prefetch(reinterpret_cast<const char*>(ahead + i * depth + at), _MM_HINT_T1);
    }
  }
  turn(out);
}

// The pair of x at `from`, in all lanes; of a row's last odd element only that.
JAXPAGED_INLINE __m512bh pair(const uint16_t* from, bool whole) {
  uint32_t both;
  if (whole) {
    __builtin_memcpy(&both, from, sizeof both);
  } else {
    both = *from;
  }
  return reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int32_t>(both)));
}

JAXPAGED_INLINE __mmask16 lanes(int64_t columns) {
  if (columns >= kLanes) return 0xffff;
  return columns <= 0 ? 0 : static_cast<__mmask16>((1u << columns) - 1);
}

// The row of the result for row `row` of x.
JAXPAGED_INLINE int64_t result_row(const MatrixProduct& p, int64_t row) {
  return row < p.head ? row : row + p.gap;
}

// The sums of 32 columns from `column` on, of which `columns` are there, for row `row` of x.
JAXPAGED_INLINE void store_sums(const MatrixProduct& p, int64_t row, int64_t column,
                                int64_t columns, __m512 low, __m512 high) {
  row = result_row(p, row);
  if (!p.gated) {
    const int64_t at = row * p.columns + column;
    const __mmask16 left = lanes(columns), right = lanes(columns - kLanes);
    if (p.onto != nullptr) {
      low = _mm512_add_ps(_mm512_maskz_loadu_ps(left, p.onto + at), low);
      high = _mm512_add_ps(_mm512_maskz_loadu_ps(right, p.onto + at + kLanes), high);
    }
    float* out = static_cast<float*>(p.out) + at;
    _mm512_mask_storeu_ps(out, left, low);
    _mm512_mask_storeu_ps(out + kLanes, right, high);
    return;
  }
  const __m512i even = (__m512i)(iota() * 2);
  const __m512i odd = (__m512i)(iota() * 2 + 1);
  const auto gate = (Floats)_mm512_permutex2var_ps(low, even, high);
  const auto other = (Floats)_mm512_permutex2var_ps(low, odd, high);
  uint16_t* out = static_cast<uint16_t*>(p.out) + (row * p.columns + column) / 2;
  _mm256_mask_storeu_epi16(out, lanes(columns / 2),
                           bits<__m256i>(to_bfloat16(silu_of(gate) * other)));
}

JAXPAGED_INLINE int64_t pairs_of(int64_t depth) { return (depth + 1) / 2; }

// ------------------------------------------------------------------ few rows

// Turned elements go from one register straight into the products.
template <int R>
static void multiply_few(const MatrixProduct& p, int64_t column, int columns,
                         const uint16_t* ahead) {
  const uint16_t* x = p.x;
  const uint16_t* matrix = p.matrix + column * p.depth;
  __m512 sums[R];
  for (int r = 0; r < R; ++r) sums[r] = _mm512_setzero_ps();
  for (int64_t at = 0; at < p.depth; at += kStep) {
    __m512i turned[kLanes];
    load_turned(matrix, columns, p.depth, at, ahead, turned);
    const int64_t left = p.depth - at;
    if (left >= kStep) {
      for (int i = 0; i < kLanes; ++i) {
        for (int r = 0; r < R; ++r) {
          sums[r] = _mm512_dpbf16_ps(sums[r], reinterpret_cast<__m512bh>(turned[i]),
                                     pair(x + r * p.depth + at + 2 * i, true));
        }
      }
    } else {
      for (int i = 0; i < pairs_of(left); ++i) {
        for (int r = 0; r < R; ++r) {
          sums[r] = _mm512_dpbf16_ps(sums[r], reinterpret_cast<__m512bh>(turned[i]),
                                     pair(x + r * p.depth + at + 2 * i, 2 * i + 1 < left));
        }
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    store_sums(p, r, column, columns, sums[r], _mm512_setzero_ps());
  }
}

// ------------------------------------------------------------------ more rows

// A block of up to 32 rows, turned: [pairs, 32] in `turned`.
static void turn_block(const uint16_t* matrix, int rows, int64_t depth, uint32_t* turned) {
  for (int64_t at = 0; at < depth; at += kStep) {
    const int64_t left = pairs_of(depth - at);
    for (int half = 0; half < kBlockColumns; half += kLanes) {
      __m512i r[kLanes];
      load_turned(matrix + half * depth, rows - half, depth, at, nullptr, r);
      for (int i = 0; i < kLanes && i < left; ++i) {
        _mm512_store_si512(turned + (at / 2 + i) * kBlockColumns + half, r[i]);
      }
    }
  }
}

// Rows of x, four by four: with a pointer to each, there were not enough registers for them.
template <int R>
struct Rows {
  const char* four[(R + 3) / 4];
  int64_t stride, three;

  JAXPAGED_MEMBER Rows(const uint16_t* x, int64_t depth) : stride(2 * depth), three(6 * depth) {
    for (int i = 0; i < (R + 3) / 4; ++i) four[i] = reinterpret_cast<const char*>(x + 4 * i * depth);
  }
  JAXPAGED_MEMBER const uint16_t* at(int r) const {
    const int64_t offsets[] = {0, stride, 2 * stride, three};
    return reinterpret_cast<const uint16_t*>(four[r / 4] + offsets[r % 4]);
  }
  JAXPAGED_MEMBER void next() {
    for (auto& from : four) from += 4;
    asm("" : "+r"(stride), "+r"(three));  // not to be added up before the loop
  }
};

template <int R>
JAXPAGED_INLINE void add_pair(const Rows<R>& x, bool whole, const uint32_t* turned,
                              __m512 sums[R][2]) {
  const auto low = reinterpret_cast<__m512bh>(_mm512_load_si512(turned));
  const auto high = reinterpret_cast<__m512bh>(_mm512_load_si512(turned + kLanes));
  for (int r = 0; r < R; ++r) {
    const __m512bh both = pair(x.at(r), whole);
    sums[r][0] = _mm512_dpbf16_ps(sums[r][0], low, both);
    sums[r][1] = _mm512_dpbf16_ps(sums[r][1], high, both);
  }
}

// A stretch of memory that is wanted soon, fetched a few lines with each pair of the products.
struct Lines {
  const char* from;
  int64_t lines_of_pair;
};

// R rows of x, from row `row` on, with a turned block.
template <int R>
static void multiply_rows(const MatrixProduct& p, int64_t row, int64_t column, int64_t columns,
                          const uint32_t* turned, Lines fetch) {
  Rows<R> x(p.x + row * p.depth, p.depth);
  // The lines of the result, which are likely far away: they come while the sums are made.
  for (int r = 0; r < R; ++r) {
    const int64_t at = result_row(p, row + r) * p.columns + column;
    const char* out = static_cast<const char*>(p.out) + at * (p.gated ? 1 : 4);
    __builtin_prefetch(out, 1);
    if (!p.gated) __builtin_prefetch(out + 64, 1);
  }
  __m512 sums[R][2];
  for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = _mm512_setzero_ps();
  for (int64_t i = 0; i < p.depth / 2; ++i, turned += kBlockColumns) {
    for (int64_t line = 0; line < fetch.lines_of_pair; ++line, fetch.from += 64) {
      _mm_prefetch(fetch.from, _MM_HINT_T0);
    }
    add_pair<R>(x, true, turned, sums);
    x.next();
  }
  if (p.depth % 2) add_pair<R>(x, false, turned, sums);
  for (int r = 0; r < R; ++r) store_sums(p, row + r, column, columns, sums[r][0], sums[r][1]);
}

static void multiply_block(const MatrixProduct& p, int64_t block, int64_t row, int64_t row_end,
                           const uint16_t* ahead, uint32_t* scratch) {
  const int64_t column = block * kBlockColumns;
  const int64_t left = p.columns - column;
  const int columns = static_cast<int>(left < kBlockColumns ? left : kBlockColumns);
  if (p.rows <= kFewRows) {
    for (int half = 0; half < columns; half += kLanes) {
      const int some = columns - half < kLanes ? columns - half : kLanes;
      const uint16_t* next = ahead == nullptr ? nullptr : ahead + half * p.depth;
      switch (p.rows) {
#define JAXPAGED_FEW(n)                                   \
  case n:                                                 \
    multiply_few<n>(p, column + half, some, next);        \
    break;
        JAXPAGED_FEW(1) JAXPAGED_FEW(2) JAXPAGED_FEW(3) JAXPAGED_FEW(4)
        JAXPAGED_FEW(5) JAXPAGED_FEW(6) JAXPAGED_FEW(7) JAXPAGED_FEW(8)
#undef JAXPAGED_FEW
      }
    }
    return;
  }
  turn_block(p.matrix + column * p.depth, columns, p.depth, scratch);
  // Groups of equal size: the sums of a small one would wait for each other.
  const int64_t groups = (row_end - row + kRowsAtOnce - 1) / kRowsAtOnce;
  const int64_t pairs = p.depth < 2 ? 1 : p.depth / 2;
  const int64_t lines = (kBlockColumns * p.depth * 2 + 63) / 64;
  Lines fetch{reinterpret_cast<const char*>(ahead),
              ahead == nullptr ? 0 : (lines + groups * pairs - 1) / (groups * pairs)};
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t rows = (row_end - row + groups - group - 1) / (groups - group);
    if (group * fetch.lines_of_pair * pairs >= lines) fetch.lines_of_pair = 0;
    switch (rows) {
#define JAXPAGED_ROWS(n)                                         \
  case n:                                                        \
    multiply_rows<n>(p, row, column, columns, scratch, fetch);   \
    break;
      JAXPAGED_ROWS(1) JAXPAGED_ROWS(2) JAXPAGED_ROWS(3) JAXPAGED_ROWS(4)
      JAXPAGED_ROWS(5) JAXPAGED_ROWS(6) JAXPAGED_ROWS(7) JAXPAGED_ROWS(8)
      JAXPAGED_ROWS(9) JAXPAGED_ROWS(10) JAXPAGED_ROWS(11) JAXPAGED_ROWS(12)
#undef JAXPAGED_ROWS
    }
    row += rows;
    fetch.from += fetch.lines_of_pair * pairs * 64;
  }
}

static size_t multiply_bytes(const MatrixProduct& p) {
  return p.rows <= kFewRows ? 0 : static_cast<size_t>(pairs_of(p.depth)) * kBlockColumns * 4;
}

static void multiply(const MatrixProduct& p, int64_t block, int64_t block_end, int64_t row,
                     int64_t row_end, void* scratch) {
  for (; block < block_end; ++block) {
    // The block after this one, if it is a whole one.
    const int64_t next = (block + 1) * kBlockColumns;
    const bool fetch = next + kBlockColumns <= p.columns;
    multiply_block(p, block, row, row_end, fetch ? p.matrix + next * p.depth : nullptr,
                   static_cast<uint32_t*>(scratch));
  }
}

#define JAXPAGED_MULTIPLY multiply
#define JAXPAGED_MULTIPLY_BYTES multiply_bytes

#else

#define JAXPAGED_MULTIPLY nullptr
#define JAXPAGED_MULTIPLY_BYTES nullptr

#endif  // JAXPAGED_PAIRS

}  // namespace
}  // namespace JAXPAGED_ISA
}  // namespace jaxpaged

#endif  // JAXPAGED_NATIVE_MATRIX_H_
