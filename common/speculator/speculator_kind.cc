#include "common/speculator/speculator_kind.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "common/base/errors/error.h"
#include "common/base/errors/status_macros.h"
#include "common/model/parameters/initial_value.h"
#include "common/speculator/heads/arctic_lstm_speculator.h"
#include "common/speculator/heads/mlp_speculator.h"

namespace tandem::speculator {
namespace {

std::vector<const SpeculatorKind*>& Kinds() {
  static auto* const kinds =
      new std::vector<const SpeculatorKind*>{&MlpSpeculatorKind(), &ArcticLstmSpeculatorKind()};
  return *kinds;
}

}  // namespace

const std::vector<const SpeculatorKind*>& SpeculatorKinds() { return Kinds(); }

void RegisterSpeculatorKind(const SpeculatorKind& kind) { Kinds().push_back(&kind); }

absl::StatusOr<const SpeculatorKind*> FindSpeculatorKind(absl::string_view name,
                                                         absl::string_view field) {
  std::string known;
  for (const SpeculatorKind* kind : SpeculatorKinds()) {
    const auto& architectures = kind->architectures;
    if (name == absl::string_view(kind->name) ||
        std::find(architectures.begin(), architectures.end(), name) != architectures.end()) {
      return kind;
    }
    absl::StrAppend(&known, known.empty() ? "" : ", ", kind->name);
    for (const std::string& architecture : architectures)
      absl::StrAppend(&known, ", ", architecture);
  }
  return FieldError(absl::StatusCode::kUnimplemented, field,
                    absl::StrCat(name, " is not supported (", known, " are)"));
}

absl::StatusOr<const SpeculatorKind*> KindOfConfig(const ConfigFields& fields) {
  const std::string path = fields.Path("architectures");
  const nlohmann::json* architecture = fields.Find("architectures");
  if (architecture == nullptr) return InvalidField(path, "is missing");
  // verl writes the name itself instead of a list.
  if (architecture->is_array() && architecture->size() == 1) architecture = &architecture->front();
  if (!architecture->is_string()) return InvalidField(path, "must be a list of one name");
  return FindSpeculatorKind(architecture->get<std::string>(), path);
}

absl::StatusOr<std::unique_ptr<Speculator>> RandomSpeculator(const SpeculatorKind& kind,
                                                             const ConfigFields& fields,
                                                             uint64_t seed,
                                                             const SpeculatorOptions& options) {
  TANDEM_ASSIGN_OR_RETURN(auto speculator, kind.create(fields, options));
  speculator->AllocateParameters();
  const at::NoGradGuard no_grad;
  const at::Generator generator = at::detail::createCPUGenerator(seed);
  for (const SpeculatorParameter& parameter : speculator->parameters()) {
    parameter.Assign(InitialValue(parameter.spec, parameter.initializer_range, generator));
  }
  return speculator;
}

}  // namespace tandem::speculator
