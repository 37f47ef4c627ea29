// What XLA calls for the rest of a layer: products with a matrix, and norms.

#include <algorithm>

#include "arguments.h"
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

ffi::Error MatrixProductCall(ffi::ThreadPool pool, ffi::RemainingArgs given,
                             ffi::Result<ffi::AnyBuffer> out) {
  Arguments args("matrix product", given);
  const auto x = args.take("x", {ffi::BF16, ffi::F32}, {kAny, kAny});
  if (!args.good()) return args.error();
  const int64_t rows = x->dimensions()[0], depth = x->dimensions()[1];
  const auto matrix = args.take("weight", {ffi::BF16}, {kAny, depth});
  args.finish();
  if (!args.good()) return args.error();
  const int64_t columns = matrix->dimensions()[0];
  args.check("result", *out, {ffi::F32}, {rows, columns});
  args.require(kernels() != nullptr && kernels()->multiply != nullptr,
               "this processor does not multiply bfloat16");
  if (!args.good()) return args.error();
  if (rows == 0 || columns == 0) return ffi::Error::Success();

  MatrixProduct product{nullptr, static_cast<const uint16_t*>(matrix->untyped_data()),
                        out->typed_data<float>(), rows, columns, depth};
  if (x->element_type() == ffi::BF16) {
    product.x = static_cast<const uint16_t*>(x->untyped_data());
  } else {
    auto* rounded = static_cast<uint16_t*>(scratch_of_call().of_size(2 * rows * depth));
    if (rounded == nullptr) return no_memory();
    const FloatMode mode;
    kernels()->round(static_cast<const float*>(x->untyped_data()), rounded, rows * depth);
    product.x = rounded;
  }
  const int64_t threads = std::max<int64_t>(pool.num_threads(), 1);
  const int64_t blocks = parts(columns, kBlockColumns);
  const int64_t wanted = threads * kPiecesOfThread;
  const int64_t blocks_of_piece =
      std::clamp<int64_t>(blocks / wanted, 1, kBlocksOfPiece);
  const int64_t across = parts(blocks, blocks_of_piece);
  const int64_t down = std::clamp<int64_t>(wanted / across, 1, parts(rows, kRowsOfPiece));
  const int64_t rows_of_piece = parts(rows, down);
  const size_t bytes = kernels()->multiply_bytes(product);
  std::atomic<bool> starved{false};
  share(pool, across * down, threads - 1, [&](int64_t piece) {
    const int64_t block = piece % across * blocks_of_piece;
    const int64_t row = piece / across * rows_of_piece;
    void* scratch = scratch_of_piece().of_size(bytes);
    if (bytes != 0 && scratch == nullptr) {
      starved = true;
      return;
    }
    kernels()->multiply(product, block, std::min(block + blocks_of_piece, blocks), row,
                        std::min(row + rows_of_piece, rows), scratch);
  });
  return starved ? no_memory()
                 : ffi::Error::Success();
}

ffi::Error RootMeanSquareNormCall(ffi::ThreadPool pool, ffi::RemainingArgs given,
                                  ffi::Result<ffi::AnyBuffer> out, float eps,
                                  float offset) {
  Arguments args("root mean square norm", given);
  const auto x = args.take("x", {ffi::F32}, {kAny, kAny});
  if (!args.good()) return args.error();
  const int64_t rows = x->dimensions()[0], width = x->dimensions()[1];
  const auto weight = args.take("weight", {ffi::F32, ffi::BF16, ffi::F16}, {width});
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
  const int64_t rows_of_piece = std::max<int64_t>(kFloatsOfPiece / std::max<int64_t>(width, 1), 1);
  share(pool, parts(rows, rows_of_piece), pool.num_threads() - 1, [&](int64_t piece) {
    const int64_t row = piece * rows_of_piece;
    kernels()->normalize(norm, row, std::min(row + rows_of_piece, rows));
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxpaged

#define JAXPAGED_EXPORT extern "C" __attribute__((visibility("default")))

JAXPAGED_EXPORT XLA_FFI_Error* jaxpaged_matrix_product(XLA_FFI_CallFrame*);
JAXPAGED_EXPORT XLA_FFI_Error* jaxpaged_rms_norm(XLA_FFI_CallFrame*);

// Whether there is a matrix product for this processor that does better than XLA's.
JAXPAGED_EXPORT int jaxpaged_multiplies() {
  const jaxpaged::Kernels* chosen = jaxpaged::kernels();
  return chosen != nullptr && chosen->multiply != nullptr && !jaxpaged::has_bf16_tiles();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxpaged_matrix_product, jaxpaged::MatrixProductCall,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .RemainingArgs()
                                  .Ret<xla::ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxpaged_rms_norm, jaxpaged::RootMeanSquareNormCall,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .RemainingArgs()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<float>("eps")
                                  .Attr<float>("offset"));
