// Weight files in which a tensor holds several parameters (StackedTensor in family.h): views of the
// parameters for reading, and whole tensors for exports.
#ifndef TANDEM_COMMON_MODEL_LOADING_STACKED_TENSORS_H_
#define TANDEM_COMMON_MODEL_LOADING_STACKED_TENSORS_H_

#include <deque>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "common/model/family.h"
#include "common/tensor/aten/named_tensors.h"
#include "common/tensor/safetensors/safetensors.h"
#include "common/tensor/weight_spec.h"

namespace tandem {

// Puts, in `tensors`, views of the parameters in the place of each tensor of `stacks`. `views` owns
// them. INVALID_ARGUMENT names file and tensor for another shape or type; `source`, which the
// tensors are from, and the tensor for an exported one that is missing.
absl::Status Unstack(const std::vector<StackedTensor>& stacks, absl::string_view source,
                     std::vector<const TensorView*>& tensors, std::deque<TensorView>& views);

// Returns the specs of an export's tensors: those of `parameters`, with the exported tensors of
// `stacks` in the place of theirs.
std::vector<WeightSpec> ExportedSpecs(const std::vector<StackedTensor>& stacks,
                                      const std::vector<WeightSpec>& parameters);

// Visits the tensors of an export, on the CPU where they are stacked. Holds a copy of those stacked
// tensors alone of which some parameters have come and others have not. Errors of `parameters` and
// `visit`.
absl::Status VisitExported(const std::vector<StackedTensor>& stacks, TensorSource parameters,
                           TensorVisitor visit);

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_LOADING_STACKED_TENSORS_H_
