// For tests: the digest of the byte stream of an update.
#ifndef TANDEM_COMMON_WEIGHTS_TESTING_STREAM_DIGEST_H_
#define TANDEM_COMMON_WEIGHTS_TESTING_STREAM_DIGEST_H_

#include <cstddef>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "common/tensor/weight_spec.h"
#include "common/weights/word_sums.h"

namespace tandem {

// Returns the digest of `tensors`, whose bytes `stream` begins with, one after the other.
inline std::string StreamDigest(const std::vector<WeightSpec>& tensors,
                                absl::Span<const std::byte> stream) {
  TensorSums sums;
  for (const WeightSpec& tensor : tensors) {
    sums.AddTensor(tensor.name, stream.data(), tensor.bytes());
    stream.remove_prefix(static_cast<size_t>(tensor.bytes()));
  }
  return sums.Digest();
}

}  // namespace tandem

#endif  // TANDEM_COMMON_WEIGHTS_TESTING_STREAM_DIGEST_H_
