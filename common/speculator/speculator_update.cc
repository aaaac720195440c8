#include "common/speculator/speculator_update.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

#include "common/base/errors/error.h"
#include "common/base/errors/status_macros.h"
#include "common/model/config/config_fields.h"
#include "common/speculator/speculator_kind.h"
#include "common/tensor/aten/tensor_memory.h"
#include "common/weights/weights_digest.h"

namespace tandem::speculator {

std::string NameInUpdate(const SpeculatorParameter& parameter) {
  return tandem::NameInUpdate(kSpeculatorComponent, parameter.spec.name);
}

NamedTensors WeightsToSend(const Speculator& speculator) {
  NamedTensors weights;
  for (const SpeculatorParameter& parameter : speculator.parameters()) {
    weights.emplace_back(NameInUpdate(parameter), parameter.value.detach());
  }
  return weights;
}

ComponentManifest ManifestOf(const Speculator& speculator) {
  return {.name = kSpeculatorComponent,
          .config = speculator.settings(),
          .digest = WeightsDigest(WeightsToSend(speculator))};
}

ReceivedComponent ReceivedBy(const Speculator& speculator) {
  ReceivedComponent received = {.name = kSpeculatorComponent,
                                .config = speculator.settings(),
                                .parameters = {},
                                .initial = {.version = 0, .digest = speculator.loaded_digest()}};
  for (const SpeculatorParameter& parameter : speculator.parameters()) {
    received.parameters.push_back({.name = NameInUpdate(parameter), .shape = parameter.spec.shape});
  }
  return received;
}

absl::StatusOr<std::unique_ptr<PreparedSpeculator>> PreparedSpeculator::Make(
    const Speculator& speculator) {
  const at::Tensor& buffer = speculator.buffer();
  TANDEM_ASSIGN_OR_RETURN(std::unique_ptr<Speculator> next,
                          speculator.kind().create(ConfigFields(speculator.config(), "config.json"),
                                                   {.num_token_ids = speculator.num_token_ids(),
                                                    .device = buffer.device(),
                                                    .dtype = buffer.scalar_type(),
                                                    .packs_heads = speculator.packs_heads()}));
  next->AllocateParameters();
  return std::unique_ptr<PreparedSpeculator>(new PreparedSpeculator(std::move(next)));
}

absl::Status PreparedSpeculator::Add(const std::string& name, const at::Tensor& value) {
  const auto& parameters = next_->parameters();
  const auto found = std::ranges::find(parameters, name, NameInUpdate);
  if (found == parameters.end()) return InvalidField(name, "is not a parameter of the speculator");
  if (value.sizes() != found->spec.shape) {
    return InvalidField(name, "has a different shape from the speculator's");
  }
  found->Assign(value);
  return absl::OkStatus();
}

void PreparedSpeculator::SwapWith(const Speculator& speculator) const {
  SwapMemory(speculator.buffer(), next_->buffer());
  for (size_t i = 0; i < next_->parameters().size(); ++i) {
    if (const auto& packed = speculator.parameters()[i].packed; packed != nullptr) {
      packed->Swap(*next_->parameters()[i].packed);
    }
  }
}

}  // namespace tandem::speculator
