// Reading and checking what XLA hands over.

#ifndef JAXPAGED_NATIVE_ARGUMENTS_H_
#define JAXPAGED_NATIVE_ARGUMENTS_H_

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>

#include "kernels.h"
#include "xla/ffi/api/ffi.h"

namespace jaxpaged {

namespace ffi = xla::ffi;
using Dims = std::initializer_list<int64_t>;

constexpr int64_t kAny = -1;

inline std::string words(int64_t number) { return std::to_string(number); }

template <typename Shape>
std::string shape_text(const Shape& shape) {
  std::string text = "[";
  for (const int64_t size : shape) {
    if (text.size() > 1) text += ", ";
    text += size == kAny ? "any" : words(size);
  }
  return text + "]";
}

// The arguments one after the other. The first thing wrong is kept, and what is read afterwards is
// empty.
class Arguments {
 public:
  Arguments(const char* function, ffi::RemainingArgs& args) : function_(function), args_(args) {}

  bool good() const { return problem_.empty(); }
  ffi::Error error() const { return ffi::Error::InvalidArgument(problem_); }

  void refuse(const std::string& why) {
    if (good()) problem_ = std::string(function_) + ": " + why + ".";
  }

  void require(bool condition, const std::string& why) {
    if (!condition) refuse(why);
  }

  // The next one, which must have one of `types` and the shape `dims`.
  std::optional<ffi::AnyBuffer> take(const char* name, std::initializer_list<ffi::DataType> types,
                                     Dims dims) {
    if (!good()) return std::nullopt;
    auto found = args_.get<ffi::AnyBuffer>(at_++);
    if (!found.has_value()) {
      refuse(std::string("argument ") + name + " is missing");
      return std::nullopt;
    }
    if (!check(name, *found, types, dims)) return std::nullopt;
    return *found;
  }

  void finish() {
    if (good() && at_ != args_.size()) {
      refuse("got " + words(static_cast<int64_t>(args_.size())) + " arguments, expected " +
             words(static_cast<int64_t>(at_)));
    }
  }

  bool check(const char* name, const ffi::AnyBuffer& buffer,
             std::initializer_list<ffi::DataType> types, Dims dims) {
    bool typed = false;
    for (const ffi::DataType type : types) typed |= buffer.element_type() == type;
    if (!typed) {
      std::string wanted;
      for (const ffi::DataType type : types) {
        wanted += (wanted.empty() ? "" : " or ") + type_text(type);
      }
      refuse(std::string("argument ") + name + " is of type " + type_text(buffer.element_type()) +
             ", expected " + wanted);
      return false;
    }
    const auto shape = buffer.dimensions();
    bool fits = shape.size() == dims.size();
    for (size_t axis = 0; fits && axis < dims.size(); ++axis) {
      const int64_t wanted = dims.begin()[axis];
      fits = wanted == kAny || wanted == shape[axis];
    }
    if (!fits) {
      refuse(std::string("argument ") + name + " has the shape " + shape_text(shape) +
             ", expected " + shape_text(dims));
    }
    return fits;
  }

  static std::string type_text(ffi::DataType type) {
    switch (type) {
      case ffi::F32: return "float32";
      case ffi::F16: return "float16";
      case ffi::BF16: return "bfloat16";
      case ffi::F8E4M3FN: return "float8_e4m3fn";
      case ffi::U8: return "uint8";
      case ffi::U16: return "uint16";
      case ffi::S8: return "int8";
      case ffi::S32: return "int32";
      default: return "number " + words(static_cast<int64_t>(type));
    }
  }

 private:
  const char* function_;
  ffi::RemainingArgs& args_;
  size_t at_ = 0;
  std::string problem_;
};

// ------------------------------------------------------------------ the cache of a layer

inline ElementType float_type(ffi::DataType type) {
  return type == ffi::F32 ? kFloat32 : type == ffi::BF16 ? kBFloat16 : kFloat16;
}

// Pools, as they come in and (where they are written) go out again in the same memory.
struct Cache {
  ElementType type = kFloat32;
  int64_t slots = 0, kv_heads = 0, key_dim = 0, value_dim = 0;
  void* k = nullptr;
  void* v = nullptr;  // null: values are the first value_dim elements of the keys
  float* k_scale = nullptr;
  float* v_scale = nullptr;
};

// `type` is that of queries or of new keys: an integer pool of 16 bits holds it.
inline Cache take_cache(Arguments& args, ffi::DataType type, bool has_values, bool has_scales,
                        int64_t value_dim) {
  Cache cache;
  std::optional<ffi::AnyBuffer> k, v, scale;
  const auto take_pool = [&](const char* name, Dims dims) {
    if (has_scales) return args.take(name, {ffi::S8, ffi::F8E4M3FN, ffi::U8}, dims);
    if (type == ffi::F32) return args.take(name, {ffi::F32}, dims);
    return args.take(name, {type, ffi::U16}, dims);
  };
  if (!(k = take_pool("kv.k", {kAny, kAny, kAny}))) return cache;
  cache.slots = k->dimensions()[0];
  cache.kv_heads = k->dimensions()[1];
  cache.key_dim = k->dimensions()[2];
  cache.k = k->untyped_data();
  cache.type = !has_scales                         ? float_type(type)
               : k->element_type() == ffi::S8      ? kInt8
                                                   : kFloat8;
  cache.value_dim = value_dim;
  if (has_values) {
    if (!(v = take_pool("kv.v", {cache.slots, cache.kv_heads, kAny}))) return cache;
    args.require(v->element_type() == k->element_type(), "kv.k and kv.v are of different types");
    cache.v = v->untyped_data();
    cache.value_dim = v->dimensions()[2];
  }
  args.require(cache.key_dim > 0 && cache.kv_heads > 0,
               "argument kv.k has the shape " + shape_text(k->dimensions()) + ", without elements");
  args.require(cache.value_dim > 0,
               "value_dim is " + words(cache.value_dim) + ", expected above 0");
  args.require(has_values || cache.value_dim <= cache.key_dim,
               "value_dim is " + words(cache.value_dim) + ", and keys have only " +
                   words(cache.key_dim) + " elements");
  if (has_scales) {
    scale = args.take("kv.k_scale", {ffi::F32}, {cache.slots, cache.kv_heads});
    if (scale) cache.k_scale = static_cast<float*>(scale->untyped_data());
    if (has_values) {
      scale = args.take("kv.v_scale", {ffi::F32}, {cache.slots, cache.kv_heads});
      if (scale) cache.v_scale = static_cast<float*>(scale->untyped_data());
    }
  }
  return cache;
}

}  // namespace jaxpaged

#endif  // JAXPAGED_NATIVE_ARGUMENTS_H_
