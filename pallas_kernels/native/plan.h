// How the work of one call of attention is cut into pieces for threads. No result depends on it.

#ifndef JAXPAGED_NATIVE_PLAN_H_
#define JAXPAGED_NATIVE_PLAN_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <deque>
#include <vector>

#include "kernels.h"
#include "workers.h"
#include "xla/ffi/api/ffi.h"

namespace jaxpaged {

// A tile's rows of one KV head are so many at most: their sums stay in the cache of a core.
constexpr int64_t kTileRows = 64;
// Costs, roughly in nanoseconds, for 64 elements of a key and a value.
constexpr int64_t kChunkCost = 400, kRowCost = 60;
// Work that is not worth waking a thread for.
constexpr int64_t kAloneCost = 15000;
// Pieces for each thread, so that all end at about the same time.
constexpr int64_t kPiecesPerThread = 6;

// A tile whose context is cut, and whoever finishes last puts its parts together.
struct Split {
  Piece whole;
  size_t parts;  // where its sums are, in floats
  std::atomic<int64_t> left;

  Split(const Piece& piece, size_t at, int64_t pieces) : whole(piece), parts(at), left(pieces) {}
};

struct Job {
  int64_t tile;
  Piece piece;
  Split* split;  // null if the piece has all parts
  int64_t cost;
};

class Plan {
 public:
  Plan(const Attention& call, const Kernels& kernels, const std::vector<Tile>& tiles,
       int64_t threads)
      : call_(call), kernels_(kernels), tiles_(tiles) {
    int64_t total = 0, heaps = 0;
    for (const Tile& tile : tiles) {
      total += cost(tile, parts(tile)) * call.kv_heads;
      heaps += call.kv_heads;
    }
    alone_ = threads <= 1 || total <= kAloneCost;
    target_ = alone_ ? total
                     : std::max<int64_t>(kAloneCost / 4, total / (threads * kPiecesPerThread));
    cut_parts_ = heaps < threads * kPiecesPerThread;
    for (size_t i = 0; i < tiles.size(); ++i) add(static_cast<int64_t>(i));
    if (!alone_) {  // the longest first
      std::stable_sort(jobs_.begin(), jobs_.end(),
                       [](const Job& a, const Job& b) { return a.cost > b.cost; });
    }
  }

  // False if there was not enough memory.
  bool run(xla::ffi::ThreadPool& pool, int64_t threads) {
    thread_local Scratch sums;
    float* parts = nullptr;
    if (floats_ != 0) {
      parts = static_cast<float*>(sums.of_size(4 * floats_));
      if (parts == nullptr) return false;
    }
    std::atomic<bool> enough{true};
    const auto run_one = [&](int64_t i) {
      thread_local Scratch scratch;
      const Job& job = jobs_[static_cast<size_t>(i)];
      const Tile& tile = tiles_[static_cast<size_t>(job.tile)];
      const int64_t heads = job.piece.head_end - job.piece.head;
      void* space = scratch.of_size(kernels_.scratch_bytes(call_, tile.length, heads));
      if (space == nullptr) {
        enough.store(false);
        return;
      }
      Ahead ahead = {};
      if (i + 1 < static_cast<int64_t>(jobs_.size())) {
        const Job& next = jobs_[static_cast<size_t>(i + 1)];
        ahead = {&tiles_[static_cast<size_t>(next.tile)], next.piece};
      }
      if (job.split == nullptr) {
        return kernels_.attend(call_, tile, job.piece, ahead, nullptr, space);
      }
      Split& split = *job.split;
      float* base = parts + split.parts;
      const size_t size = kernels_.part_floats(call_, tile.length * call_.group * heads);
      const int64_t place = job.piece.part - split.whole.part;
      float* mine = base + static_cast<size_t>(place) * size;
      kernels_.attend(call_, tile, job.piece, ahead, mine, space);
      if (split.left.fetch_sub(1, std::memory_order_acq_rel) == 1) {
        kernels_.combine(call_, tile, split.whole, base, space);
      }
    };
    share(pool, static_cast<int64_t>(jobs_.size()), alone_ ? 0 : threads - 1, run_one);
    return enough.load();
  }

 private:
  // The parts of the context that the tile sees.
  Piece parts(const Tile& tile) const {
    const int64_t first =
        call_.window == 0 ? 0 : std::max<int64_t>(0, tile.position - call_.window + 1);
    return {0, call_.kv_heads, first / kPart, (tile.position + tile.length - 1) / kPart + 1};
  }

  // Of one head.
  int64_t cost(const Tile& tile, const Piece& piece) const {
    const int64_t context = (tile.position + tile.length) - piece.part * kPart;
    const int64_t chunks = std::min((piece.part_end - piece.part) * kPart, context) / kChunk + 1;
    const int64_t each = kChunkCost + kRowCost * tile.length * call_.group;
    return chunks * each * (call_.key_dim + call_.value_dim) / 128 + 1;
  }

  void add(int64_t index) {
    const Tile& tile = tiles_[static_cast<size_t>(index)];
    const Piece whole = parts(tile);
    const int64_t each = cost(tile, whole);
    // Decode rows take all heads at once: a token's are neighbours in memory.
    int64_t together = call_.kv_heads;
    if (!alone_) {
      const int64_t fit = std::max<int64_t>(1, target_ / each);
      together = tile.length > 1 ? 1 : std::min(fit, call_.kv_heads);
    }
    const int64_t count = whole.part_end - whole.part;
    int64_t pieces = 1;
    if (!alone_ && cut_parts_ && together == 1) {
      pieces = std::min(count, std::max<int64_t>(1, each / target_));
    }
    for (int64_t head = 0; head < call_.kv_heads; head += together) {
      Piece piece = whole;
      piece.head = head;
      piece.head_end = std::min(head + together, call_.kv_heads);
      if (pieces == 1) {
        jobs_.push_back({index, piece, nullptr, each * (piece.head_end - head)});
        continue;
      }
      splits_.emplace_back(piece, floats_, pieces);
      floats_ += static_cast<size_t>(count) *
                 kernels_.part_floats(call_, tile.length * call_.group * (piece.head_end - head));
      for (int64_t i = 0; i < pieces; ++i) {
        Piece some = piece;
        some.part = whole.part + count * i / pieces;
        some.part_end = whole.part + count * (i + 1) / pieces;
        jobs_.push_back({index, some, &splits_.back(), cost(tile, some)});
      }
    }
  }

  const Attention& call_;
  const Kernels& kernels_;
  const std::vector<Tile>& tiles_;
  std::vector<Job> jobs_;
  std::deque<Split> splits_;  // which stay where they are
  size_t floats_ = 0;
  bool alone_ = true, cut_parts_ = false;
  int64_t target_ = 0;
};

}  // namespace jaxpaged

#endif  // JAXPAGED_NATIVE_PLAN_H_
