#include "common/model/families/layer_windows.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"
#include "common/kernels/attention_window.h"

namespace tandem {
namespace {

using nlohmann::json;

constexpr int64_t kDefaultWindow = 4096;
constexpr int64_t kDefaultMaxWindowLayers = 28;  // the layers before have no window
constexpr const char* kFullAttention = "full_attention";
constexpr const char* kSlidingAttention = "sliding_attention";

// Returns `sliding_window`, nullopt for null.
absl::StatusOr<std::optional<int64_t>> SlidingWindow(const ConfigFields& fields) {
  if (fields.IsNull("sliding_window")) return std::optional<int64_t>();
  TANDEM_ASSIGN_OR_RETURN(const int64_t window, fields.Size("sliding_window", kDefaultWindow));
  return std::optional<int64_t>(window);
}

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
  TANDEM_ASSIGN_OR_RETURN(const int64_t window, fields.Size("sliding_window", kDefaultWindow));
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

}  // namespace

absl::StatusOr<LayerWindows> MistralWindows(const ConfigFields& fields) {
  TANDEM_ASSIGN_OR_RETURN(const std::optional<int64_t> window, SlidingWindow(fields));
  return LayerWindows{.window = window.value_or(kNoWindow)};
}

absl::StatusOr<LayerWindows> QwenWindows(const ConfigFields& fields, int64_t num_layers) {
  TANDEM_ASSIGN_OR_RETURN(const bool used, fields.Bool("use_sliding_window", false));
  std::optional<int64_t> window;
  if (used) {
    TANDEM_ASSIGN_OR_RETURN(window, SlidingWindow(fields));
  }
  TANDEM_ASSIGN_OR_RETURN(const std::optional<std::vector<bool>> sliding, SlidingLayers(fields));
  LayerWindows windows = {.window = window.value_or(kNoWindow)};
  if (!sliding.has_value()) {
    TANDEM_ASSIGN_OR_RETURN(windows.first_layer,
                            fields.Count("max_window_layers", kDefaultMaxWindowLayers));
    return windows;
  }
  TANDEM_RETURN_IF_ERROR(CheckNumLayers(fields, *sliding, num_layers));
  if (!window.has_value() && std::find(sliding->begin(), sliding->end(), true) != sliding->end()) {
    return InvalidField(
        fields.Path("layer_types"),
        absl::StrCat("has ", kSlidingAttention, ", but ",
                     used ? "sliding_window is null" : "use_sliding_window is false"));
  }
  windows.layers = *sliding;
  return windows;
}

absl::StatusOr<LayerWindows> Gemma2Windows(const ConfigFields& fields, int64_t num_layers) {
  return GemmaWindows(fields, num_layers, /*pattern=*/2);
}

absl::StatusOr<LayerWindows> Gemma3Windows(const ConfigFields& fields, int64_t num_layers) {
  TANDEM_ASSIGN_OR_RETURN(const int64_t pattern, fields.Size("sliding_window_pattern", 6));
  return GemmaWindows(fields, num_layers, pattern);
}

absl::StatusOr<LayerWindows> MixtralWindows(const ConfigFields& fields) {
  if (fields.Find("sliding_window") == nullptr) return LayerWindows();
  return MistralWindows(fields);
}

absl::StatusOr<LayerWindows> Qwen2MoeWindows(const ConfigFields& fields, int64_t num_layers) {
  TANDEM_ASSIGN_OR_RETURN(const bool used, fields.Bool("use_sliding_window", false));
  if (used && fields.Find("layer_types") == nullptr) {
    return fields.NotSupported("use_sliding_window",
                               "sliding-window attention without layer_types");
  }
  return QwenWindows(fields, num_layers);
}

absl::StatusOr<LayerWindows> Qwen3MoeWindows(const ConfigFields& fields) {
  TANDEM_ASSIGN_OR_RETURN(const bool used, fields.Bool("use_sliding_window", false));
  if (!used) return LayerWindows();
  return MistralWindows(fields);
}

absl::Status RefuseWindows(const ConfigFields& fields) {
  TANDEM_ASSIGN_OR_RETURN(const bool used, fields.Bool("use_sliding_window", false));
  if (used) return fields.NotSupported("use_sliding_window", "sliding-window attention");
  TANDEM_ASSIGN_OR_RETURN(const std::optional<std::vector<bool>> sliding, SlidingLayers(fields));
  for (const bool slides : sliding.value_or(std::vector<bool>())) {
    if (slides) return fields.NotSupported("layer_types", "sliding-window attention");
  }
  return absl::OkStatus();
}

}  // namespace tandem
