// The slice of a parameter that a rank holds. No torch.
#ifndef TANDEM_COMMON_MODEL_PARAMETERS_SHARD_H_
#define TANDEM_COMMON_MODEL_PARAMETERS_SHARD_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace tandem {

// Slice `index` of the `count` slices of a tensor along `axis`. All slices have the same size where
// `count` divides the axis, as it does for heads. Otherwise (a vocabulary) the size is rounded up,
// and the last slices hold fewer entries.
struct Shard {
  int64_t axis = 0;
  int64_t index = 0;
  int64_t count = 1;

  // These three return, for an axis of `extent` entries, the first entry of this slice, its number
  // of entries, and the number of entries of slice 0, which no other slice exceeds.
  int64_t Begin(int64_t extent) const { return std::min(extent, index * LargestSize(extent)); }
  int64_t Size(int64_t extent) const {
    return std::min(LargestSize(extent), extent - Begin(extent));
  }
  int64_t LargestSize(int64_t extent) const { return (extent + count - 1) / count; }

  // Returns the shape of this slice of a tensor of shape `shape`.
  std::vector<int64_t> ShapeOf(std::vector<int64_t> shape) const {
    if (count > 1) {
      int64_t& extent = shape[static_cast<size_t>(axis)];
      extent = Size(extent);
    }
    return shape;
  }

  // Returns a view of this slice of a whole tensor. A template, so that the header needs no torch.
  template <typename Tensor>
  Tensor Of(const Tensor& whole) const {
    if (count == 1) return whole;
    return whole.narrow(axis, Begin(whole.size(axis)), Size(whole.size(axis)));
  }
};

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_PARAMETERS_SHARD_H_
