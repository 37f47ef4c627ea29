// The kernels for one instruction set, JAXPAGED_ISA, which the compiler's flags are for.

#include "kernels.h"

#include "attend.h"
#include "matrix.h"
#include "norm.h"
#include "rotate.h"
#include "write.h"

namespace jaxpaged {
namespace JAXPAGED_ISA {

#define JAXPAGED_TEXT_OF(name) #name
#define JAXPAGED_TEXT(name) JAXPAGED_TEXT_OF(name)

extern const Kernels kernels;
const Kernels kernels = {JAXPAGED_TEXT(JAXPAGED_ISA), scratch_bytes, part_floats, attend, combine,
                         write, JAXPAGED_MULTIPLY, JAXPAGED_MULTIPLY_BYTES, round_all, normalize,
                         rotate};

}  // namespace JAXPAGED_ISA
}  // namespace jaxpaged
