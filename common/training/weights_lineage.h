// Which weights each number of a version stands for.
#ifndef TANDEM_COMMON_TRAINING_WEIGHTS_LINEAGE_H_
#define TANDEM_COMMON_TRAINING_WEIGHTS_LINEAGE_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "absl/status/status.h"
#include "common/base/weights_version.h"

namespace tandem::training {

// The digests of a model's last versions. A run that goes back to a checkpoint takes that
// checkpoint's lineage and counts the same numbers again, with other digests.
class WeightsLineage {
 public:
  explicit WeightsLineage(size_t capacity = 1024) : capacity_(capacity) {}

  void Record(const WeightsVersion& weights);
  // Empty when the version is not known, or no longer.
  std::string DigestOf(int64_t version) const;

  // An array of [version, digest], oldest first, and back: DATA_LOSS, and nothing changed, for
  // anything else.
  nlohmann::json ToJson() const;
  absl::Status FromJson(const nlohmann::json& list);

 private:
  size_t capacity_;
  std::map<int64_t, std::string> digests_;
};

}  // namespace tandem::training

#endif  // TANDEM_COMMON_TRAINING_WEIGHTS_LINEAGE_H_
