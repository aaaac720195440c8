// For tests: the options of an engine of two tiny models.
#ifndef TANDEM_SERVICES_ROLLOUT_ENGINE_TESTING_TINY_OPTIONS_H_
#define TANDEM_SERVICES_ROLLOUT_ENGINE_TESTING_TINY_OPTIONS_H_

#include <string>

#include "absl/time/time.h"
#include "services/rollout/engine/types.h"

namespace tandem::rollout {

inline constexpr ranks::RankTimeouts kTestTimeouts = {.collective = absl::Minutes(1),
                                                      .silence = absl::Seconds(5)};

// Returns the options for the models `folder`/senior and `folder`/junior.
inline EngineOptions TinyOptions(const std::string& folder) {
  const LaneOptions lane = {.model = "",
                            .dtype = DType::kFloat32,
                            .quantization = Quantization::kNone,
                            .max_model_len = 128};
  EngineOptions options = {.senior = lane,
                           .junior = lane,
                           .tandem = {},
                           .max_num_seqs = 16,
                           .max_batched_tokens = 64,
                           .max_queue = 256,
                           .on_weight_update = OnWeightUpdate::kRecompute,
                           .compute = {.device = "cpu",
                                       .dtype = "float32",
                                       .kernels = "auto",
                                       .weight_dtype = "",
                                       .activation_dtype = "",
                                       .num_threads = 1},
                           .rank_timeouts = kTestTimeouts};
  options.senior.model = folder + "/senior";
  options.junior.model = folder + "/junior";
  return options;
}

}  // namespace tandem::rollout

#endif  // TANDEM_SERVICES_ROLLOUT_ENGINE_TESTING_TINY_OPTIONS_H_
