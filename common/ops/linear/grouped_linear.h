// Linear maps of which each has rows of its own, as the experts of a layer.
#ifndef TANDEM_COMMON_OPS_LINEAR_GROUPED_LINEAR_H_
#define TANDEM_COMMON_OPS_LINEAR_GROUPED_LINEAR_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "common/ops/linear/linear_weight.h"

namespace tandem::ops {

// Returns, for the rows x [N, in] of map e from offsets[e] on to offsets[e + 1], their products
// with that map: [N, out]. The maps have one shape and no bias. The weights of a map without rows
// are not read, and its masters get no gradient. A row has the bits of LinearWeight::Forward; the
// threads divide all products together.
at::Tensor GroupedLinear(const at::Tensor& x, const std::vector<int64_t>& offsets,
                         const std::vector<const LinearWeight*>& maps);

// Whether the products of rows like x [N, in] can be grouped by offsets that the host does not
// read: there are kernels for their device.
bool CanGroupOnDevice(const at::Tensor& x);

// Returns the same for maps for which AreStacked holds, with `offsets` [number of maps + 1] int32
// on the device of x, for which CanGroupOnDevice holds: the host does not wait, nor does it in the
// backward pass. A row's bits depend only on itself and its map, and are those without autograd.
// Rows behind the last offset are not written, and have no gradient; with autograd there must be
// none. Every master gets a gradient, one without rows 0.
at::Tensor GroupedLinear(const at::Tensor& x, const at::Tensor& offsets,
                         const std::vector<const LinearWeight*>& maps);

}  // namespace tandem::ops

#endif  // TANDEM_COMMON_OPS_LINEAR_GROUPED_LINEAR_H_
