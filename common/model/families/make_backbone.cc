#include "common/model/families/make_backbone.h"

#include "common/model/families/dense_decoder.h"

namespace tandem {

std::unique_ptr<Backbone> MakeBackbone(BackboneKind kind, const ModelConfig& config,
                                       const Placement& placement, ParameterStore& store) {
  switch (kind) {
    case BackboneKind::kDenseDecoder:
      return std::make_unique<DenseDecoder>(config, placement, store);
  }
  return nullptr;
}

}  // namespace tandem
