// The weights that each version number stands for.
#ifndef TANDEM_COMMON_STEPS_WEIGHTS_LINEAGE_H_
#define TANDEM_COMMON_STEPS_WEIGHTS_LINEAGE_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "absl/status/status.h"
#include "common/weights/weights_version.h"

namespace tandem::training {

// The digests of a model's last versions. A run that returns to a checkpoint takes over the
// checkpoint's lineage, and gives the same numbers to other digests from there on.
class WeightsLineage {
 public:
  explicit WeightsLineage(size_t capacity = 1024) : capacity_(capacity) {}

  void Record(const WeightsVersion& weights);
  // Returns an empty string for a version that is unknown or too old.
  std::string DigestOf(int64_t version) const;

  // An array of [version, digest], oldest first. FromJson replaces everything: DATA_LOSS, with
  // nothing changed, for any other document.
  nlohmann::json ToJson() const;
  absl::Status FromJson(const nlohmann::json& list);

 private:
  size_t capacity_;
  std::map<int64_t, std::string> digests_;
};

}  // namespace tandem::training

#endif  // TANDEM_COMMON_STEPS_WEIGHTS_LINEAGE_H_
