// What the dispatcher and the kernels of each instruction set tell each other.
//
// Only plain data: kernels are compiled several times, for processors that may lack what the next
// one has, so nothing here may make a compiler emit a function that the linker would share.
//
// Letters: T tokens, N query heads, K KV heads, G = N / K, H elements of a key, HV of a value,
// S slots of a pool.

#ifndef JAXPAGED_NATIVE_KERNELS_H_
#define JAXPAGED_NATIVE_KERNELS_H_

#include <stddef.h>
#include <stdint.h>

namespace jaxpaged {

enum ElementType : int32_t { kFloat32, kBFloat16, kFloat16, kInt8, kFloat8 };

// Context tokens that are summed at a time, at absolute multiples of it.
constexpr int64_t kChunk = 64;
// Context tokens whose sum is complete in itself. Threads share the work on a long context by
// such parts; their sums are put together in ascending order whoever made them.
constexpr int64_t kPart = 256;

// One call of attention, the same for all that work on it.
struct Attention {
  ElementType type;        // of queries and of the result
  ElementType cache_type;  // of the pools
  int64_t heads;           // N
  int64_t kv_heads;        // K
  int64_t group;           // G
  int64_t key_dim;         // H
  int64_t value_dim;       // HV
  int64_t slots;           // S
  int64_t block_size;
  int64_t table_width;
  int64_t window;  // 0: none
  float scale;     // of scores, in base 2
  float cap;       // 0: none; else scores are tanh(dot * scale) * cap
  const void* q;   // [T, N, H]
  void* out;       // [T, N, HV]
  const void* k;   // [S, K, H]
  const void* v;   // [S, K, HV], or null: the first HV elements of the keys
  const float* k_scale;  // [S, K], or null
  const float* v_scale;
  const int32_t* tables;  // [rows, table_width]
};

// Consecutive query tokens of one sequence.
struct Tile {
  int64_t first;     // token of q
  int64_t length;    // tokens
  int64_t row;       // of the block table
  int64_t position;  // of the first token in its sequence
};

// A piece of a tile's work: KV heads [head, head_end) over parts [part, part_end) of the context.
struct Piece {
  int64_t head, head_end;
  int64_t part, part_end;
};

// What comes after a piece, to be fetched from memory towards its end.
struct Ahead {
  const Tile* tile;  // or null
  Piece piece;
};

// New keys or new values of T tokens for one pool.
struct Write {
  ElementType type;        // of the rows
  ElementType cache_type;  // of the pool
  int64_t kv_heads;        // K
  int64_t dim;             // H or HV
  int64_t slots;           // S
  const void* rows;        // [T, K, dim]
  const int32_t* to;       // [T], slots; those out of range are dropped
  void* pool;              // [S, K, dim]
  float* scales;           // [S, K], or null
};

// Rows times a matrix of bfloat16, which is stored by the columns of the result. Row i goes to row i
// of the result if i < head, else to row i + gap.
struct MatrixProduct {
  const uint16_t* x;       // [rows, depth]
  const uint16_t* matrix;  // [columns, depth]
  // Float32 [.., columns]; or, where columns are pairs of a gate and what it lets pass, bfloat16
  // [.., columns / 2]: silu(gate) times the other.
  void* out;
  int64_t rows, columns, depth;
  int64_t head, gap;
  bool gated;
  const float* onto;  // what the result is added to, in its shape; or null
};

// Columns of a product that are computed together, from a multiple of this on.
constexpr int kBlockColumns = 32;

// Rows divided by the root of their mean square, times a weight.
struct RootMeanSquareNorm {
  const float* x;  // [rows, width]
  ElementType weight_type;
  const void* weight;  // [width]
  float* out;          // [rows, width]
  int64_t width;
  float eps;
  float offset;  // added to each weight
};

// The heads of queries and keys turned by their positions, and all three apart from each other. Of
// a group of `group` query heads each come first, then its key and its value.
struct Rotation {
  ElementType type;  // of the results
  const float* x;    // [rows, kv_heads, group + 2, dim]
  const float* cos;  // [rows, half]
  const float* sin;
  int64_t kv_heads, group, dim, half;
  void* q;  // [rows, kv_heads * group, dim]
  void* k;  // [rows, kv_heads, dim]
  void* v;
};

struct Kernels {
  const char* name;
  // Bytes that `attend` and `combine` need to work in for a tile of so many tokens and KV heads.
  size_t (*scratch_bytes)(const Attention&, int64_t length, int64_t heads);
  // Floats of one part's sums for so many query rows.
  size_t (*part_floats)(const Attention&, int64_t rows);
  // Attention of a tile. Where `parts` is null, the piece has all parts of the context, and the
  // result goes to `out`. Else each part's sums go to
  // parts + (part - piece.part) * part_floats(length * G * heads).
  void (*attend)(const Attention&, const Tile&, const Piece&, const Ahead&, float* parts,
                 void* scratch);
  // Puts the sums of the piece's parts together, which are all, and writes the result.
  void (*combine)(const Attention&, const Tile&, const Piece&, const float* parts, void* scratch);
  // Writes tokens [first, end).
  void (*write)(const Write&, int64_t first, int64_t end);
  // Null where the processor does not multiply bfloat16, and others do no worse.
  void (*multiply)(const MatrixProduct&, int64_t block, int64_t block_end, int64_t row,
                   int64_t row_end, void* scratch);
  // Bytes that `multiply` needs to work in.
  size_t (*multiply_bytes)(const MatrixProduct&);
  // To bfloat16, to the nearest.
  void (*round)(const float* from, uint16_t* to, int64_t count);
  // Rows [first, end).
  void (*normalize)(const RootMeanSquareNorm&, int64_t first, int64_t end);
  void (*rotate)(const Rotation&, int64_t first, int64_t end);
};

}  // namespace jaxpaged

#endif  // JAXPAGED_NATIVE_KERNELS_H_
