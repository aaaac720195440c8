// The weights of a model with its adapters merged into them.
#ifndef TANDEM_COMMON_MODEL_LOADING_MERGED_ADAPTERS_H_
#define TANDEM_COMMON_MODEL_LOADING_MERGED_ADAPTERS_H_

#include "absl/status/status.h"
#include "common/model/config/lora.h"
#include "common/tensor/aten/named_tensors.h"

namespace tandem {

// Visits the parameters that `parameters` gives, in the order of WithAdapters, without those of
// adapters: a map with an adapter comes as W + (alpha / rank) B A, summed in float32.
absl::Status VisitMerged(const LoraOptions& options, TensorSource parameters, TensorVisitor visit);

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_LOADING_MERGED_ADAPTERS_H_
