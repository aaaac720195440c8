// The keys of config.json, by family: what the classes of the pinned `transformers` have, with
// their defaults, and what becomes of each here (docs/adr/0069-config-keys.md). Families read
// through these tables, and tests/parity/test_config_keys.py compares them with the classes.
#ifndef TANDEM_COMMON_MODEL_FAMILIES_KEYS_FAMILY_KEYS_H_
#define TANDEM_COMMON_MODEL_FAMILIES_KEYS_FAMILY_KEYS_H_

#include "common/model/config/config_keys.h"

namespace tandem {

ConfigKeys LlamaKeys();
// With `layer_types` `transformers` makes a Ministral of a Mistral: they are the same but for it.
ConfigKeys MistralKeys();
ConfigKeys Qwen2Keys();
ConfigKeys Qwen3Keys();
ConfigKeys Olmo2Keys();
ConfigKeys DeepseekV3Keys();
ConfigKeys Gemma2Keys();
ConfigKeys Gemma3Keys();
ConfigKeys MixtralKeys();
ConfigKeys Qwen2MoeKeys();
ConfigKeys Qwen3MoeKeys();
ConfigKeys Phi3Keys();

// Qwen2-VL and Qwen2.5-VL: the text model, the object around it, and the vision towers.
ConfigKeys QwenVlTextKeys();
ConfigKeys QwenVlKeys();
ConfigKeys Qwen2VlVisionKeys();
ConfigKeys Qwen25VlVisionKeys();

// A text model's `rope_parameters` or `rope_scaling`.
ConfigKeys RopeKeys();
// A vision tower's.
ConfigKeys VisionRopeKeys();

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_FAMILIES_KEYS_FAMILY_KEYS_H_
