// Low-rank adapters of a model's linear maps (LoRA, https://arxiv.org/abs/2106.09685): their
// options and their parameters. No torch.
//
// The adapter of a map "<map>.weight" W [out, in] are two parameters of the model,
// "<map>.lora_A.weight" A [rank, in] and "<map>.lora_B.weight" B [out, rank], with which the map is
// y = W x + (alpha / rank) B A x.
#ifndef TANDEM_COMMON_MODEL_CONFIG_LORA_H_
#define TANDEM_COMMON_MODEL_CONFIG_LORA_H_

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/model/config/parameter_spec.h"
#include "common/weights/word_sums.h"

namespace tandem {

// Stands for every map that can have an adapter.
inline constexpr char kAllLinear[] = "all-linear";

struct LoraOptions {
  int64_t rank = 0;  // 0: no adapters
  double alpha = 0;
  // The last parts of the names of maps ("q_proj"), or kAllLinear.
  std::vector<std::string> target_modules = {};
  // Seed of the first values of A; B is 0 at first.
  uint64_t seed = 0;
  // A directory with an adapter in PEFT's format, whose values the parameters have at first; empty:
  // they are drawn.
  std::string path = {};

  bool enabled() const { return rank > 0; }
  double scale() const { return alpha / static_cast<double>(rank); }
  // Returns what must be equal wherever the parameters are used, "rank 16, alpha 32"; empty without
  // adapters.
  std::string Text() const;

  // Makes the settings a part of a digest of weights: the same matrices with another scale are
  // another model. Adds nothing without adapters.
  void AddTo(TensorSums& sums) const {
    if (enabled()) sums.Add(Text(), {});
  }

  static constexpr auto kOwnFields =
      std::tuple(&LoraOptions::rank, &LoraOptions::alpha, &LoraOptions::target_modules,
                 &LoraOptions::seed, &LoraOptions::path);
  bool operator==(const LoraOptions&) const = default;
};

// Adds the adapters' parameters to those of a model, each pair before the map that it adapts.
// INVALID_ARGUMENT for "lora.rank", "lora.alpha" or "lora.target_modules[i]", which no map has;
// UNIMPLEMENTED for a map that cannot have an adapter.
absl::StatusOr<std::vector<ParameterSpec>> WithAdapters(std::vector<ParameterSpec> specs,
                                                        const LoraOptions& options);

// The same of a model, whose parameters have adapters if the options are enabled(). Errors of the
// other ModelParameters, too.
absl::StatusOr<std::vector<ParameterSpec>> ModelParameters(const ModelConfig& config,
                                                           const HeadOptions& head,
                                                           const LoraOptions& options);

// Returns "<map>.lora_A.weight" or "<map>.lora_B.weight" without its ending; empty for another
// name.
absl::string_view AdaptedMap(absl::string_view parameter);

// Returns one entry per parameter: whether it trains. Of a model with adapters these do, and a
// value head, which the base model does not have; INVALID_ARGUMENT for a "freeze" beside them.
// Without adapters as in freeze.h.
absl::StatusOr<std::vector<bool>> TrainableParameters(const std::vector<ParameterSpec>& specs,
                                                      const std::vector<std::string>& freeze,
                                                      const LoraOptions& options);

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_CONFIG_LORA_H_
