// What XLA calls for the rest of a layer: products with a matrix, and norms.

#include <algorithm>
#include <cstring>
#include <optional>

#include "arguments.h"
#include "live.h"
#include "processor.h"
#include "workers.h"

namespace jaxpaged {
namespace {

// Pieces of work for each thread: so many that none waits long for the others.
constexpr int64_t kPiecesOfThread = 4;
// Rows of x that a piece has at least where there are not enough blocks of columns for all threads:
// turning a block takes as long as multiplying about five.
constexpr int64_t kRowsOfPiece = 48;
constexpr int64_t kBlocksOfPiece = 16;
constexpr int64_t kFloatsOfPiece = 16384;  // a few microseconds

Scratch& scratch_of_piece() {
  thread_local Scratch scratch;
  return scratch;
}

Scratch& scratch_of_call() {
  thread_local Scratch scratch;
  return scratch;
}

ffi::Error no_memory() {
  return ffi::Error(ffi::ErrorCode::kResourceExhausted, "matrix product: no memory to work in.");
}

int64_t parts(int64_t total, int64_t size) { return (total + size - 1) / size; }

// `work(begin, end)` for all live rows, `width` floats each, on all threads.
template <typename Work>
void each_row(ffi::ThreadPool& pool, const LiveRows& live, int64_t width, const Work& work) {
  const int64_t rows_of_piece = std::max<int64_t>(kFloatsOfPiece / std::max<int64_t>(width, 1), 1);
  share(pool, parts(live.count(), rows_of_piece), pool.num_threads() - 1, [&](int64_t piece) {
    const int64_t i = piece * rows_of_piece;
    live.stretches(i, std::min(i + rows_of_piece, live.count()), work);
  });
}

// The live rows of x one after the other, as bfloat16. Null if there is no memory.
const uint16_t* gather(ffi::ThreadPool& pool, const ffi::AnyBuffer& x, const LiveRows& live,
                       int64_t depth) {
  if (x.element_type() == ffi::BF16) {
    const auto* rows = static_cast<const uint16_t*>(x.untyped_data());
    if (live.tail == 0 || live.gap() == 0) return rows;
    if (live.head == 0) return rows + live.first * depth;
  }
  const auto bytes = static_cast<size_t>(2 * live.count() * depth);
  auto* out = static_cast<uint16_t*>(scratch_of_call().of_size(bytes));
  if (out == nullptr) return nullptr;
  each_row(pool, live, depth, [&](int64_t row, int64_t end) {
    uint16_t* to = out + (row < live.first ? row : row - live.gap()) * depth;
    const int64_t first = row * depth, count = (end - row) * depth;
    if (x.element_type() == ffi::BF16) {
      std::memcpy(to, static_cast<const uint16_t*>(x.untyped_data()) + first,
                  static_cast<size_t>(2 * count));
    } else {
      kernels()->round(static_cast<const float*>(x.untyped_data()) + first, to, count);
    }
  });
  return out;
}

ffi::Error MatrixProductCall(ffi::ThreadPool pool, ffi::RemainingArgs given,
                             ffi::Result<ffi::AnyBuffer> out, int64_t first, bool gated,
                             bool has_onto) {
  Arguments args("matrix product", given);
  const auto x = args.take("x", {ffi::BF16, ffi::F32}, {kAny, kAny});
  if (!args.good()) return args.error();
  const int64_t total = x->dimensions()[0], depth = x->dimensions()[1];
  const auto matrix = args.take("weight", {ffi::BF16}, {kAny, depth});
  if (!args.good()) return args.error();
  const int64_t columns = matrix->dimensions()[0];
  std::optional<ffi::AnyBuffer> onto;
  if (has_onto) onto = args.take("onto", {ffi::F32}, {total, columns});
  const LiveRows live = take_live(args, total, first);
  args.finish();
  if (!args.good()) return args.error();
  args.require(!gated || !has_onto, "gates are not added to anything");
  args.require(!gated || columns % 2 == 0,
               "weight has " + words(columns) + " rows, expected pairs of a gate and another");
  if (gated) {
    args.check("result", *out, {ffi::BF16}, {total, columns / 2});
  } else {
    args.check("result", *out, {ffi::F32}, {total, columns});
  }
  args.require(kernels() != nullptr && kernels()->multiply != nullptr,
               "this processor does not multiply bfloat16");
  if (!args.good()) return args.error();
  const int64_t rows = live.count();
  if (rows == 0 || columns == 0) return ffi::Error::Success();

  const uint16_t* gathered = gather(pool, *x, live, depth);
  if (gathered == nullptr) return no_memory();
  const MatrixProduct product{gathered, static_cast<const uint16_t*>(matrix->untyped_data()),
                              out->untyped_data(), rows, columns, depth,
                              live.head, live.gap(), gated,
                              onto ? onto->typed_data<float>() : nullptr};
  const int64_t threads = std::max<int64_t>(pool.num_threads(), 1);
  const int64_t blocks = parts(columns, kBlockColumns);
  const int64_t wanted = threads * kPiecesOfThread;
  const int64_t across = std::min(std::max(wanted, parts(blocks, kBlocksOfPiece)), blocks);
  const int64_t down = std::clamp<int64_t>(wanted / across, 1, parts(rows, kRowsOfPiece));
  const int64_t rows_of_piece = parts(rows, down);
  const size_t bytes = kernels()->multiply_bytes(product);
  std::atomic<bool> starved{false};
  share(pool, across * down, threads - 1, [&](int64_t piece) {
    const int64_t place = piece % across;
    const int64_t row = piece / across * rows_of_piece;
    void* scratch = scratch_of_piece().of_size(bytes);
    if (bytes != 0 && scratch == nullptr) {
      starved = true;
      return;
    }
    kernels()->multiply(product, place * blocks / across, (place + 1) * blocks / across, row,
                        std::min(row + rows_of_piece, rows), scratch);
  });
  return starved ? no_memory() : ffi::Error::Success();
}

ffi::Error RootMeanSquareNormCall(ffi::ThreadPool pool, ffi::RemainingArgs given,
                                  ffi::Result<ffi::AnyBuffer> out, float eps, float offset,
                                  int64_t first) {
  Arguments args("root mean square norm", given);
  const auto x = args.take("x", {ffi::F32}, {kAny, kAny});
  if (!args.good()) return args.error();
  const int64_t rows = x->dimensions()[0], width = x->dimensions()[1];
  const auto weight = args.take("weight", {ffi::F32, ffi::BF16, ffi::F16}, {width});
  const LiveRows live = take_live(args, rows, first);
  args.finish();
  args.check("result", *out, {ffi::F32}, {rows, width});
  args.require(kernels() != nullptr, "there are no kernels for this processor");
  if (!args.good()) return args.error();

  const RootMeanSquareNorm norm{x->typed_data<float>(),
                                float_type(weight->element_type()),
                                weight->untyped_data(),
                                out->typed_data<float>(),
                                width,
                                eps,
                                offset};
  each_row(pool, live, width, [&](int64_t row, int64_t end) { kernels()->normalize(norm, row, end); });
  return ffi::Error::Success();
}

ffi::Error RotateCall(ffi::ThreadPool pool, ffi::RemainingArgs given,
                      ffi::Result<ffi::AnyBuffer> q, ffi::Result<ffi::AnyBuffer> k,
                      ffi::Result<ffi::AnyBuffer> v, int64_t first) {
  Arguments args("rotate", given);
  const auto x = args.take("x", {ffi::F32}, {kAny, kAny, kAny, kAny});
  if (!args.good()) return args.error();
  const int64_t rows = x->dimensions()[0], kv_heads = x->dimensions()[1];
  const int64_t group = x->dimensions()[2] - 2, dim = x->dimensions()[3];
  const auto table = args.take("table", {ffi::F32}, {2, rows, kAny});
  const LiveRows live = take_live(args, rows, first);
  args.finish();
  if (!args.good()) return args.error();
  const int64_t half = table->dimensions()[2];
  args.require(group > 0, "x has " + words(group + 2) + " heads a group, expected at least 3");
  args.require(2 * half <= dim, "table turns " + words(2 * half) + " elements, and heads have " +
                                    words(dim));
  const ffi::DataType type = q->element_type();
  args.check("q", *q, {ffi::F32, ffi::BF16, ffi::F16}, {rows, kv_heads * group, dim});
  args.check("k", *k, {type}, {rows, kv_heads, dim});
  args.check("v", *v, {type}, {rows, kv_heads, dim});
  args.require(kernels() != nullptr, "there are no kernels for this processor");
  if (!args.good()) return args.error();

  const auto* cos = table->typed_data<float>();
  const Rotation rotation{float_type(type), x->typed_data<float>(), cos, cos + rows * half,
                          kv_heads, group, dim, half,
                          q->untyped_data(), k->untyped_data(), v->untyped_data()};
  each_row(pool, live, kv_heads * (group + 2) * dim,
           [&](int64_t row, int64_t end) { kernels()->rotate(rotation, row, end); });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxpaged

#define JAXPAGED_EXPORT extern "C" __attribute__((visibility("default")))

JAXPAGED_EXPORT XLA_FFI_Error* jaxpaged_matrix_product(XLA_FFI_CallFrame*);
JAXPAGED_EXPORT XLA_FFI_Error* jaxpaged_rms_norm(XLA_FFI_CallFrame*);
JAXPAGED_EXPORT XLA_FFI_Error* jaxpaged_rotate(XLA_FFI_CallFrame*);

// Whether there is a matrix product for this processor that does better than XLA's.
JAXPAGED_EXPORT int jaxpaged_multiplies() {
  const jaxpaged::Kernels* chosen = jaxpaged::kernels();
  return chosen != nullptr && chosen->multiply != nullptr && !jaxpaged::has_bf16_tiles();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxpaged_matrix_product, jaxpaged::MatrixProductCall,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .RemainingArgs()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<int64_t>("first")
                                  .Attr<bool>("gated")
                                  .Attr<bool>("onto"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxpaged_rms_norm, jaxpaged::RootMeanSquareNormCall,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .RemainingArgs()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<float>("eps")
                                  .Attr<float>("offset")
                                  .Attr<int64_t>("first"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxpaged_rotate, jaxpaged::RotateCall,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .RemainingArgs()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<int64_t>("first"));
