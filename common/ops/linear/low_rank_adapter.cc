#include "common/ops/linear/low_rank_adapter.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include "common/ops/linear/linear_weight.h"

namespace tandem::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

void AddToColumns(const at::Tensor& y, at::TensorList products, const LowRankAdapter& adapter) {
  for (size_t i = 0; i < products.size(); ++i) {
    y.narrow(1, adapter.maps[i].column, adapter.maps[i].width).add_(products[i]);
  }
}

// The gradient of a product is its columns of the sum's. Autograd's own functions of columns would
// make the sum anew, and a gradient of the sum's size for each product.
class AddFunction : public torch::autograd::Function<AddFunction> {
 public:
  struct To {
    const LowRankAdapter& adapter;
  };

  static at::Tensor forward(AutogradContext* context, const at::Tensor& y, at::TensorList products,
                            const To& to) {
    AddToColumns(y, products, to.adapter);
    context->mark_dirty({y});
    std::vector<int64_t> columns, widths;
    for (const LowRankAdapter::Map& map : to.adapter.maps) {
      columns.push_back(map.column);
      widths.push_back(map.width);
    }
    context->saved_data["columns"] = columns;
    context->saved_data["widths"] = widths;
    return y;
  }

  static variable_list backward(AutogradContext* context, variable_list dys) {
    const std::vector<int64_t> columns = context->saved_data["columns"].toIntVector();
    const std::vector<int64_t> widths = context->saved_data["widths"].toIntVector();
    variable_list gradients = {dys[0]};
    for (size_t i = 0; i < columns.size(); ++i) {
      gradients.push_back(dys[0].narrow(1, columns[i], widths[i]));
    }
    gradients.emplace_back();  // of the adapter
    return gradients;
  }
};

}  // namespace

std::vector<const LinearWeight*> OfAdapters(
    const std::vector<const LinearWeight*>& maps,
    absl::FunctionRef<const LinearWeight*(const LowRankAdapter&)> part) {
  std::vector<const LinearWeight*> parts;
  for (const LinearWeight* map : maps) parts.push_back(part(*map->adapter()));
  return parts;
}

at::Tensor AddAdapters(const at::Tensor& y, const LowRankAdapter& adapter,
                       absl::FunctionRef<at::Tensor(size_t map)> product) {
  std::vector<at::Tensor> products;
  for (size_t i = 0; i < adapter.maps.size(); ++i) products.push_back(product(i));
  if (at::GradMode::is_enabled()) {
    return AddFunction::apply(y, at::TensorList(products), AddFunction::To{adapter});
  }
  AddToColumns(y, products, adapter);
  return y;
}

}  // namespace tandem::ops
