#include "common/model/families/layer_windows.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/errors/error.h"
#include "common/base/errors/status_macros.h"
#include "common/kernels/attention_window.h"

namespace tandem {
namespace {

using nlohmann::json;

constexpr const char* kFullAttention = "full_attention";
constexpr const char* kSlidingAttention = "sliding_attention";

// Returns which layers `layer_types` calls sliding; nullopt without the key.
absl::StatusOr<std::optional<std::vector<bool>>> SlidingLayers(const ConfigFields& fields) {
  const json* types = fields.Find("layer_types");
  if (types == nullptr) return std::optional<std::vector<bool>>();
  if (!types->is_array()) return InvalidField(fields.Path("layer_types"), "must be a list");
  std::vector<bool> sliding;
  for (const json& type : *types) {
    const std::string name = type.is_string() ? type.get<std::string>() : type.dump();
    if (name != kFullAttention && name != kSlidingAttention) {
      return fields.NotSupported("layer_types", absl::StrCat("layer type '", name, "'"));
    }
    sliding.push_back(name == kSlidingAttention);
  }
  return std::optional<std::vector<bool>>(sliding);
}

// Returns `sliding_window` for all layers, none for null.
absl::StatusOr<LayerWindows> OneWindow(const ConfigFields& fields) {
  TANDEM_ASSIGN_OR_RETURN(const auto window, fields.MaybeSize("sliding_window"));
  return LayerWindows{.window = window.value_or(kNoWindow)};
}

absl::Status CheckNumLayers(const ConfigFields& fields, const std::vector<bool>& sliding,
                            int64_t num_layers) {
  if (static_cast<int64_t>(sliding.size()) == num_layers) return absl::OkStatus();
  return InvalidField(fields.Path("layer_types"),
                      absl::StrCat("has ", sliding.size(), " entries, and the model ", num_layers,
                                   " layers (num_hidden_layers)"));
}

// Returns the windows of `layer_types`, or of all layers but every `pattern`-th.
absl::StatusOr<LayerWindows> GemmaWindows(const ConfigFields& fields, int64_t num_layers,
                                          int64_t pattern) {
  TANDEM_ASSIGN_OR_RETURN(const int64_t window, fields.Size("sliding_window"));
  TANDEM_ASSIGN_OR_RETURN(const std::optional<std::vector<bool>> sliding, SlidingLayers(fields));
  LayerWindows windows = {.window = window};
  if (sliding.has_value()) {
    TANDEM_RETURN_IF_ERROR(CheckNumLayers(fields, *sliding, num_layers));
    windows.layers = *sliding;
  } else {
    for (int64_t i = 0; i < num_layers; ++i) windows.layers.push_back((i + 1) % pattern != 0);
  }
  return windows;
}

// Gives the layers that `layer_types` calls sliding the window, if the key is there.
absl::Status TakeLayerTypes(const ConfigFields& fields, int64_t num_layers, const char* no_window,
                            LayerWindows& windows) {
  TANDEM_ASSIGN_OR_RETURN(const std::optional<std::vector<bool>> sliding, SlidingLayers(fields));
  if (!sliding.has_value()) return absl::OkStatus();
  TANDEM_RETURN_IF_ERROR(CheckNumLayers(fields, *sliding, num_layers));
  if (windows.window == kNoWindow && std::ranges::find(*sliding, true) != sliding->end()) {
    return InvalidField(fields.Path("layer_types"),
                        absl::StrCat("has ", kSlidingAttention, ", but ", no_window));
  }
  windows.layers = *sliding;
  return absl::OkStatus();
}

// Returns `windows`, unless `layer_types` says otherwise: the class does not read that key.
absl::StatusOr<LayerWindows> UnlessLayerTypesDiffer(const ConfigFields& fields, int64_t num_layers,
                                                    LayerWindows windows) {
  TANDEM_ASSIGN_OR_RETURN(const std::optional<std::vector<bool>> sliding, SlidingLayers(fields));
  if (!sliding.has_value()) return windows;
  TANDEM_RETURN_IF_ERROR(CheckNumLayers(fields, *sliding, num_layers));
  for (int64_t i = 0; i < num_layers; ++i) {
    if ((*sliding)[static_cast<size_t>(i)] == (windows.OfLayer(i) != kNoWindow)) continue;
    return fields.NotSupported("layer_types", "a window in only some of the layers");
  }
  return windows;
}

}  // namespace

absl::StatusOr<LayerWindows> MistralWindows(const ConfigFields& fields, int64_t num_layers) {
  TANDEM_ASSIGN_OR_RETURN(LayerWindows windows, OneWindow(fields));
  TANDEM_RETURN_IF_ERROR(TakeLayerTypes(fields, num_layers, "sliding_window is null", windows));
  return windows;
}

absl::StatusOr<LayerWindows> QwenWindows(const ConfigFields& fields, int64_t num_layers) {
  TANDEM_ASSIGN_OR_RETURN(const bool used, fields.Bool("use_sliding_window"));
  LayerWindows windows;
  if (used) {
    TANDEM_ASSIGN_OR_RETURN(windows, OneWindow(fields));
  }
  TANDEM_ASSIGN_OR_RETURN(windows.first_layer, fields.Count("max_window_layers"));
  TANDEM_RETURN_IF_ERROR(
      TakeLayerTypes(fields, num_layers,
                     used ? "sliding_window is null" : "use_sliding_window is false", windows));
  return windows;
}

absl::StatusOr<LayerWindows> Gemma2Windows(const ConfigFields& fields, int64_t num_layers) {
  return GemmaWindows(fields, num_layers, /*pattern=*/2);
}

absl::StatusOr<LayerWindows> Gemma3Windows(const ConfigFields& fields, int64_t num_layers) {
  TANDEM_ASSIGN_OR_RETURN(const int64_t pattern, fields.Size("sliding_window_pattern"));
  return GemmaWindows(fields, num_layers, pattern);
}

absl::StatusOr<LayerWindows> MixtralWindows(const ConfigFields& fields, int64_t num_layers) {
  TANDEM_ASSIGN_OR_RETURN(const LayerWindows windows, OneWindow(fields));
  return UnlessLayerTypesDiffer(fields, num_layers, windows);
}

absl::StatusOr<LayerWindows> Qwen2MoeWindows(const ConfigFields& fields, int64_t num_layers) {
  TANDEM_ASSIGN_OR_RETURN(LayerWindows windows, QwenWindows(fields, num_layers));
  if (windows.window == kNoWindow || !windows.layers.empty()) return windows;
  for (int64_t i = 0; i < num_layers; ++i) {
    windows.layers.push_back(i % 2 == 0 && i < windows.first_layer);
  }
  return windows;
}

absl::StatusOr<LayerWindows> Qwen3MoeWindows(const ConfigFields& fields, int64_t num_layers) {
  TANDEM_ASSIGN_OR_RETURN(const bool used, fields.Bool("use_sliding_window"));
  LayerWindows windows;
  if (used) {
    TANDEM_ASSIGN_OR_RETURN(windows, OneWindow(fields));
  }
  return UnlessLayerTypesDiffer(fields, num_layers, windows);
}

absl::StatusOr<LayerWindows> NoWindows(const ConfigFields& fields, int64_t num_layers) {
  return UnlessLayerTypesDiffer(fields, num_layers, LayerWindows());
}

}  // namespace tandem
