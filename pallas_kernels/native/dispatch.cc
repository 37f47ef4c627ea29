// What XLA calls: the handlers check their arguments, cut the work into pieces, and share them with
// the threads of XLA's pool. Compiled once, for every processor of the kind.

#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "arguments.h"
#include "kernels.h"
#include "plan.h"
#include "processor.h"
#include "workers.h"
#include "xla/ffi/api/ffi.h"

namespace jaxpaged {
namespace {

constexpr double kLog2E = 1.44269504088896340736;

ffi::Error no_kernels() {
  return ffi::Error::InvalidArgument(
      "The native kernels need a processor with SSE4.2 and POPCNT; take another backend.");
}

ffi::Error no_memory() {
  return ffi::Error(ffi::ErrorCode::kResourceExhausted,
                    "There was no memory to work in for the native kernels.");
}

const int32_t* ints(const ffi::AnyBuffer& buffer) {
  return static_cast<const int32_t*>(buffer.untyped_data());
}

// ------------------------------------------------------------------ writing

// New keys and values, and where they go.
struct News {
  Write keys, values;  // values.rows is null in a latent cache
  int64_t tokens = 0;
};

News take_news(Arguments& args, ffi::DataType type, const Cache& cache) {
  News news = {};
  const auto rows = args.take("k", {type}, {kAny, cache.kv_heads, cache.key_dim});
  if (!rows) return news;
  const int64_t tokens = rows->dimensions()[0];
  std::optional<ffi::AnyBuffer> values;
  if (cache.v) {
    values = args.take("v", {type}, {tokens, cache.kv_heads, cache.value_dim});
    if (!values) return news;
  }
  const auto slots = args.take("slots", {ffi::S32}, {tokens});
  if (!slots) return news;
  news.tokens = tokens;
  news.keys = {float_type(type),      cache.type,  cache.kv_heads, cache.key_dim, cache.slots,
               rows->untyped_data(), ints(*slots), cache.k,        cache.k_scale};
  if (values) {
    news.values = news.keys;
    news.values.dim = cache.value_dim;
    news.values.rows = values->untyped_data();
    news.values.pool = cache.v;
    news.values.scales = cache.v_scale;
  }
  return news;
}

void write_news(ffi::ThreadPool& pool, const Kernels& kernels, const News& news) {
  constexpr int64_t kTokens = 32;  // a piece of work
  // Below it no thread is woken. Copying is a matter of memory, and quantising is not.
  const int64_t alone = news.keys.scales ? 1 << 15 : 1 << 18;
  const int64_t pieces = (news.tokens + kTokens - 1) / kTokens;
  const int64_t elements = news.tokens * news.keys.kv_heads * news.keys.dim;
  const int64_t helpers = elements < alone ? 0 : pool.num_threads() - 1;
  share(pool, pieces, helpers, [&](int64_t piece) {
    const int64_t end = std::min((piece + 1) * kTokens, news.tokens);
    kernels.write(news.keys, piece * kTokens, end);
    if (news.values.rows) kernels.write(news.values, piece * kTokens, end);
  });
}

// The pools' results are the same memory as the arguments; if a compiler has not seen to it, they
// are copied, and `cache` goes on with the results.
void go_on_with_results(Arguments& args, ffi::RemainingRets& results, size_t first, Cache& cache) {
  const auto one = [&](const char* name, void*& pool, int64_t elements, int64_t size) {
    if (pool == nullptr || !args.good()) return;
    auto found = results.get<ffi::AnyBuffer>(first++);
    if (!found.has_value()) {
      return args.refuse(std::string("the result for ") + name + " is missing");
    }
    const ffi::AnyBuffer buffer = **found;
    if (static_cast<int64_t>(buffer.size_bytes()) != elements * size) {
      return args.refuse(std::string("the result for ") + name + " has another size than it");
    }
    if (buffer.untyped_data() != pool) {
      std::memcpy(buffer.untyped_data(), pool, buffer.size_bytes());
      pool = buffer.untyped_data();
    }
  };
  const int64_t heads = cache.slots * cache.kv_heads;
  const int64_t size = cache.type == kFloat32 ? 4 : cache.type >= kInt8 ? 1 : 2;
  void* k_scale = cache.k_scale;
  void* v_scale = cache.v_scale;
  one("kv.k", cache.k, heads * cache.key_dim, size);
  one("kv.v", cache.v, heads * cache.value_dim, size);
  one("kv.k_scale", k_scale, heads, 4);
  one("kv.v_scale", v_scale, heads, 4);
  cache.k_scale = static_cast<float*>(k_scale);
  cache.v_scale = static_cast<float*>(v_scale);
}

// Arguments: kv.k, [kv.v], [kv.k_scale, [kv.v_scale]], k, [v], slots. Results: the pools.
ffi::Error write_kv(ffi::ThreadPool pool, ffi::RemainingArgs inputs, ffi::RemainingRets results,
                    bool has_values, bool has_scales) {
  if (kernels() == nullptr) return no_kernels();
  Arguments args("write_kv", inputs);
  // The type of the rows decides what an integer pool holds.
  const size_t pools = (has_values ? 2 : 1) * (has_scales ? 2 : 1);
  auto rows = inputs.get<ffi::AnyBuffer>(pools);
  if (!rows.has_value()) return ffi::Error::InvalidArgument("write_kv: argument k is missing.");
  args.check("k", *rows, {ffi::F32, ffi::BF16, ffi::F16}, {kAny, kAny, kAny});
  const ffi::DataType type = rows->element_type();
  Cache cache = take_cache(args, type, has_values, has_scales, 1);
  go_on_with_results(args, results, 0, cache);
  const News news = take_news(args, type, cache);
  args.finish();
  if (!args.good()) return args.error();
  write_news(pool, *kernels(), news);
  return ffi::Error::Success();
}

// ------------------------------------------------------------------ attention

struct Settings {
  int64_t block_size;
  double scale;
  int64_t window;   // 0: none
  double soft_cap;  // 0: none
  int64_t value_dim;
  bool has_values, has_scales, has_rows, has_tiles;
};

// Query tokens, the rows of the block table and the positions that they have.
struct Queries {
  std::vector<Tile> tiles;
  std::vector<std::pair<int64_t, int64_t>> unused;  // tokens [begin, end) whose result is 0
};

class QueryReader {
 public:
  QueryReader(Arguments& args, int64_t tokens, int64_t table_rows, int64_t capacity, int64_t group)
      : args_(args),
        tokens_(tokens),
        table_rows_(table_rows),
        capacity_(capacity),
        longest_(std::max<int64_t>(1, kTileRows / group)) {}

  // Returns the number of decode rows.
  int64_t read_rows() {
    const auto positions = args_.take("positions", {ffi::S32}, {kAny});
    if (!positions) return 0;
    const int64_t rows = positions->dimensions()[0];
    args_.require(rows <= tokens_ && rows <= table_rows_,
                  "there are " + words(rows) + " positions, for " + words(tokens_) +
                      " queries and " + words(table_rows_) + " rows of block_tables");
    for (int64_t row = 0; args_.good() && row < rows; ++row) {
      const int64_t position = ints(*positions)[row];
      if (position < 0) {
        skip(row, row + 1);
      } else {
        found.tiles.push_back({row, 1, row, std::min(position, capacity_ - 1)});
      }
    }
    return rows;
  }

  // `first`: the token where prompts begin.
  void read_tiles(int64_t first) {
    const auto rows = args_.take("tiles.row", {ffi::S32}, {kAny});
    if (!rows) return;
    const int64_t room = rows->dimensions()[0];
    const auto starts = args_.take("tiles.start", {ffi::S32}, {room});
    const auto lengths = args_.take("tiles.length", {ffi::S32}, {room});
    const auto positions = args_.take("tiles.position", {ffi::S32}, {room});
    const auto count = args_.take("tiles.count", {ffi::S32}, {});
    if (!count) return;
    const int64_t used = ints(*count)[0];
    args_.require(0 <= used && used <= room,
                  "tiles.count is " + words(used) + ", and there are " + words(room) + " tiles");
    int64_t next = first;
    for (int64_t i = 0; args_.good() && i < used; ++i) {
      const int64_t begin = first + ints(*starts)[i], length = ints(*lengths)[i];
      if (length == 0) continue;
      if (length < 0 || begin < next || begin + length > tokens_) {
        return args_.refuse("tile " + words(i) + " has start " + words(begin - first) +
                            " and length " + words(length) + ", where tokens " +
                            words(next - first) + " to " + words(tokens_ - first - 1) +
                            " are left");
      }
      skip(next, begin);
      next = begin + length;
      const int64_t row = std::min<int64_t>(std::max(0, ints(*rows)[i]), table_rows_ - 1);
      const int64_t position = std::max(0, ints(*positions)[i]);
      for (int64_t at = 0; at < length; at += longest_) {
        const int64_t some = std::min(longest_, length - at);
        const int64_t last = std::max<int64_t>(0, capacity_ - some);
        found.tiles.push_back({begin + at, some, row, std::min(position + at, last)});
      }
    }
    skip(next, tokens_);
  }

  Queries found;

 private:
  void skip(int64_t begin, int64_t end) {
    if (begin == end) return;
    auto& unused = found.unused;
    if (!unused.empty() && unused.back().second == begin) {
      unused.back().second = end;
    } else {
      unused.emplace_back(begin, end);
    }
  }

  Arguments& args_;
  const int64_t tokens_, table_rows_, capacity_, longest_;
};

// Arguments: q, block_tables, the pools, [positions], [tiles.row, start, length, position, count],
// and, where `writes`, k, [v], slots, which are written first. Results: out and, where `writes`,
// the pools.
ffi::Error attention(const char* name, ffi::ThreadPool pool, ffi::RemainingArgs inputs,
                     ffi::RemainingRets results, const Settings& set, bool writes) {
  if (kernels() == nullptr) return no_kernels();
  Arguments args(name, inputs);
  const auto q = args.take("q", {ffi::F32, ffi::BF16, ffi::F16}, {kAny, kAny, kAny});
  const auto tables = args.take("block_tables", {ffi::S32}, {kAny, kAny});
  if (!args.good()) return args.error();
  const int64_t tokens = q->dimensions()[0], heads = q->dimensions()[1];
  Cache cache = take_cache(args, q->element_type(), set.has_values, set.has_scales, set.value_dim);
  if (!args.good()) return args.error();
  args.require(q->dimensions()[2] == cache.key_dim,
               "argument q has " + words(q->dimensions()[2]) + " elements a head, and kv.k " +
                   words(cache.key_dim));
  args.require(heads > 0 && heads % cache.kv_heads == 0,
               "argument q has " + words(heads) + " heads, which is no multiple of the " +
                   words(cache.kv_heads) + " of kv.k");
  args.require(set.block_size > 0 && cache.slots % set.block_size == 0 && cache.slots > 0,
               "kv.k has " + words(cache.slots) + " slots, which are no blocks of block_size " +
                   words(set.block_size));
  args.require(set.window >= 0, "window is " + words(set.window) + ", expected above 0");
  const int64_t table_rows = tables->dimensions()[0], width = tables->dimensions()[1];
  args.require(table_rows > 0 && width > 0, "argument block_tables has the shape " +
                                                shape_text(tables->dimensions()) +
                                                ", without elements");
  if (!args.good()) return args.error();
  if (writes) go_on_with_results(args, results, 1, cache);

  QueryReader reader(args, tokens, table_rows, width * set.block_size, heads / cache.kv_heads);
  const int64_t rows = set.has_rows ? reader.read_rows() : 0;
  if (set.has_tiles) {
    reader.read_tiles(rows);
  } else {
    args.require(rows == tokens, "there are " + words(rows) + " positions, for " + words(tokens) +
                                     " queries");
  }
  News news = {};
  if (writes) news = take_news(args, q->element_type(), cache);
  args.finish();
  auto result = results.get<ffi::AnyBuffer>(0);
  if (args.good() && !result.has_value()) args.refuse("the result is missing");
  if (args.good()) {
    args.check("out", **result, {q->element_type()}, {tokens, heads, cache.value_dim});
  }
  if (!args.good()) return args.error();

  Attention call;
  call.type = float_type(q->element_type());
  call.cache_type = cache.type;
  call.heads = heads;
  call.kv_heads = cache.kv_heads;
  call.group = heads / cache.kv_heads;
  call.key_dim = cache.key_dim;
  call.value_dim = cache.value_dim;
  call.slots = cache.slots;
  call.block_size = set.block_size;
  call.table_width = width;
  call.window = set.window;
  const bool capped = set.soft_cap != 0.0;
  call.scale = static_cast<float>(capped ? set.scale / set.soft_cap : set.scale * kLog2E);
  call.cap = capped ? static_cast<float>(set.soft_cap * kLog2E) : 0.0f;
  call.q = q->untyped_data();
  call.out = (*result)->untyped_data();
  call.k = cache.k;
  call.v = cache.v;
  call.k_scale = cache.k_scale;
  call.v_scale = cache.v_scale;
  call.tables = ints(*tables);

  if (writes) write_news(pool, *kernels(), news);
  const size_t bytes = (*result)->size_bytes() / static_cast<size_t>(std::max<int64_t>(1, tokens));
  for (const auto& [begin, end] : reader.found.unused) {
    std::memset(static_cast<char*>(call.out) + static_cast<size_t>(begin) * bytes, 0,
                static_cast<size_t>(end - begin) * bytes);
  }
  if (reader.found.tiles.empty()) return ffi::Error::Success();
  const int64_t threads = pool.num_threads();
  Plan plan(call, *kernels(), reader.found.tiles, threads);
  return plan.run(pool, threads) ? ffi::Error::Success() : no_memory();
}

ffi::Error paged_attention(ffi::ThreadPool pool, ffi::RemainingArgs inputs,
                           ffi::RemainingRets results, int64_t block_size, double scale,
                           int64_t window, double soft_cap, int64_t value_dim, bool has_values,
                           bool has_scales, bool has_rows, bool has_tiles) {
  const Settings settings = {block_size, scale,      window,     soft_cap, value_dim,
                             has_values, has_scales, has_rows,   has_tiles};
  return attention("paged_attention", pool, inputs, results, settings, false);
}

ffi::Error attend(ffi::ThreadPool pool, ffi::RemainingArgs inputs, ffi::RemainingRets results,
                  int64_t block_size, double scale, int64_t window, double soft_cap,
                  int64_t value_dim, bool has_values, bool has_scales, bool has_rows,
                  bool has_tiles) {
  const Settings settings = {block_size, scale,      window,     soft_cap, value_dim,
                             has_values, has_scales, has_rows,   has_tiles};
  return attention("attend", pool, inputs, results, settings, true);
}

auto bind_attention() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .RemainingArgs()
      .RemainingRets()
      .Attr<int64_t>("block_size")
      .Attr<double>("scale")
      .Attr<int64_t>("window")
      .Attr<double>("soft_cap")
      .Attr<int64_t>("value_dim")
      .Attr<bool>("values")
      .Attr<bool>("scales")
      .Attr<bool>("rows")
      .Attr<bool>("tiles");
}

}  // namespace
}  // namespace jaxpaged

#define JAXPAGED_EXPORT extern "C" __attribute__((visibility("default")))

JAXPAGED_EXPORT XLA_FFI_Error* jaxpaged_write_kv(XLA_FFI_CallFrame*);
JAXPAGED_EXPORT XLA_FFI_Error* jaxpaged_paged_attention(XLA_FFI_CallFrame*);
JAXPAGED_EXPORT XLA_FFI_Error* jaxpaged_attend(XLA_FFI_CallFrame*);

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxpaged_write_kv, jaxpaged::write_kv,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<bool>("values")
                                  .Attr<bool>("scales"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxpaged_paged_attention, jaxpaged::paged_attention,
                              jaxpaged::bind_attention());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxpaged_attend, jaxpaged::attend, jaxpaged::bind_attention());

// The kernels that run on this processor, or "none".
JAXPAGED_EXPORT const char* jaxpaged_native_isa() {
  const jaxpaged::Kernels* chosen = jaxpaged::kernels();
  return chosen ? chosen->name : "none";
}
