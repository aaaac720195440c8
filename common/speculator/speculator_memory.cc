#include "common/speculator/speculator_memory.h"

#include <ATen/core/Tensor.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/base/errors/error.h"
#include "common/base/errors/status_macros.h"
#include "common/speculator/speculator_files.h"
#include "common/tensor/aten/catch_torch_errors.h"

namespace tandem::speculator {

absl::StatusOr<SpeculatorSize> MeasureSpeculator(const std::string& directory, int64_t hidden_size,
                                                 bool packs_heads) {
  return CatchTorchErrors("speculator", [&]() -> absl::StatusOr<SpeculatorSize> {
    TANDEM_ASSIGN_OR_RETURN(const auto speculator,
                            DeclareSpeculator(directory, {.packs_heads = packs_heads}));
    if (const int64_t own = speculator->sizes().hidden_size; own != hidden_size) {
      return InvalidField("config.json",
                          absl::StrCat("is a speculator for hidden states of ", own,
                                       " numbers, but those of the model have ", hidden_size));
    }
    SpeculatorSize size = {.bytes = static_cast<int64_t>(speculator->buffer().nbytes())};
    for (const SpeculatorParameter& parameter : speculator->parameters()) {
      if (!parameter.value.defined()) size.bytes += parameter.bytes();
      const auto staged = parameter.spec.numel() * static_cast<int64_t>(sizeof(float));
      size.largest_bytes = std::max(size.largest_bytes, staged);
    }
    return size;
  });
}

}  // namespace tandem::speculator
