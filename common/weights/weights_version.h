// The identity of the weights that a model holds.
#ifndef TANDEM_COMMON_WEIGHTS_WEIGHTS_VERSION_H_
#define TANDEM_COMMON_WEIGHTS_WEIGHTS_VERSION_H_

#include <cstdint>
#include <string>

namespace tandem {

// The number alone does not identify the weights: a run that goes back to a checkpoint counts the
// same numbers again. Mirrors tandem.types.v1.WeightsVersion.
struct WeightsVersion {
  int64_t version = 0;  // optimizer updates since the base model
  std::string digest;   // XXH3-128 of the weights, 32 hexadecimal digits

  bool operator==(const WeightsVersion&) const = default;
};

}  // namespace tandem

#endif  // TANDEM_COMMON_WEIGHTS_WEIGHTS_VERSION_H_
