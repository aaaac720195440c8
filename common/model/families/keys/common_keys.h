// Rows of the tables of family_keys.h that several families share.
#ifndef TANDEM_COMMON_MODEL_FAMILIES_KEYS_COMMON_KEYS_H_
#define TANDEM_COMMON_MODEL_FAMILIES_KEYS_COMMON_KEYS_H_

#include "common/model/config/config_keys.h"

namespace tandem {

// The feature that an `Only` row of an activation names in its refusal.
inline constexpr const char* kActivation = "the activation";

// The keys of every class, and of the code around the classes.
ConfigKeys EveryClassKeys();
// EveryClassKeys with what every text model has, and the base of the rotation where config.json
// says none.
ConfigKeys TextKeys(const char* rope_theta);
// The window of layers in families whose classes have none, or have it in all layers or none.
ConfigKeys SameLayerKeys();
// The windows of Qwen's classes.
ConfigKeys QwenWindowKeys(const char* max_window_layers);
// What mixtures of experts have beside their experts.
ConfigKeys RouterKeys();

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_FAMILIES_KEYS_COMMON_KEYS_H_
