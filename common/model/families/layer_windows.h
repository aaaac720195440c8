// The windows that the layers of a dense decoder attend to, by the keys of config.json. No torch.
#ifndef TANDEM_COMMON_MODEL_FAMILIES_LAYER_WINDOWS_H_
#define TANDEM_COMMON_MODEL_FAMILIES_LAYER_WINDOWS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/model/config/config_fields.h"
#include "common/model/config/model_config.h"

namespace tandem {

// These read fields that ObeyedKeys returned. INVALID_ARGUMENT with the field's path for layer
// types that do not fit the model, and for windows that no key gives a size; UNIMPLEMENTED for
// other types of layers than "full_attention" and "sliding_attention".

// Mistral: `sliding_window` in all layers, or in those that `layer_types` calls sliding; none if it
// is null.
absl::StatusOr<LayerWindows> MistralWindows(const ConfigFields& fields, int64_t num_layers);

// Qwen2 and Qwen3: with `use_sliding_window` the layers from `max_window_layers` on have
// `sliding_window`, or those that `layer_types` calls sliding.
absl::StatusOr<LayerWindows> QwenWindows(const ConfigFields& fields, int64_t num_layers);

// Gemma 2: `layer_types`, or every other layer from the first on, have `sliding_window`.
absl::StatusOr<LayerWindows> Gemma2Windows(const ConfigFields& fields, int64_t num_layers);

// Gemma 3: `layer_types`, or all layers but every `sliding_window_pattern`-th, have
// `sliding_window`.
absl::StatusOr<LayerWindows> Gemma3Windows(const ConfigFields& fields, int64_t num_layers);

// Qwen2-MoE: like Qwen2, but without `layer_types` every other layer before `max_window_layers` has
// the window, from the first on.
absl::StatusOr<LayerWindows> Qwen2MoeWindows(const ConfigFields& fields, int64_t num_layers);

// The families below do not read `layer_types`: UNIMPLEMENTED where the key says otherwise.

// Mixtral and Phi-3: `sliding_window` in all layers, none if it is null.
absl::StatusOr<LayerWindows> MixtralWindows(const ConfigFields& fields, int64_t num_layers);

// Qwen3-MoE: `sliding_window` in all layers with `use_sliding_window`.
absl::StatusOr<LayerWindows> Qwen3MoeWindows(const ConfigFields& fields, int64_t num_layers);

// Families without windows.
absl::StatusOr<LayerWindows> NoWindows(const ConfigFields& fields, int64_t num_layers);

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_FAMILIES_LAYER_WINDOWS_H_
