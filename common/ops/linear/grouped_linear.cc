#include "common/ops/linear/grouped_linear.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <utility>

#include "absl/functional/function_ref.h"
#include "common/kernels/cpu/cpu_kernels.h"
#include "common/ops/device_kernels.h"
#include "common/ops/linear/linear_stack.h"
#include "common/ops/linear/low_rank_adapter.h"
#include "common/ops/linear/saved_object.h"
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

// Returns the masters of the maps, those of one map after the other.
std::vector<at::Tensor> MastersOf(const std::vector<const LinearWeight*>& maps) {
  std::vector<at::Tensor> masters;
  for (const LinearWeight* map : maps) {
    masters.insert(masters.end(), map->masters().begin(), map->masters().end());
  }
  return masters;
}

// The products of maps that are packed, and do not train.
class GroupedPackedFunction : public torch::autograd::Function<GroupedPackedFunction> {
 public:
  using Weights = std::vector<std::shared_ptr<const PackedWeight>>;

  static at::Tensor forward(AutogradContext* context, const at::Tensor& x,
                            const std::vector<Group>& groups) {
    auto weights = std::make_shared<Weights>();
    std::vector<int64_t> offsets;
    for (const Group& group : groups) {
      weights->push_back(group.map->packed());
      offsets.push_back(group.begin);
    }
    offsets.push_back(groups.back().end);
    context->saved_data["weights"] = SaveObject(std::move(weights));
    context->saved_data["offsets"] = offsets;
    return Multiply(InputOf(x, *groups.front().map), groups);
  }

  static variable_list backward(AutogradContext* context, variable_list dys) {
    const auto weights = SavedObject<Weights>(context->saved_data["weights"]);
    const std::vector<int64_t> offsets = context->saved_data["offsets"].toIntVector();
    const at::Tensor dy = dys[0].contiguous();
    const at::Tensor dx = at::empty({dy.size(0), weights->front()->in()}, dy.options());
    for (size_t i = 0; i < weights->size(); ++i) {
      const int64_t begin = offsets[i], rows = offsets[i + 1] - begin;
      (*weights)[i]->InputGradientInto(dx.narrow(0, begin, rows), dy.narrow(0, begin, rows),
                                       /*first=*/0, /*accumulate=*/false);
    }
    return {dx, {}};
  }
};

// Returns the products with the maps alone.
at::Tensor BaseProducts(const at::Tensor& x, const std::vector<int64_t>& offsets,
                        const std::vector<const LinearWeight*>& maps) {
  const std::vector<Group> groups = GroupsWithRows(offsets, maps);
  if (groups.empty()) return at::empty({0, maps.front()->out()}, x.options());
  if (!at::GradMode::is_enabled()) return Multiply(InputOf(x, *maps.front()), groups);
  if (maps.front()->is_packed()) return GroupedPackedFunction::apply(x, groups);
  std::vector<const LinearWeight*> with_rows;
  for (const Group& group : groups) with_rows.push_back(group.map);
  const std::vector<at::Tensor> masters = MastersOf(with_rows);
  return GroupedLinearFunction::apply(x, at::TensorList(masters), groups);
}

// Returns the products of rows x with the matrices of a stack [maps, out, in], or with their
// transposes, where the rows of each begin at the offsets.
at::Tensor StackProducts(const at::Tensor& x, const at::Tensor& stack, const at::Tensor& offsets,
                         bool transposed) {
  TORCH_CHECK(x.scalar_type() == stack.scalar_type(), "grouped linear: x is of ", x.scalar_type(),
              ", the maps of ", stack.scalar_type());
  const kernels::DeviceKernels& table = DeviceKernelsOf(x.device());
  const bool bfloat16 = x.scalar_type() == at::kBFloat16;
  const int64_t in = stack.size(transposed ? 1 : 2), out = stack.size(transposed ? 2 : 1);
  constexpr int64_t kAligned = 8;  // 16 bytes
  if (bfloat16 && in % kAligned == 0 && out % kAligned == 0 &&
      table.has_grouped_mm(x.device().index())) {
    return at::_grouped_mm(x, transposed ? stack : stack.transpose(1, 2),
                           offsets.narrow(0, 1, stack.size(0)));
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
          .transposed = transposed,
          .bfloat16 = bfloat16});
  return y;
}

// Returns the gradients that all masters have, as a stack [maps, out, in], if they lie as the
// matrices of one do. `masters` are those of one map after the other.
at::Tensor StackedGradients(at::TensorList masters, int64_t maps) {
  const auto per_map = static_cast<int64_t>(masters.size()) / maps;
  const auto gradient = [&](int64_t i) { return masters[static_cast<size_t>(i)].grad(); };
  for (const at::Tensor& master : masters) {
    if (!AddsInPlace(master)) return {};
  }
  const at::Tensor first = gradient(0);
  const int64_t in = first.size(1);
  const int64_t distance =
      maps > 1 ? gradient(per_map).storage_offset() - first.storage_offset() : 0;
  int64_t out = 0;
  for (int64_t m = 0; m < per_map; ++m) {
    for (int64_t map = 0; map < maps; ++map) {
      const at::Tensor of = gradient(map * per_map + m);
      if (!of.is_alias_of(first) ||
          of.storage_offset() != first.storage_offset() + map * distance + out * in) {
        return {};
      }
    }
    out += gradient(m).size(0);
  }
  if (maps > 1 && distance < out * in) return {};
  return first.as_strided({maps, out, in}, {distance, in, 1});
}

class StackedLinearFunction : public torch::autograd::Function<StackedLinearFunction> {
 public:
  // A struct is no input to autograd, so no gradient flows into the stack.
  struct Maps {
    const at::Tensor &stack, &offsets;
    std::vector<int64_t> outs;  // of the masters of a map
  };

  // `masters` are those of one map after the other.
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, at::TensorList masters,
                            const Maps& maps) {
    variable_list saved = {x, maps.stack, maps.offsets};
    saved.insert(saved.end(), masters.begin(), masters.end());
    context->save_for_backward(saved);
    context->saved_data["outs"] = maps.outs;
    return StackProducts(x, maps.stack, maps.offsets, /*transposed=*/false);
  }

  static variable_list backward(AutogradContext* context, variable_list dys) {
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &x = saved[0], &stack = saved[1], &offsets = saved[2];
    const at::Tensor dy = dys[0].contiguous();
    const at::TensorList masters = at::TensorList(saved).slice(3);
    // One entry per argument: x, the masters, the maps.
    variable_list gradients(1 + masters.size() + 1);
    if (context->needs_input_grad(0)) {
      gradients[0] = StackProducts(dy, stack, offsets, /*transposed=*/true);
    }
    bool any = false, all = true;
    for (size_t i = 0; i < masters.size(); ++i) {
      const bool trains = context->needs_input_grad(1 + i);
      any = any || trains;
      all = all && trains;
    }
    if (!any) return gradients;
    // Gradients are added in place: autograd would hold those of all experts beside them.
    const at::Tensor present = all ? StackedGradients(masters, stack.size(0)) : at::Tensor();
    const at::Tensor result =
        present.defined() ? present : at::empty(stack.sizes(), x.options().dtype(at::kFloat));
    Launch("gradient of grouped linear maps", x.device(),
           DeviceKernelsOf(x.device()).grouped_gradient,
           {.dy = dy.const_data_ptr(),
            .x = x.const_data_ptr(),
            .offsets = offsets.const_data_ptr<int32_t>(),
            .gradients = result.mutable_data_ptr<float>(),
            .map_stride = result.stride(0),
            .groups = stack.size(0),
            .in = stack.size(2),
            .out = stack.size(1),
            .accumulate = present.defined(),
            .bfloat16 = x.scalar_type() == at::kBFloat16});
    if (present.defined()) return gradients;
    const std::vector<int64_t> outs = context->saved_data["outs"].toIntVector();
    size_t master = 1;
    for (int64_t map = 0; map < stack.size(0); ++map) {
      int64_t row = 0;
      for (const int64_t out : outs) {
        if (context->needs_input_grad(master)) gradients[master] = result[map].narrow(0, row, out);
        row += out;
        ++master;
      }
    }
    return gradients;
  }
};

// Returns the products with maps that are stacked, whose offsets are on the device.
at::Tensor DeviceProducts(const at::Tensor& x_in, const at::Tensor& offsets,
                          const std::vector<const LinearWeight*>& maps) {
  const at::Tensor x = x_in.contiguous(), stack = StackOf(maps);
  if (!at::GradMode::is_enabled()) return StackProducts(x, stack, offsets, /*transposed=*/false);
  StackedLinearFunction::Maps of = {.stack = stack, .offsets = offsets, .outs = {}};
  for (const at::Tensor& master : maps.front()->masters()) of.outs.push_back(master.size(0));
  const std::vector<at::Tensor> masters = MastersOf(maps);
  return StackedLinearFunction::apply(x, at::TensorList(masters), of);
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
  return DeviceKernelsOf(x.device()).grouped_linear != nullptr &&
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
