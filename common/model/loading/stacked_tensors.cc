#include "common/model/loading/stacked_tensors.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/errors/status_macros.h"
#include "common/tensor/aten/tensor_check.h"

namespace tandem {
namespace {

// The place of a parameter in an exported tensor.
struct Place {
  const StackedTensor* stack;
  int64_t row;
};

std::map<std::string, Place> ExportedPlaces(const std::vector<StackedTensor>& stacks) {
  std::map<std::string, Place> places;
  for (const StackedTensor& stack : stacks) {
    if (!stack.is_exported) continue;
    int64_t row = 0;
    for (const StackedParameter& parameter : stack.parameters) {
      places[parameter.name] = {&stack, row};
      row += parameter.rows;
    }
  }
  return places;
}

}  // namespace

absl::Status Unstack(const std::vector<StackedTensor>& stacks, absl::string_view source,
                     std::vector<const TensorView*>& tensors, std::deque<TensorView>& views) {
  std::map<absl::string_view, const StackedTensor*> missing;
  for (const StackedTensor& stack : stacks) missing[stack.name] = &stack;
  std::vector<const TensorView*> unstacked;
  for (const TensorView* view : tensors) {
    const auto found = missing.find(view->name);
    if (found == missing.end()) {
      unstacked.push_back(view);
      continue;
    }
    const StackedTensor& stack = *found->second;
    missing.erase(found);
    TANDEM_RETURN_IF_ERROR(CheckFloatTensor(*view, stack.shape));
    int64_t rows = 1;
    for (size_t axis = 0; axis + 1 < stack.shape.size(); ++axis) rows *= stack.shape[axis];
    const size_t row_bytes = view->bytes / static_cast<size_t>(rows);
    const std::byte* data = view->data;
    for (const StackedParameter& parameter : stack.parameters) {
      TensorView one = *view;
      one.name = parameter.name;
      one.shape = {parameter.rows, stack.shape.back()};
      one.bytes = row_bytes * static_cast<size_t>(parameter.rows);
      one.data = data;
      data += one.bytes;
      unstacked.push_back(&views.emplace_back(std::move(one)));
    }
  }
  for (const auto& [name, stack] : missing) {
    if (stack->is_exported) {
      return absl::InvalidArgumentError(absl::StrCat(source, ": tensor '", name, "': missing"));
    }
  }
  tensors = std::move(unstacked);
  return absl::OkStatus();
}

std::vector<WeightSpec> ExportedSpecs(const std::vector<StackedTensor>& stacks,
                                      const std::vector<WeightSpec>& parameters) {
  const std::map<std::string, Place> places = ExportedPlaces(stacks);
  std::vector<WeightSpec> specs;
  for (const WeightSpec& spec : parameters) {
    const auto found = places.find(spec.name);
    if (found == places.end()) {
      specs.push_back(spec);
    } else if (found->second.row == 0) {
      const StackedTensor& stack = *found->second.stack;
      specs.push_back({.name = stack.name, .dtype = spec.dtype, .shape = stack.shape});
    }
  }
  return specs;
}

absl::Status VisitExported(const std::vector<StackedTensor>& stacks, TensorSource parameters,
                           TensorVisitor visit) {
  const std::map<std::string, Place> places = ExportedPlaces(stacks);
  struct Filling {
    at::Tensor whole;
    int64_t rows_left;
  };
  std::map<const StackedTensor*, Filling> fillings;
  return parameters([&](const std::string& name, const at::Tensor& tensor) -> absl::Status {
    const auto found = places.find(name);
    if (found == places.end()) return visit(name, tensor);
    const at::NoGradGuard no_grad;
    const auto [stack, row] = found->second;
    Filling& filling = fillings[stack];
    if (!filling.whole.defined()) {
      filling = {.whole = at::empty(stack->shape, at::device(at::kCPU).dtype(tensor.scalar_type())),
                 .rows_left = stack->shape[0]};
    }
    filling.whole.narrow(0, row, tensor.size(0)).copy_(tensor);
    filling.rows_left -= tensor.size(0);
    if (filling.rows_left > 0) return absl::OkStatus();
    const at::Tensor whole = filling.whole;
    fillings.erase(stack);
    return visit(stack->name, whole);
  });
}

}  // namespace tandem
