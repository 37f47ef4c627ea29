// Which tokens of the context a tile sees, and their keys and values in the order in which the
// products read them.

#ifndef JAXPAGED_NATIVE_CONTEXT_H_
#define JAXPAGED_NATIVE_CONTEXT_H_

#include "elements.h"
#include "kernels.h"
#include "vectors.h"

namespace jaxpaged {
namespace JAXPAGED_ISA {
namespace {

constexpr int64_t kLine = 64;  // bytes that come from memory together
constexpr int kChunkVectors = kChunk / kWidth;

constexpr int64_t round_up(int64_t x, int64_t step) { return (x + step - 1) / step * step; }
JAXPAGED_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
JAXPAGED_INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// Positions [begin, end).
struct Range {
  int64_t begin, end;
};

// What the token at `position` sees.
JAXPAGED_INLINE Range visible(const Attention& call, int64_t position) {
  const int64_t begin = call.window == 0 ? 0 : larger(0, position - call.window + 1);
  return {begin, position + 1};
}

// What some token of the tile sees.
JAXPAGED_INLINE Range visible(const Attention& call, const Tile& tile) {
  return {visible(call, tile.position).begin, tile.position + tile.length};
}

// The part of `range` that lies in the `size` positions from `first` on, counted from there; empty
// if end <= begin.
JAXPAGED_INLINE Range within(Range range, int64_t first, int64_t size) {
  return {larger(range.begin - first, 0), smaller(range.end - first, size)};
}

// kChunk tokens of the context. Only those in `seen` may be read; for the others stands the slot of
// one that may be.
struct Chunk {
  int64_t first;
  Range seen;
  int64_t slots[kChunk];
};

JAXPAGED_INLINE void locate(const Attention& call, const Tile& tile, int64_t first, Chunk& chunk) {
  chunk.first = first;
  chunk.seen = within(visible(call, tile), first, kChunk);
  const int32_t* table = call.tables + tile.row * call.table_width;
  int64_t at = chunk.seen.begin;
  while (at < chunk.seen.end) {
    const int64_t position = first + at;
    const int64_t column = position / call.block_size;
    const int64_t offset = position % call.block_size;
    const int64_t block = table[smaller(column, call.table_width - 1)];
    const int64_t stop = smaller(chunk.seen.end, at + call.block_size - offset);
    int64_t slot = block * call.block_size + offset;
    // An id of no block must not reach beyond the pool.
    for (; at < stop; ++at, ++slot) {
      chunk.slots[at] = larger(0, smaller(slot, call.slots - 1));
    }
  }
  for (at = 0; at < chunk.seen.begin; ++at) chunk.slots[at] = chunk.slots[chunk.seen.begin];
  for (at = chunk.seen.end; at < kChunk; ++at) chunk.slots[at] = chunk.slots[chunk.seen.begin];
}

// `count` bytes, fewer than a vector has, and zeros behind them.
JAXPAGED_INLINE Words load_bytes(const void* from, int64_t count) {
#if JAXPAGED_WIDTH == 16
  const __mmask64 wanted = (static_cast<uint64_t>(1) << count) - 1;
  return bits<Words>(_mm512_maskz_loadu_epi8(wanted, from));
#else
  unsigned char whole[4 * kWidth] = {};
  copy_bytes(whole, from, count);
  return load<Words>(whole);
#endif
}

// The chunk to come, or null, and how many heads further on its heads are.
struct Fetch {
  const Chunk* chunk;
  int64_t heads;

  // `row` is of that slot 0 of the head at hand.
  JAXPAGED_INLINE void token(const Fetch& fetch, int64_t token, const char* row, int64_t bytes,
                             int64_t stride) {
    if (!fetch.chunk) return;
    row += fetch.chunk->slots[token] * stride + fetch.heads * bytes;
    for (int64_t at = 0; at < bytes; at += kLine) __builtin_prefetch(row + at, 0, 2);
  }
};

// Keys of one head as [H][kChunk] floats, or, in pairs, [H / 2 rounded up][kChunk] words. Each
// token has its lane, so that a query's scores of a chunk are sums along H with no lane added to
// another one.
//
// Rows of the chunk to come are fetched from memory meanwhile.
template <ElementType kType, bool kPairs>
JAXPAGED_INLINE void pack_keys(const Attention& call, const Chunk& chunk, const Fetch& fetch,
                               int64_t head, void* packed) {
  constexpr int kPerWord = 4 / size_of(kType);
  const int64_t bytes = call.key_dim * size_of(kType);
  const int64_t words = (bytes + 3) / 4;
  const char* pool = static_cast<const char*>(call.k) + head * bytes;
  const int64_t stride = call.kv_heads * bytes;
  float* keys = static_cast<float*>(packed);
  for (int64_t token = chunk.seen.begin / kWidth * kWidth; token < chunk.seen.end;
       token += kWidth) {
    const char* sources[kWidth];
    for (int i = 0; i < kWidth; ++i) {
      sources[i] = pool + chunk.slots[token + i] * stride;
      Fetch::token(fetch, token + i, pool, bytes, stride);
    }
    for (int64_t word = 0; word < words; word += kWidth) {
      Words rows[kWidth];
      const int64_t left = bytes - 4 * word;
      if (left >= 4 * kWidth) {
#pragma GCC unroll 16
        for (int i = 0; i < kWidth; ++i) rows[i] = load<Words>(sources[i] + 4 * word);
      } else {
        for (int i = 0; i < kWidth; ++i) rows[i] = load_bytes(sources[i] + 4 * word, left);
      }
      transpose(rows);
      const int64_t used = smaller(kWidth, words - word);
#pragma GCC unroll 16
      for (int i = 0; i < kWidth; ++i) {
        if (i >= used) break;
        if (kPairs) {
          store(keys + (word + i) * kChunk + token, rows[i]);
          continue;
        }
        const int64_t d = (word + i) * kPerWord;
        const int64_t have = call.key_dim - d;
        float* to = keys + d * kChunk + token;
        store(to, element<kType, 0>(rows[i]));
        if (kPerWord > 1 && have > 1) store(to + kChunk, element<kType, 1 % kPerWord>(rows[i]));
        if (kPerWord > 2 && have > 2) store(to + 2 * kChunk, element<kType, 2 % kPerWord>(rows[i]));
        if (kPerWord > 2 && have > 3) store(to + 3 * kChunk, element<kType, 3 % kPerWord>(rows[i]));
      }
    }
  }
}

// Elements of a packed row of values: whole vectors.
JAXPAGED_INLINE int64_t value_stride(const Attention& call) {
  return round_up(call.value_dim, kWidth);
}

// Values of one head as [kChunk][value_stride] floats, or, in pairs, [kChunk / 2][value_stride]
// words with those of two tokens that follow each other.
template <ElementType kType, bool kPairs>
JAXPAGED_INLINE void pack_values(const Attention& call, const Chunk& chunk, const Fetch& fetch,
                                 int64_t head, void* packed) {
  const bool latent = call.v == nullptr;
  const int64_t bytes = (latent ? call.key_dim : call.value_dim) * size_of(kType);
  const char* pool = static_cast<const char*>(latent ? call.k : call.v) + head * bytes;
  const int64_t stride = call.kv_heads * bytes;
  const int64_t whole = call.value_dim / kWidth * kWidth, left = call.value_dim - whole;
  float* values = static_cast<float*>(packed);
  const Fetch others = {latent ? nullptr : fetch.chunk, fetch.heads};  // those came as keys
  if (!kPairs) {
    for (int64_t token = chunk.seen.begin; token < chunk.seen.end; ++token) {
      Fetch::token(others, token, pool, bytes, stride);
      const char* from = pool + chunk.slots[token] * stride;
      float* to = values + token * value_stride(call);
      for (int64_t d = 0; d < whole; d += kWidth) {
        store(to + d, load_elements<kType>(from + d * size_of(kType)));
      }
      if (left) store(to + whole, load_some<kType>(from + whole * size_of(kType), left));
    }
    return;
  }
  const Range seen = chunk.seen;
  for (int64_t pair = seen.begin / 2; 2 * pair < seen.end; ++pair) {
    // One that nobody sees must not be read: 0 stands for it.
    const uint32_t first = 2 * pair >= seen.begin ? 0xffffffffu : 0;
    const uint32_t second = 2 * pair + 1 < seen.end ? 0xffffffffu : 0;
    const char* one = pool + chunk.slots[2 * pair] * stride;
    const char* other = pool + chunk.slots[2 * pair + 1] * stride;
    float* to = values + pair * value_stride(call);
    Fetch::token(others, 2 * pair, pool, bytes, stride);
    Fetch::token(others, 2 * pair + 1, pool, bytes, stride);
    for (int64_t d = 0; d < whole; d += kWidth) {
      const Words low = load_halves(one + 2 * d) & first;
      const Words high = load_halves(other + 2 * d) & second;
      store(to + d, low | high << 16);
    }
    if (left) {
      const Words low = bits<Words>(load_some<kBFloat16>(one + 2 * whole, left)) & first;
      const Words high = bits<Words>(load_some<kBFloat16>(other + 2 * whole, left)) & second;
      store(to + whole, low >> 16 | high);
    }
  }
}

}  // namespace
}  // namespace JAXPAGED_ISA
}  // namespace jaxpaged

#endif  // JAXPAGED_NATIVE_CONTEXT_H_
