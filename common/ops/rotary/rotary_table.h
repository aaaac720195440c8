// Cosines and sines of rotary position embeddings, by position.
#ifndef TANDEM_COMMON_OPS_ROTARY_ROTARY_TABLE_H_
#define TANDEM_COMMON_OPS_ROTARY_ROTARY_TABLE_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

namespace tandem::ops {

// Table of cosines and sines, which grows to the positions that are asked for. Angles are fp32
// products position * frequency, as Hugging Face computes them. Thread-safe.
class RotaryTable {
 public:
  // One frequency per pair of dimensions; cosines and sines are multiplied by `scaling`.
  // `longest_sequence` bounds the memory that is taken ahead (rotary_growth.h), not the positions.
  RotaryTable(std::vector<float> inverse_frequencies, double scaling, int64_t longest_sequence,
              at::Device device)
      : inverse_frequencies_(std::move(inverse_frequencies)),
        scaling_(scaling),
        longest_sequence_(longest_sequence),
        device_(device) {}

  // Returns {cos, sin}, each [T, D/2] fp32, for positions [T] int64 in [0, end), on the table's
  // device.
  std::pair<at::Tensor, at::Tensor> Rows(const at::Tensor& positions, int64_t end);

  // Grows the table to the positions below `end`, so that Rows finds it where it is.
  void Reserve(int64_t end);

 private:
  // Returns {cos_, sin_} with the positions below `end`.
  std::pair<at::Tensor, at::Tensor> Tables(int64_t end);
  void Grow(int64_t length);

  const std::vector<float> inverse_frequencies_;
  const double scaling_;
  const int64_t longest_sequence_;
  const at::Device device_;
  std::mutex mutex_;
  at::Tensor cos_, sin_;  // [length, D/2]
};

}  // namespace tandem::ops

#endif  // TANDEM_COMMON_OPS_ROTARY_ROTARY_TABLE_H_
