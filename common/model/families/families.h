// What each file of this folder registers; see family_registry.cc.
#ifndef TANDEM_COMMON_MODEL_FAMILIES_FAMILIES_H_
#define TANDEM_COMMON_MODEL_FAMILIES_FAMILIES_H_

#include "common/model/family_registry.h"

namespace tandem {

Family LlamaFamily();
Family Qwen2Family();
Family Qwen3Family();

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_FAMILIES_FAMILIES_H_
