#include "common/model/loading/merged_adapters.h"

#include <ATen/ATen.h>

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

namespace tandem {

absl::Status VisitMerged(const LoraOptions& options, TensorSource parameters, TensorVisitor visit) {
  at::Tensor a, b;  // of the next map
  std::string weight;
  return parameters([&](const std::string& name, const at::Tensor& tensor) {
    if (const absl::string_view map = AdaptedMap(name); !map.empty()) {
      // The tensor is valid during this call alone.
      at::Tensor& matrix = a.defined() ? b : a;
      matrix = tensor.to(at::kFloat, /*non_blocking=*/false, /*copy=*/true);
      weight = absl::StrCat(map, ".weight");
      return absl::OkStatus();
    }
    if (name != weight) return visit(name, tensor);
    const at::Tensor merged =
        at::addmm(tensor.to(at::kFloat), std::exchange(b, {}), std::exchange(a, {}), /*beta=*/1,
                  /*alpha=*/options.scale());
    return visit(name, merged);
  });
}

}  // namespace tandem
