#include "common/ops/linear/grouped_linear.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <iterator>

#include "absl/functional/function_ref.h"
#include "common/kernels/cpu/cpu_kernels.h"
#include "common/ops/device_kernels.h"
#include "common/ops/linear/linear_stack.h"
#include "common/ops/linear/low_rank_adapter.h"
#include "common/ops/products/matrix_product.h"
#include "common/ops/products/parallel_linear.h"

namespace tandem::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// A map that has rows.
struct Group {
  const LinearWeight* map;
  int64_t begin, end;  // its rows

  int64_t rows() const { return end - begin; }
};

std::vector<Group> GroupsWithRows(const std::vector<int64_t>& offsets,
                                  const std::vector<const LinearWeight*>& maps) {
  std::vector<Group> groups;
  for (size_t i = 0; i < maps.size(); ++i) {
    if (offsets[i] < offsets[i + 1]) groups.push_back({maps[i], offsets[i], offsets[i + 1]});
  }
  return groups;
}

// Divides groups of many rows where they have too few panels for the threads.
std::vector<Group> Divided(const std::vector<Group>& groups, int64_t panels) {
  constexpr int64_t kMinRows = 24;
  const int64_t chunks = 2 * at::get_num_threads() / (panels * static_cast<int64_t>(groups.size()));
  if (chunks < 2) return groups;
  std::vector<Group> divided;
  for (const Group& group : groups) {
    const int64_t count = std::clamp<int64_t>(group.rows() / kMinRows, 1, chunks);
    for (int64_t i = 0; i < count; ++i) {
      divided.push_back({group.map, group.begin + group.rows() * i / count,
                         group.begin + group.rows() * (i + 1) / count});
    }
  }
  return divided;
}

// Returns the rows that maps like `map` multiply.
at::Tensor InputOf(const at::Tensor& x, const LinearWeight& map) {
  return map.rounds_inputs() ? map.Input(x) : x.contiguous();
}

// `x` is of InputOf.
at::Tensor Multiply(const at::Tensor& x, const std::vector<Group>& all) {
  const LinearWeight& first = *all.front().map;
  const bool rounds = first.rounds_inputs();
  at::Tensor y =
      at::empty({x.size(0), first.out()}, rounds ? x.options().dtype(at::kFloat) : x.options());
  if (!rounds && (!x.is_cpu() || x.scalar_type() != at::kFloat ||
                  kernels::GetCpuKernels().linear == nullptr)) {
    for (const Group& group : all) {
      const at::Tensor rows = x.narrow(0, group.begin, group.rows());
      y.narrow(0, group.begin, group.rows()).copy_(group.map->Base(rows));
    }
    return y;
  }
  const int64_t panels = kernels::PanelCount(first.out());
  const std::vector<Group> groups = Divided(all, panels);
  const auto count = static_cast<int64_t>(groups.size());
  ParallelPanels(count, panels, kernels::kPanelOuts * first.in() * x.size(0) / count,
                 [&](int64_t index, int64_t panel_begin, int64_t panel_end) {
                   const Group& group = groups[static_cast<size_t>(index)];
                   group.map->MultiplyTile({.row_begin = group.begin,
                                            .row_end = group.end,
                                            .panel_begin = panel_begin,
                                            .panel_end = panel_end},
                                           x, y);
                 });
  return y;
}

void MultiplyAll(const std::vector<Product>& products) {
  if (products.front().product.is_cpu()) return MatrixProducts(products);
  for (const auto& [product, a, b, accumulate] : products) {
    MatrixProductInto(product, a, b, accumulate);
  }
}

// Whether gradients of a master are added to those that it has: autograd would hold the gradients
// of all experts beside them.
bool AddsInPlace(const at::Tensor& master) {
  const at::Tensor& gradient = master.grad();
  return gradient.defined() && gradient.is_contiguous() && gradient.scalar_type() == at::kFloat;
}

class GroupedLinearFunction : public torch::autograd::Function<GroupedLinearFunction> {
 public:
  // `masters` are those of the groups, one group after the other.
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, at::TensorList masters,
                            const std::vector<Group>& groups) {
    const at::Tensor input = InputOf(x, *groups.front().map);
    variable_list saved = {input};
    std::vector<int64_t> offsets;
    for (const Group& group : groups) {
      saved.push_back(group.map->compute_weight());
      offsets.push_back(group.begin);
    }
    offsets.push_back(groups.back().end);
    saved.insert(saved.end(), masters.begin(), masters.end());
    context->save_for_backward(saved);
    context->saved_data["offsets"] = offsets;
    std::vector<int64_t> outs;
    for (const at::Tensor& master : groups.front().map->masters()) outs.push_back(master.size(0));
    context->saved_data["outs"] = outs;
    context->saved_data["masters"] = static_cast<int64_t>(masters.size());
    return Multiply(input, groups);
  }

  static variable_list backward(AutogradContext* context, variable_list dys) {
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &x = saved[0], dy = dys[0].to(saved[1].scalar_type()).contiguous();
    const std::vector<int64_t> offsets = context->saved_data["offsets"].toIntVector();
    const std::vector<int64_t> outs = context->saved_data["outs"].toIntVector();
    // One entry per argument: x, the masters, the groups.
    variable_list gradients(1 + static_cast<size_t>(context->saved_data["masters"].toInt()) + 1);
    const auto floats = x.options().dtype(at::kFloat);
    std::vector<Product> products;
    at::Tensor dx;
    if (context->needs_input_grad(0)) dx = at::empty(x.sizes(), floats);
    for (size_t i = 0, master = 1; i + 1 < offsets.size(); ++i) {
      const int64_t begin = offsets[i], rows = offsets[i + 1] - begin;
      const at::Tensor dy_rows = dy.narrow(0, begin, rows), x_rows = x.narrow(0, begin, rows);
      if (dx.defined())
        products.push_back({.product = dx.narrow(0, begin, rows), .a = dy_rows, .b = saved[1 + i]});
      int64_t column = 0;
      for (const int64_t out : outs) {
        if (context->needs_input_grad(master)) {
          const at::Tensor& leaf = saved[offsets.size() + master - 1];
          const bool adds = AddsInPlace(leaf);
          if (!adds) gradients[master] = at::empty({out, x.size(1)}, floats);
          products.push_back({.product = adds ? leaf.grad() : gradients[master],
                              .a = dy_rows.narrow(1, column, out).t(),
                              .b = x_rows,
                              .accumulate = adds});
        }
        column += out;
        ++master;
      }
    }
    if (!products.empty()) MultiplyAll(products);
    if (dx.defined()) gradients[0] = dx.to(dys[0].scalar_type());
    return gradients;
  }
};

// Returns the products with the maps alone.
at::Tensor BaseProducts(const at::Tensor& x, const std::vector<int64_t>& offsets,
                        const std::vector<const LinearWeight*>& maps) {
  const std::vector<Group> groups = GroupsWithRows(offsets, maps);
  if (groups.empty()) return at::empty({0, maps.front()->out()}, x.options());
  if (maps.front()->is_packed() || !at::GradMode::is_enabled())
    return Multiply(InputOf(x, *maps.front()), groups);
  std::vector<at::Tensor> masters;
  for (const Group& group : groups) {
    masters.insert(masters.end(), group.map->masters().begin(), group.map->masters().end());
  }
  return GroupedLinearFunction::apply(x, at::TensorList(masters), groups);
}

// Returns the products with maps that are stacked, whose offsets are on the device.
at::Tensor DeviceProducts(const at::Tensor& x_in, const at::Tensor& offsets,
                          const std::vector<const LinearWeight*>& maps) {
  const at::Tensor x = x_in.contiguous(), stack = StackOf(maps);
  TORCH_CHECK(x.scalar_type() == stack.scalar_type(), "grouped linear: x is of ", x.scalar_type(),
              ", the maps of ", stack.scalar_type());
  const kernels::DeviceKernels& table = DeviceKernelsOf(x.device());
  const bool bfloat16 = x.scalar_type() == at::kBFloat16;
  const int64_t in = stack.size(2), out = stack.size(1);
  constexpr int64_t kAligned = 8;  // 16 bytes
  if (bfloat16 && in % kAligned == 0 && out % kAligned == 0 &&
      table.has_grouped_mm(x.device().index())) {
    return at::_grouped_mm(x, stack.transpose(1, 2), offsets.narrow(0, 1, stack.size(0)));
  }
  at::Tensor y = at::empty({x.size(0), out}, x.options());
  Launch("grouped linear map", x.device(), table.grouped_linear,
         {.x = x.const_data_ptr(),
          .weights = stack.const_data_ptr(),
          .map_stride = stack.stride(0),
          .offsets = offsets.const_data_ptr<int32_t>(),
          .y = y.mutable_data_ptr(),
          .rows = x.size(0),
          .groups = stack.size(0),
          .in = in,
          .out = out,
          .bfloat16 = bfloat16});
  return y;
}

// Returns multiply(x, maps), with the products of the maps' adapters added.
using Multiplication =
    absl::FunctionRef<at::Tensor(const at::Tensor&, const std::vector<const LinearWeight*>&)>;
at::Tensor WithAdapters(const at::Tensor& x, const std::vector<const LinearWeight*>& maps,
                        Multiplication multiply) {
  at::Tensor y = multiply(x, maps);
  const LowRankAdapter* const adapter = maps.front()->adapter();
  if (adapter == nullptr) return y;
  const at::Tensor low =
      multiply(x, OfAdapters(maps, [](const auto& of) { return of.a; })) * adapter->scale;
  const auto product = [&](size_t i) {
    return multiply(low.narrow(1, static_cast<int64_t>(i) * adapter->rank, adapter->rank),
                    OfAdapters(maps, [&](const auto& of) { return of.maps[i].b; }));
  };
  return AddAdapters(y, *adapter, product);
}

}  // namespace

at::Tensor GroupedLinear(const at::Tensor& x, const std::vector<int64_t>& offsets,
                         const std::vector<const LinearWeight*>& maps) {
  TORCH_CHECK(offsets.size() == maps.size() + 1 && offsets.back() == x.size(0) &&
                  x.size(1) == maps.front()->in(),
              "grouped linear: x ", x.sizes(), ", ", offsets.size(), " offsets, ", maps.size(),
              " maps");
  return WithAdapters(x, maps, [&](const at::Tensor& rows, const auto& of) {
    return BaseProducts(rows, offsets, of);
  });
}

bool CanGroupOnDevice(const at::Tensor& x) {
  return c10::InferenceMode::is_enabled() &&
         DeviceKernelsOf(x.device()).grouped_linear != nullptr &&
         (x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16);
}

at::Tensor GroupedLinear(const at::Tensor& x, const at::Tensor& offsets,
                         const std::vector<const LinearWeight*>& maps) {
  TORCH_CHECK(
      offsets.sizes() == at::IntArrayRef{std::ssize(maps) + 1} && x.size(1) == maps.front()->in(),
      "grouped linear: x ", x.sizes(), ", offsets ", offsets.sizes(), ", ", maps.size(), " maps");
  return WithAdapters(x, maps, [&](const at::Tensor& rows, const auto& of) {
    return DeviceProducts(rows, offsets, of);
  });
}

}  // namespace tandem::ops
