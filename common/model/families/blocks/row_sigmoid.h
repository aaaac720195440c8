// The sigmoid with bits that do not depend on an entry's place.
#ifndef TANDEM_COMMON_MODEL_FAMILIES_BLOCKS_ROW_SIGMOID_H_
#define TANDEM_COMMON_MODEL_FAMILIES_BLOCKS_ROW_SIGMOID_H_

#include <ATen/ATen.h>

namespace tandem {

// Returns sigmoid(x), in the shape of x, as the softmax of x and 0. at::sigmoid has another
// exponential for the entries that do not fill a vector, so that its bits depend on the batch; a
// row of a softmax is computed alone.
inline at::Tensor RowSigmoid(const at::Tensor& x) {
  return at::softmax(at::stack({x, at::zeros_like(x)}, -1), -1).select(-1, 0);
}

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_FAMILIES_BLOCKS_ROW_SIGMOID_H_
