// Adapters in PEFT's format: a directory with adapter_config.json and adapter_model.safetensors
// (https://huggingface.co/docs/peft/developer_guides/checkpoint). No torch.
#ifndef TANDEM_COMMON_MODEL_LOADING_PEFT_FILES_H_
#define TANDEM_COMMON_MODEL_LOADING_PEFT_FILES_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/model/config/lora.h"

namespace tandem {

inline constexpr char kAdapterConfigFile[] = "adapter_config.json";
inline constexpr char kAdapterWeightsFile[] = "adapter_model.safetensors";
// Before the names that parameters have without an adapter.
inline constexpr char kPeftPrefix[] = "base_model.model.";

// Returns `options` with rank, alpha and target_modules of the adapter at `options.path`, if it has
// one. INVALID_ARGUMENT for a setting that differs from the file's, and "lora.path" for a file that
// is broken; UNIMPLEMENTED for "adapter_config.json.<key>" of another method than plain LoRA.
absl::StatusOr<LoraOptions> ResolveLora(const LoraOptions& options);

// Warns in the log of a file whose adapters were trained with lora_dropout, which no training here
// applies. INVALID_ARGUMENT for "adapter_config.json.lora_dropout" that is no number; errors of
// ResolveLora for a file that is broken.
absl::Status NoteDropout(const LoraOptions& options);

// Writes adapter_config.json for a model with these parameters, of which the directory has those
// that train.
absl::Status WriteAdapterConfig(const std::string& directory, const LoraOptions& options,
                                const std::vector<ParameterSpec>& specs,
                                absl::string_view base_model);

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_LOADING_PEFT_FILES_H_
