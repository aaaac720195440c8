// The backbone of a model's family.
#ifndef TANDEM_COMMON_MODEL_FAMILIES_BLOCKS_MAKE_BACKBONE_H_
#define TANDEM_COMMON_MODEL_FAMILIES_BLOCKS_MAKE_BACKBONE_H_

#include <memory>

#include "common/model/family.h"
#include "common/model/parameters/parameter.h"
#include "common/model/parameters/parameter_store.h"
#include "common/model/passes/backbone.h"

namespace tandem {

// Constructs the backbone of `kind`, which takes its parameters from `store`. The store must
// outlive the backbone.
std::unique_ptr<Backbone> MakeBackbone(BackboneKind kind, const ModelConfig& config,
                                       const Placement& placement, ParameterStore& store);

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_FAMILIES_BLOCKS_MAKE_BACKBONE_H_
