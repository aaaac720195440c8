// Linear maps of one shape whose matrices lie in one buffer at equal distances, as a model that
// infers holds the experts of a layer: one operation finds them all.
#ifndef TANDEM_COMMON_OPS_LINEAR_LINEAR_STACK_H_
#define TANDEM_COMMON_OPS_LINEAR_LINEAR_STACK_H_

#include <ATen/core/Tensor.h>

#include <vector>

#include "common/ops/linear/linear_weight.h"

namespace tandem::ops {

// Whether the maps are dense and lie so, each aligned to 16 bytes, and the maps of their adapters,
// too. It holds as long as the maps live.
bool AreStacked(const std::vector<const LinearWeight*>& maps);

// Returns the matrices of maps for which AreStacked holds: [number of maps, out, in], a view of
// their buffer.
at::Tensor StackOf(const std::vector<const LinearWeight*>& maps);

}  // namespace tandem::ops

#endif  // TANDEM_COMMON_OPS_LINEAR_LINEAR_STACK_H_
