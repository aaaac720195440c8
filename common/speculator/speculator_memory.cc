#include "common/speculator/speculator_memory.h"

#include <ATen/core/Tensor.h>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"
#include "common/speculator/speculator_files.h"
#include "common/tensor/catch_torch_errors.h"

namespace tandem::speculator {

absl::StatusOr<int64_t> SpeculatorBytes(const std::string& directory, int64_t hidden_size) {
  return CatchTorchErrors("speculator", [&]() -> absl::StatusOr<int64_t> {
    TANDEM_ASSIGN_OR_RETURN(const auto speculator, DeclareSpeculator(directory, {}));
    if (const int64_t own = speculator->sizes().hidden_size; own != hidden_size) {
      return InvalidField("config.json",
                          absl::StrCat("is a speculator for hidden states of ", own,
                                       " numbers; those of the model have ", hidden_size));
    }
    return static_cast<int64_t>(speculator->buffer().nbytes());
  });
}

}  // namespace tandem::speculator
