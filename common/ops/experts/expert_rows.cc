#include "common/ops/experts/expert_rows.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>

#include "common/ops/threads/parallel_for.h"
#include "common/tensor/aten/device_copies.h"

namespace tandem::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

// Returns sum_j weights[t, j] outputs[rows[t, j]], for all weights 1 if they are undefined. Rows
// below 0, which there are none of if `is_complete`, do not count.
at::Tensor WeightedSum(const at::Tensor& outputs, const at::Tensor& weights, const at::Tensor& rows,
                       bool is_complete) {
  const int64_t tokens = rows.size(0), choices = rows.size(1), width = outputs.size(1);
  if (!outputs.is_cpu() || outputs.scalar_type() != at::kFloat) {
    at::Tensor sum = at::zeros({tokens, width}, outputs.options().dtype(at::kFloat));
    for (int64_t j = 0; j < choices && outputs.size(0) > 0; ++j) {
      const at::Tensor row = rows.select(1, j);
      at::Tensor chosen =
          outputs.index_select(0, is_complete ? row : row.clamp_min(0)).to(at::kFloat);
      if (!is_complete) chosen.masked_fill_(row.lt(0).unsqueeze(1), 0);
      sum += weights.defined() ? chosen * weights.narrow(1, j, 1) : chosen;
    }
    return sum.to(outputs.scalar_type());
  }
  const at::Tensor from = outputs.contiguous(), order = rows.contiguous();
  const at::Tensor factors = weights.defined() ? weights.contiguous() : weights;
  at::Tensor sum = at::empty({tokens, width}, outputs.options());
  const auto* const input = from.const_data_ptr<float>();
  const auto* const row = order.const_data_ptr<int64_t>();
  const auto* const factor = factors.defined() ? factors.const_data_ptr<float>() : nullptr;
  auto* const output = sum.mutable_data_ptr<float>();
  ParallelFor(tokens, choices * width, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      float* const to = output + t * width;
      std::fill_n(to, width, 0.0f);
      for (int64_t j = t * choices; j < (t + 1) * choices; ++j) {
        if (row[j] < 0) continue;
        const float* const values = input + row[j] * width;
        const float weight = factor != nullptr ? factor[j] : 1.0f;
        for (int64_t i = 0; i < width; ++i) to[i] += weight * values[i];
      }
    }
  });
  return sum;
}

class GatherFunction : public Function<GatherFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& tokens,
                            const at::Tensor& rows, bool is_complete) {
    context->save_for_backward({rows});
    context->saved_data["is_complete"] = is_complete;
    return x.index_select(0, tokens);
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    return {WeightedSum(gradients[0], {}, context->get_saved_variables()[0],
                        context->saved_data["is_complete"].toBool()),
            {},
            {},
            {}};
  }
};

class CombineFunction : public Function<CombineFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& outputs,
                            const at::Tensor& weights, const at::Tensor& tokens,
                            const at::Tensor& rows, bool is_complete) {
    context->save_for_backward({outputs, weights, tokens, rows});
    return WeightedSum(outputs, weights, rows, is_complete);
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &outputs = saved[0], &weights = saved[1], &rows = saved[3];
    const at::Tensor dy = gradients[0].index_select(0, saved[2]).to(at::kFloat);  // [N, H]
    variable_list result(5);
    if (context->needs_input_grad(1)) {
      const at::Tensor products = (outputs.to(at::kFloat) * dy).sum(1);  // [N]
      result[1] = products.index_select(0, rows.flatten()).view(rows.sizes());
    }
    const at::Tensor by_row = at::empty({dy.size(0)}, weights.options());
    by_row.index_copy_(0, rows.flatten(), weights.flatten());
    result[0] = (dy * by_row.unsqueeze(1)).to(outputs.scalar_type());
    return result;
  }
};

}  // namespace

ExpertRows ExpertRows::Of(const at::Tensor& experts, int64_t num_experts) {
  return OfRange(experts, num_experts, 0, num_experts);
}

ExpertRows ExpertRows::OfRange(const at::Tensor& experts, int64_t num_experts, int64_t first,
                               int64_t count) {
  const at::Tensor chosen = experts.to(at::kCPU).contiguous();
  const int64_t num_choices = chosen.numel(), choices = chosen.size(1);
  const auto* const expert = chosen.const_data_ptr<int64_t>();
  const auto in_range = [&](int64_t i) { return expert[i] >= first && expert[i] < first + count; };
  ExpertRows order;
  order.offsets.resize(static_cast<size_t>(count) + 1);
  for (int64_t i = 0; i < num_choices; ++i) {
    TORCH_CHECK_INDEX(expert[i] >= 0 && expert[i] < num_experts, "expert ", expert[i], " of ",
                      num_experts);
    if (in_range(i)) ++order.offsets[static_cast<size_t>(expert[i] - first) + 1];
  }
  for (size_t e = 0; e < static_cast<size_t>(count); ++e) {
    order.offsets[e + 1] += order.offsets[e];
  }
  order.is_complete = order.offsets.back() == num_choices;
  order.tokens = at::empty({order.offsets.back()}, at::kLong);
  order.rows = at::empty(chosen.sizes(), at::kLong);
  std::vector<int64_t> next(order.offsets.begin(), order.offsets.end() - 1);
  auto* const token = order.tokens.mutable_data_ptr<int64_t>();
  auto* const row = order.rows.mutable_data_ptr<int64_t>();
  for (int64_t i = 0; i < num_choices; ++i) {
    row[i] = in_range(i) ? next[static_cast<size_t>(expert[i] - first)]++ : -1;
    if (row[i] >= 0) token[row[i]] = i / choices;
  }
  order.tokens = CopyToDevice(order.tokens, experts.device());
  order.rows = CopyToDevice(order.rows, experts.device());
  return order;
}

ExpertRows ExpertRows::OnDevice(const at::Tensor& experts, int64_t num_experts, int64_t first,
                                int64_t count) {
  ExpertRows order;
  order.is_complete = count == num_experts;
  at::Tensor group = experts.flatten();
  if (!order.is_complete) {
    group = group - first;
    group.masked_fill_(group.lt(0).logical_or_(group.ge(count)), count);
  }
  const auto [sorted, choices] = group.sort(/*stable=*/true, /*dim=*/0, /*descending=*/false);
  order.device_offsets =
      at::searchsorted(sorted, at::arange(count + 1, sorted.options()), /*out_int32=*/true);
  order.tokens = choices.floor_divide(experts.size(1));
  order.rows = at::empty_like(choices);
  order.rows.index_copy_(0, choices, at::arange(choices.numel(), choices.options()));
  if (!order.is_complete) order.rows.masked_fill_(group.eq(count), -1);
  order.rows = order.rows.view(experts.sizes());
  return order;
}

at::Tensor GatherExpertRows(const at::Tensor& x, const ExpertRows& order) {
  return GatherFunction::apply(x, order.tokens, order.rows, order.is_complete);
}

at::Tensor CombineExpertRows(const at::Tensor& outputs, const at::Tensor& weights,
                             const ExpertRows& order) {
  TORCH_CHECK_NOT_IMPLEMENTED(order.is_complete || !at::GradMode::is_enabled() ||
                                  !(outputs.requires_grad() || weights.requires_grad()),
                              "a gradient of the sum of some experts alone");
  return CombineFunction::apply(outputs, weights, order.tokens, order.rows, order.is_complete);
}

}  // namespace tandem::ops
