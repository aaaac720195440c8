// The values that a critic gave for its last train steps, kept for repeats of those steps.
#ifndef TANDEM_COMMON_STEPS_KEPT_VALUES_H_
#define TANDEM_COMMON_STEPS_KEPT_VALUES_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "common/tensor/vision_reference.h"
#include "common/weights/weights_version.h"

namespace tandem::training {

struct SequenceValues {
  std::vector<float> values;  // [L]
  float final_value = 0;

  bool operator==(const SequenceValues&) const = default;
};

// Values by step and tokens. A PPO step asks the critic for values and then trains it. If the
// trainer fails after that, the repeated step must get the same values, or it trains on other
// advantages.
class KeptValues {
 public:
  explicit KeptValues(size_t max_steps = 4) : max_steps_(max_steps) {}

  // The values of one step.
  struct Step {
    std::string run_id, request_id;
    // The critic's, when it computed them. All are of the lineage that the critic goes on with, in
    // which the number tells them apart; the digest may not be known.
    WeightsVersion weights;
    std::map<std::string, SequenceValues> by_sequence;  // by SequenceDigest
  };

  // Returns null for a step without kept values.
  const Step* Find(const std::string& run_id, const std::string& request_id) const;
  // Returns the step's entry for values of `weights`; a new entry may drop the oldest step's.
  // Values of the step under other weights are dropped: all values of a step are of one version.
  Step& Open(const std::string& run_id, const std::string& request_id,
             const WeightsVersion& weights);

  // Returns the XXH3-128 of prompt, response and the prompt's images.
  static std::string SequenceDigest(absl::Span<const int32_t> prompt,
                                    absl::Span<const int32_t> response,
                                    absl::Span<const VisionReference> images = {});

  // Returns the steps and, by sequence, the number of values.
  nlohmann::json ToJson() const;
  // Returns the values, in the order of ToJson, a sequence's final value behind its others:
  // float32, little endian.
  std::string Bytes() const;
  // Replaces everything. DATA_LOSS, with nothing changed, for a document and bytes that ToJson and
  // Bytes did not make. A document of an earlier release has the values in it, and no bytes.
  absl::Status FromJson(const nlohmann::json& list, absl::string_view bytes);

 private:
  size_t max_steps_;
  std::deque<Step> steps_;  // oldest first
};

}  // namespace tandem::training

#endif  // TANDEM_COMMON_STEPS_KEPT_VALUES_H_
