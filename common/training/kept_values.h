// The values that a critic gave for its last train steps.
#ifndef TANDEM_COMMON_TRAINING_KEPT_VALUES_H_
#define TANDEM_COMMON_TRAINING_KEPT_VALUES_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "common/base/weights_version.h"

namespace tandem::training {

struct SequenceValues {
  std::vector<float> values;  // [L]
  float final_value = 0;

  bool operator==(const SequenceValues&) const = default;
};

// A PPO step asks the critic for values and then trains it. When the trainer fails after that, the
// repeated step must see the values of before, or it trains on other advantages: they are kept by
// step and tokens.
class KeptValues {
 public:
  explicit KeptValues(size_t max_steps = 4) : max_steps_(max_steps) {}

  // What one step was given.
  struct Step {
    std::string run_id, request_id;
    WeightsVersion weights;                             // that computed them
    std::map<std::string, SequenceValues> by_sequence;  // by SequenceDigest
  };

  // Null when nothing is kept for it.
  const Step* Find(const std::string& run_id, const std::string& request_id) const;
  // The step's entry for values of `weights`, which may drop the oldest step's. What was kept of
  // the step under other weights is forgotten: values of one step are of one version.
  Step& Open(const std::string& run_id, const std::string& request_id,
             const WeightsVersion& weights);

  // XXH3-128 of prompt and response.
  static std::string SequenceDigest(absl::Span<const int32_t> prompt,
                                    absl::Span<const int32_t> response);

  nlohmann::json ToJson() const;
  // DATA_LOSS, and nothing changed, for what ToJson did not make.
  absl::Status FromJson(const nlohmann::json& list);

 private:
  size_t max_steps_;
  std::deque<Step> steps_;  // oldest first
};

}  // namespace tandem::training

#endif  // TANDEM_COMMON_TRAINING_KEPT_VALUES_H_
