// The windows that the layers of a dense decoder attend to, by the keys of config.json. No torch.
#ifndef TANDEM_COMMON_MODEL_FAMILIES_LAYER_WINDOWS_H_
#define TANDEM_COMMON_MODEL_FAMILIES_LAYER_WINDOWS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/model/config_fields.h"
#include "common/model/model_config.h"

namespace tandem {

// Keys and defaults are those of `transformers`.

// Mistral: `sliding_window` in all layers, 4096 if the key is missing, none if it is null.
absl::StatusOr<LayerWindows> MistralWindows(const ConfigFields& fields);

// Qwen2 and Qwen3: with `use_sliding_window` the layers from `max_window_layers` on have
// `sliding_window`, or those that `layer_types` calls "sliding_attention". INVALID_ARGUMENT with
// the field's path for layer types that do not fit, UNIMPLEMENTED for others than these two.
absl::StatusOr<LayerWindows> QwenWindows(const ConfigFields& fields, int64_t num_layers);

// Gemma 2: `layer_types`, or every other layer from the first on, have `sliding_window`, 4096 if
// the key is missing. Errors as those of QwenWindows.
absl::StatusOr<LayerWindows> Gemma2Windows(const ConfigFields& fields, int64_t num_layers);

// Gemma 3: `layer_types`, or all layers but every `sliding_window_pattern`-th, 6 if the key is
// missing, have `sliding_window`, 4096 if the key is missing. Errors as those of QwenWindows.
absl::StatusOr<LayerWindows> Gemma3Windows(const ConfigFields& fields, int64_t num_layers);

// Mixtral and Phi-3: `sliding_window` in all layers, none if the key is missing or null.
absl::StatusOr<LayerWindows> MixtralWindows(const ConfigFields& fields);

// Qwen2-MoE: like Qwen2, with `layer_types`; UNIMPLEMENTED for `use_sliding_window` without them.
absl::StatusOr<LayerWindows> Qwen2MoeWindows(const ConfigFields& fields, int64_t num_layers);

// Qwen3-MoE: `sliding_window` in all layers with `use_sliding_window`.
absl::StatusOr<LayerWindows> Qwen3MoeWindows(const ConfigFields& fields);

// Families without windows: UNIMPLEMENTED where config.json asks for them.
absl::Status RefuseWindows(const ConfigFields& fields);

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_FAMILIES_LAYER_WINDOWS_H_
