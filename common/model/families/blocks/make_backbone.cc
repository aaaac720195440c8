#include "common/model/families/blocks/make_backbone.h"

#include "common/model/families/blocks/decoder.h"

namespace tandem {

std::unique_ptr<Backbone> MakeBackbone(BackboneKind kind, const ModelConfig& config,
                                       const Placement& placement, ParameterStore& store) {
  switch (kind) {
    case BackboneKind::kDecoder:
      return std::make_unique<Decoder>(config, placement, store);
  }
  return nullptr;
}

}  // namespace tandem
