// The components of an update of weights: a model, and what is served with it. Sender and receiver
// read the one table of them, so that a further component, as an adapter, is a row of it.
#ifndef TANDEM_COMMON_WEIGHTS_WEIGHT_COMPONENTS_H_
#define TANDEM_COMMON_WEIGHTS_WEIGHT_COMPONENTS_H_

#include <array>
#include <cstddef>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "common/base/errors/error.h"
#include "common/tensor/weight_spec.h"

namespace tandem {

// The model, in training at the sender and served by the receiver.
inline constexpr char kModelComponent[] = "model";
// Its learned draft heads (common/speculator).
inline constexpr char kSpeculatorComponent[] = "speculator";

// In the order in which the components follow one another in the byte stream. The tensors of all
// but the first, the model, have names that begin with the component's and a dot.
inline constexpr std::array<absl::string_view, 2> kWeightComponents = {kModelComponent,
                                                                       kSpeculatorComponent};

// Returns the name in an update of a tensor of a component other than the model.
inline std::string NameInUpdate(absl::string_view component, absl::string_view tensor) {
  return absl::StrCat(component, ".", tensor);
}

// Returns the place in kWeightComponents of the component that a tensor belongs to.
inline size_t ComponentIndex(const WeightSpec& tensor) {
  for (size_t i = 1; i < kWeightComponents.size(); ++i) {
    if (absl::StartsWith(tensor.name, NameInUpdate(kWeightComponents[i], ""))) return i;
  }
  return 0;
}
inline absl::string_view ComponentOf(const WeightSpec& tensor) {
  return kWeightComponents[ComponentIndex(tensor)];
}

// INVALID_ARGUMENT, with the field `path`, unless `name` is one of the components beside the model.
inline absl::Status CheckComponentName(absl::string_view path, absl::string_view name) {
  for (size_t i = 1; i < kWeightComponents.size(); ++i) {
    if (name == kWeightComponents[i]) return absl::OkStatus();
  }
  return InvalidField(
      path,
      absl::StrCat("\"", name, "\" is not a component of an update; those beside the model are: ",
                   absl::StrJoin(kWeightComponents.begin() + 1, kWeightComponents.end(), ", ")));
}

}  // namespace tandem

#endif  // TANDEM_COMMON_WEIGHTS_WEIGHT_COMPONENTS_H_
