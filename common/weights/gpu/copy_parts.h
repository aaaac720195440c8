// The parts of a copy of weights that is spread over the GPUs of several ranks. No torch.
#ifndef TANDEM_COMMON_WEIGHTS_GPU_COPY_PARTS_H_
#define TANDEM_COMMON_WEIGHTS_GPU_COPY_PARTS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/tensor/weight_spec.h"

namespace tandem {

// Returns the part of each tensor, ascending: consecutive tensors, of bytes as even as whole
// tensors allow (a part is at most the largest tensor above the mean). A tensor in several types,
// one behind the other, is in one part. A part may have no tensor.
inline std::vector<int> CutIntoParts(const std::vector<WeightSpec>& tensors, int parts) {
  int64_t total = 0, begin = 0;
  for (const WeightSpec& tensor : tensors) total += tensor.bytes();
  std::vector<int> part_of;
  for (size_t first = 0; first < tensors.size();) {
    int64_t end = begin;
    size_t last = first;
    for (; last < tensors.size() && tensors[last].name == tensors[first].name; ++last) {
      end += tensors[last].bytes();
    }
    // The part in which the tensor's middle is.
    const int64_t part = total > 0 ? (begin + end) * parts / (2 * total) : 0;
    part_of.resize(last, static_cast<int>(std::min<int64_t>(part, parts - 1)));
    begin = end;
    first = last;
  }
  return part_of;
}

// Returns the bytes of the largest of the parts.
inline int64_t LargestPartBytes(const std::vector<WeightSpec>& tensors, int parts) {
  const std::vector<int> part_of = CutIntoParts(tensors, parts);
  std::vector<int64_t> bytes(static_cast<size_t>(parts));
  for (size_t i = 0; i < tensors.size(); ++i) {
    bytes[static_cast<size_t>(part_of[i])] += tensors[i].bytes();
  }
  return *std::ranges::max_element(bytes);
}

}  // namespace tandem

#endif  // TANDEM_COMMON_WEIGHTS_GPU_COPY_PARTS_H_
