// Attention of a tile: over the parts of its context, and over the chunks of each.

#ifndef JAXPAGED_NATIVE_ATTEND_H_
#define JAXPAGED_NATIVE_ATTEND_H_

#include "context.h"
#include "elements.h"
#include "kernels.h"
#include "products.h"
#include "softmax.h"
#include "vectors.h"

namespace jaxpaged {
namespace JAXPAGED_ISA {
namespace {

// Hands out consecutive pieces of a buffer, or adds up their sizes.
struct Arena {
  char* base;
  size_t used;

  JAXPAGED_INLINE float* floats(Arena& arena, int64_t count) {
    const size_t at = arena.used;
    arena.used += static_cast<size_t>(round_up(4 * count, 64));
    return arena.base ? reinterpret_cast<float*>(arena.base + at) : nullptr;
  }
};

JAXPAGED_INLINE bool in_pairs(const Attention& call) {
  return JAXPAGED_PAIRS && call.type == kBFloat16 && call.cache_type == kBFloat16;
}

// Floats (words) of a packed query or key.
JAXPAGED_INLINE int64_t depth_of(const Attention& call) {
  return in_pairs(call) ? (call.key_dim + 1) / 2 : call.key_dim;
}

// Sums of a part for some rows: weighted values, totals of weights, maxima.
struct PartSums {
  float* mixed;   // [rows][stride]
  float* totals;  // [rows]
  float* tops;    // [rows]
};

JAXPAGED_INLINE PartSums part_sums(float* at, int64_t rows, int64_t stride) {
  return {at, at + rows * stride, at + rows * (stride + 1)};
}

struct Workspace {
  float* queries;  // [heads][rows][depth]
  float* part;     // sums of the part at hand
  float* state;    // sums of the parts before it
  float* lanes;    // [heads][rows][kWidth] totals
  float* scores;   // [rows][kChunk]
  float* keys;
  float* values;
  float* key_scales;    // [kChunk]
  float* value_scales;  // [kChunk]
  size_t bytes;
};

JAXPAGED_INLINE int64_t floats_of_part(const Attention& call, int64_t rows) {
  return rows * (value_stride(call) + 2);
}

JAXPAGED_INLINE Workspace workspace(const Attention& call, int64_t length, int64_t heads,
                                    void* scratch) {
  Arena arena = {static_cast<char*>(scratch), 0};
  const int64_t rows = length * call.group, all = rows * heads;
  Workspace work;
  work.queries = Arena::floats(arena, all * depth_of(call));
  work.part = Arena::floats(arena, floats_of_part(call, all));
  work.state = Arena::floats(arena, floats_of_part(call, all));
  work.lanes = Arena::floats(arena, all * kWidth);
  work.scores = Arena::floats(arena, rows * kChunk);
  work.keys = Arena::floats(arena, depth_of(call) * kChunk);
  work.values = Arena::floats(arena, kChunk * value_stride(call));
  work.key_scales = Arena::floats(arena, kChunk);
  work.value_scales = Arena::floats(arena, kChunk);
  work.bytes = arena.used;
  return work;
}

// ------------------------------------------------------------------ queries and results

template <ElementType kType>
static void load_row(const void* from, int64_t count, float* to) {
  const char* source = static_cast<const char*>(from);
  int64_t d = 0;
  for (; d + kWidth <= count; d += kWidth) {
    store(to + d, load_elements<kType>(source + d * size_of(kType)));
  }
  if (d == count) return;
  float rest[kWidth];
  store(rest, load_some<kType>(source + d * size_of(kType), count - d));
  copy_bytes(to + d, rest, 4 * (count - d));
}

static void load_queries(const Attention& call, const Tile& tile, const Piece& piece,
                         float* queries) {
  const int64_t dim = call.key_dim, depth = depth_of(call);
  const int64_t bytes = dim * size_of(call.type);
  const char* from = static_cast<const char*>(call.q);
  for (int64_t head = piece.head; head < piece.head_end; ++head) {
    for (int64_t i = 0; i < tile.length; ++i) {
      const char* row = from + ((tile.first + i) * call.heads + head * call.group) * bytes;
      for (int64_t g = 0; g < call.group; ++g, row += bytes, queries += depth) {
        if (in_pairs(call)) {
          queries[depth - 1] = 0.0f;
          copy_bytes(queries, row, bytes);
        } else if (call.type == kFloat32) {
          load_row<kFloat32>(row, dim, queries);
        } else if (call.type == kBFloat16) {
          load_row<kBFloat16>(row, dim, queries);
        } else {
          load_row<kFloat16>(row, dim, queries);
        }
      }
    }
  }
}

template <ElementType kType>
static void store_row(const float* mixed, float total, int64_t count, void* to) {
  char* target = static_cast<char*>(to);
  const Floats divisor = all(total == 0.0f ? 1.0f : total);
  for (int64_t d = 0; d < count; d += kWidth, target += kWidth * size_of(kType)) {
    const Floats x = load<Floats>(mixed + d) / divisor;
    if (d + kWidth <= count) {
      store_elements<kType>(target, x);
    } else {
      store_some<kType>(target, x, count - d);
    }
  }
}

static void store_results(const Attention& call, const Tile& tile, const Piece& piece,
                          const PartSums& sums) {
  const int64_t dim = call.value_dim, stride = value_stride(call);
  const int64_t bytes = dim * size_of(call.type);
  char* out = static_cast<char*>(call.out);
  int64_t row = 0;
  for (int64_t head = piece.head; head < piece.head_end; ++head) {
    for (int64_t i = 0; i < tile.length; ++i) {
      char* to = out + ((tile.first + i) * call.heads + head * call.group) * bytes;
      for (int64_t g = 0; g < call.group; ++g, ++row, to += bytes) {
        const float* mixed = sums.mixed + row * stride;
        if (call.type == kFloat32) {
          store_row<kFloat32>(mixed, sums.totals[row], dim, to);
        } else if (call.type == kBFloat16) {
          store_row<kBFloat16>(mixed, sums.totals[row], dim, to);
        } else {
          store_row<kFloat16>(mixed, sums.totals[row], dim, to);
        }
      }
    }
  }
}

// ------------------------------------------------------------------ one chunk

static void gather_scales(const Attention& call, const Chunk& chunk, int64_t head,
                          const Workspace& work) {
  const float* values = call.v == nullptr ? call.k_scale : call.v_scale;
  for (int64_t i = 0; i < kChunk; ++i) {
    work.key_scales[i] = call.k_scale[chunk.slots[i] * call.kv_heads + head];
    work.value_scales[i] = values[chunk.slots[i] * call.kv_heads + head];
  }
}

// Adds to a head's sums (from `row` on) what its queries see of a chunk.
template <bool kPairs>
static void attend_chunk(const Attention& call, const Tile& tile, const Chunk& chunk,
                         const Workspace& work, const PartSums& sums, int64_t row) {
  const int64_t stride = value_stride(call), depth = depth_of(call), group = call.group;
  const auto seen = [&](int64_t token) {
    return within(visible(call, tile.position + token), chunk.first, kChunk);
  };
  // Tokens that see something of it follow each other.
  int64_t first = 0, end = tile.length;
  while (first < end && seen(first).end <= seen(first).begin) ++first;
  while (first < end && seen(end - 1).end <= seen(end - 1).begin) --end;
  if (first == end) return;
  score<kPairs>(work.queries + (row + first * group) * depth, (end - first) * group, depth,
                work.keys, chunk.seen, work.scores);
  const Factors factors = {call.k_scale ? work.key_scales : nullptr,
                           call.k_scale ? work.value_scales : nullptr};
  const auto score_of = [&](int64_t token) {
    return work.scores + (token - first) * group * kChunk;
  };
  for (int64_t token = first; token < end; ++token) {
    for (int64_t g = 0; g < group; ++g) {
      const int64_t at = row + token * group + g;
      weigh<kPairs>(call, seen(token), factors, score_of(token) + g * kChunk, stride,
                    {sums.tops + at, work.lanes + at * kWidth, sums.mixed + at * stride});
    }
  }
  // Those that see the same go together.
  for (int64_t token = first; token < end;) {
    const Range tokens = seen(token);
    int64_t next = token + 1;
    while (next < end && seen(next).begin == tokens.begin && seen(next).end == tokens.end) ++next;
    mix<kPairs>(score_of(token), (next - token) * group, tokens, work.values, stride,
                sums.mixed + (row + token * group) * stride);
    token = next;
  }
}

// ------------------------------------------------------------------ one part, and all of them

JAXPAGED_INLINE void clear(float* floats, int64_t count, float value) {
  for (int64_t i = 0; i < count; ++i) floats[i] = value;
}

// Where a piece's first chunk begins that its tile sees something of.
JAXPAGED_INLINE int64_t first_chunk(const Attention& call, const Tile& tile, int64_t part) {
  return larger(part * kPart, visible(call, tile).begin) / kChunk * kChunk;
}

template <ElementType kCache, bool kPairs>
static void attend_part(const Attention& call, const Tile& tile, const Piece& piece,
                        const Ahead& ahead, int64_t part, const Workspace& work,
                        const PartSums& sums) {
  const int64_t rows = tile.length * call.group, every = rows * (piece.head_end - piece.head);
  clear(sums.mixed, every * value_stride(call), 0.0f);
  clear(sums.tops, every, kLowest);
  clear(work.lanes, every * kWidth, 0.0f);
  const Range range = visible(call, tile);
  const Range here = within(range, part * kPart, kPart);
  Chunk chunks[2];
  int64_t at = first_chunk(call, tile, part);
  locate(call, tile, at, chunks[0]);
  for (int64_t i = 0; at < part * kPart + here.end; at += kChunk, ++i) {
    const Chunk& chunk = chunks[i % 2];
    Chunk& next = chunks[(i + 1) % 2];
    Fetch fetch = {&next, 0};
    if (at + kChunk < smaller(range.end, piece.part_end * kPart)) {
      locate(call, tile, at + kChunk, next);
    } else if (ahead.tile) {
      locate(call, *ahead.tile, first_chunk(call, *ahead.tile, ahead.piece.part), next);
      fetch.heads = ahead.piece.head - piece.head;
    } else {
      fetch.chunk = nullptr;
    }
    for (int64_t head = piece.head; head < piece.head_end; ++head) {
      pack_keys<kCache, kPairs>(call, chunk, fetch, head, work.keys);
      pack_values<kCache, kPairs>(call, chunk, fetch, head, work.values);
      if (call.k_scale) gather_scales(call, chunk, head, work);
      attend_chunk<kPairs>(call, tile, chunk, work, sums, (head - piece.head) * rows);
    }
  }
  for (int64_t row = 0; row < every; ++row) {
    sums.totals[row] = sum_of(load<Floats>(work.lanes + row * kWidth));
  }
}

JAXPAGED_INLINE void add_row(const PartSums& state, const PartSums& more, int64_t row,
                             int64_t stride, bool fresh) {
  float* mixed = state.mixed + row * stride;
  const float* others = more.mixed + row * stride;
  if (fresh) {
    copy_bytes(mixed, others, 4 * stride);
    state.totals[row] = more.totals[row];
    state.tops[row] = more.tops[row];
    return;
  }
  const float top = state.tops[row] > more.tops[row] ? state.tops[row] : more.tops[row];
  const float keep = power_of_two(state.tops[row] - top), add = power_of_two(more.tops[row] - top);
  for (int64_t d = 0; d < stride; d += kWidth) {
    store(mixed + d, load<Floats>(mixed + d) * keep + load<Floats>(others + d) * add);
  }
  state.totals[row] = state.totals[row] * keep + more.totals[row] * add;
  state.tops[row] = top;
}

// Adds a part's sums to those of the parts before it, for rows that see something of it: a part
// that a row does not see changes none of its bits.
static void add_part(const Attention& call, const Tile& tile, int64_t heads, int64_t part,
                     const PartSums& state, const PartSums& more) {
  int64_t row = 0;
  for (int64_t head = 0; head < heads; ++head) {
    for (int64_t token = 0; token < tile.length; ++token) {
      const Range range = visible(call, tile.position + token);
      const Range here = within(range, part * kPart, kPart);
      for (int64_t g = 0; g < call.group; ++g, ++row) {
        if (here.begin >= here.end) continue;
        add_row(state, more, row, value_stride(call), range.begin / kPart == part);
      }
    }
  }
}

template <ElementType kCache, bool kPairs>
static void attend_parts(const Attention& call, const Tile& tile, const Piece& piece,
                         const Ahead& ahead, float* parts, const Workspace& work) {
  const int64_t heads = piece.head_end - piece.head;
  const int64_t rows = tile.length * call.group * heads, stride = value_stride(call);
  load_queries(call, tile, piece, work.queries);
  const PartSums state = part_sums(work.state, rows, stride);
  const bool alone = parts == nullptr && piece.part_end - piece.part == 1;
  for (int64_t part = piece.part; part < piece.part_end; ++part) {
    float* to = alone ? work.state
                : parts == nullptr ? work.part
                : parts + (part - piece.part) * floats_of_part(call, rows);
    const PartSums sums = part_sums(to, rows, stride);
    attend_part<kCache, kPairs>(call, tile, piece, ahead, part, work, sums);
    if (parts == nullptr && !alone) add_part(call, tile, heads, part, state, sums);
  }
  if (parts == nullptr) store_results(call, tile, piece, state);
}

// ------------------------------------------------------------------ what the dispatcher calls

static void attend(const Attention& call, const Tile& tile, const Piece& piece,
                   const Ahead& ahead, float* parts, void* scratch) {
  const Workspace work = workspace(call, tile.length, piece.head_end - piece.head, scratch);
#if JAXPAGED_PAIRS
  if (in_pairs(call)) return attend_parts<kBFloat16, true>(call, tile, piece, ahead, parts, work);
#endif
  switch (call.cache_type) {
    case kFloat32: return attend_parts<kFloat32, false>(call, tile, piece, ahead, parts, work);
    case kBFloat16: return attend_parts<kBFloat16, false>(call, tile, piece, ahead, parts, work);
    case kFloat16: return attend_parts<kFloat16, false>(call, tile, piece, ahead, parts, work);
    case kInt8: return attend_parts<kInt8, false>(call, tile, piece, ahead, parts, work);
    case kFloat8: return attend_parts<kFloat8, false>(call, tile, piece, ahead, parts, work);
  }
}

static void combine(const Attention& call, const Tile& tile, const Piece& piece,
                    const float* parts, void* scratch) {
  const int64_t heads = piece.head_end - piece.head;
  const Workspace work = workspace(call, tile.length, heads, scratch);
  const int64_t rows = tile.length * call.group * heads, stride = value_stride(call);
  const PartSums state = part_sums(work.state, rows, stride);
  for (int64_t part = piece.part; part < piece.part_end; ++part) {
    const float* at = parts + (part - piece.part) * floats_of_part(call, rows);
    add_part(call, tile, heads, part, state, part_sums(const_cast<float*>(at), rows, stride));
  }
  store_results(call, tile, piece, state);
}

static size_t scratch_bytes(const Attention& call, int64_t length, int64_t heads) {
  return workspace(call, length, heads, nullptr).bytes;
}

static size_t part_floats(const Attention& call, int64_t rows) {
  return static_cast<size_t>(floats_of_part(call, rows));
}

}  // namespace
}  // namespace JAXPAGED_ISA
}  // namespace jaxpaged

#endif  // JAXPAGED_NATIVE_ATTEND_H_
