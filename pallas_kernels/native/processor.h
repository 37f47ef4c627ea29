// Which kernels this processor can run.

#ifndef JAXPAGED_NATIVE_PROCESSOR_H_
#define JAXPAGED_NATIVE_PROCESSOR_H_

#include <cstdlib>
#include <cstring>

#include "kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace jaxpaged {

#define JAXPAGED_DECLARE(isa) \
  namespace isa {             \
  extern const Kernels kernels; \
  }
#ifdef JAXPAGED_HAVE_BASELINE
JAXPAGED_DECLARE(baseline)
#endif
#ifdef JAXPAGED_HAVE_V2
JAXPAGED_DECLARE(v2)
#endif
#ifdef JAXPAGED_HAVE_V3
JAXPAGED_DECLARE(v3)
#endif
#ifdef JAXPAGED_HAVE_V4
JAXPAGED_DECLARE(v4)
#endif
#ifdef JAXPAGED_HAVE_V4_BF16
JAXPAGED_DECLARE(v4_bf16)
#endif
#undef JAXPAGED_DECLARE

#if defined(__x86_64__)

// Asked of the processor itself where compilers have not always known the feature's name.
inline bool has_bit(unsigned leaf, unsigned subleaf, int reg, int bit) {
  unsigned out[4] = {};
  if (!__get_cpuid_count(leaf, subleaf, &out[0], &out[1], &out[2], &out[3])) return false;
  return out[reg] >> bit & 1;
}

constexpr int kEax = 0, kEcx = 2, kEdx = 3;

inline bool has_v2() {
  return __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("popcnt");
}

// The compiler's functions also tell whether the system saves the wider registers.
inline bool has_v3() {
  return has_v2() && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
         has_bit(1, 0, kEcx, 29) &&            // F16C
         has_bit(1, 0, kEcx, 22) &&            // MOVBE
         has_bit(0x80000001u, 0, kEcx, 5);     // LZCNT
}

inline bool has_v4() {
  return has_v3() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl");
}

inline bool has_v4_bf16() { return has_v4() && has_bit(7, 1, kEax, 5); }

// Tiles of bfloat16 (AMX), which XLA multiplies with twice as fast as AVX-512 does.
inline bool has_bf16_tiles() { return has_bit(7, 0, kEdx, 22); }

#else

inline bool has_bf16_tiles() { return false; }

#endif

struct Level {
  const Kernels* kernels;
  bool supported;
};

// The best kernels that the processor can run, but not better ones than those that the environment
// variable JAXPAGED_NATIVE_ISA names (v2, v3, v4, v4_bf16). Null if it can run none.
inline const Kernels* choose_kernels() {
#if defined(__x86_64__)
  __builtin_cpu_init();
#endif
  const Level levels[] = {  // the best one first
#ifdef JAXPAGED_HAVE_V4_BF16
      {&v4_bf16::kernels, has_v4_bf16()},
#endif
#ifdef JAXPAGED_HAVE_V4
      {&v4::kernels, has_v4()},
#endif
#ifdef JAXPAGED_HAVE_V3
      {&v3::kernels, has_v3()},
#endif
#ifdef JAXPAGED_HAVE_V2
      {&v2::kernels, has_v2()},
#endif
#ifdef JAXPAGED_HAVE_BASELINE
      {&baseline::kernels, true},
#endif
  };
  const char* most = std::getenv("JAXPAGED_NATIVE_ISA");
  bool known = false;
  for (const Level& level : levels) known |= most && !std::strcmp(most, level.kernels->name);
  bool reached = !known;
  for (const Level& level : levels) {
    reached |= known && !std::strcmp(most, level.kernels->name);
    if (reached && level.supported) return level.kernels;
  }
  return nullptr;
}

inline const Kernels* kernels() {
  static const Kernels* const chosen = choose_kernels();
  return chosen;
}

}  // namespace jaxpaged

#endif  // JAXPAGED_NATIVE_PROCESSOR_H_
