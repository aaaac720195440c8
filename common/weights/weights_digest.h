// The digest by which servers recognise weights.
#ifndef TANDEM_COMMON_WEIGHTS_WEIGHTS_DIGEST_H_
#define TANDEM_COMMON_WEIGHTS_WEIGHTS_DIGEST_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/tensor/aten/named_tensors.h"
#include "common/weights/word_sums.h"

namespace tandem {

// Values of a device that are converted, checked and added up at a time: a bound of temporary
// memory. A multiple of two, so that runs of so many bfloat16 values begin with a word.
inline constexpr int64_t kDeviceValuesAtATime = int64_t{1} << 24;

// Computes the TensorSums of tensors' values as float32. The digest is that of an update whose
// manifest has the same tensors as float32, in any order.
class WeightsHasher {
 public:
  // Adds a whole tensor, of any floating type.
  void Add(absl::string_view name, const at::Tensor& tensor) {
    AddRows(name, 0, 0, tensor.reshape({1, -1}));
  }
  // Adds values [rows, width] of a tensor: value (r, i) is value begin + r stride + i of the whole
  // tensor. Values of a device stay there: it computes their sums beside the calls that follow, and
  // Sums waits for it.
  void AddRows(absl::string_view name, int64_t begin, int64_t stride, const at::Tensor& values);

  // Returns the sums of everything that was added.
  const TensorSums& Sums();
  std::string Hex() { return Sums().Digest(); }

 private:
  TensorSums sums_;
  std::vector<std::pair<std::string, at::Tensor>> pending_;  // [2] int64 each, on a device
};

// Returns SumWords, computed by as many threads as ATen computes with.
WordSums SumWordsInParallel(int64_t begin, const void* words, int64_t count);

// Returns the sums, int64 [2], of float32 values as AddRows has them, computed with operations of
// ATen on their device: SumWords for what is not on the host.
at::Tensor SumWordsOnDevice(int64_t begin, int64_t stride, const at::Tensor& values);
// The same of SumBytes: of contiguous values of any type, of which the first is word `begin` of
// its tensor. A last word that is not whole is filled with zeros.
at::Tensor SumBytesOnDevice(int64_t begin, const at::Tensor& values);

std::string WeightsDigest(const NamedTensors& tensors);
// Returns the digest of the tensors that `source` gives, or its error.
absl::StatusOr<std::string> WeightsDigest(TensorSource source);

}  // namespace tandem

#endif  // TANDEM_COMMON_WEIGHTS_WEIGHTS_DIGEST_H_
