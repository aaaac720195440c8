#include "common/parallel/whole_parameters.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <vector>

#include "common/base/errors/status_macros.h"
#include "common/parallel/held_values.h"
#include "common/parallel/source_values.h"
#include "common/ranks/rank_agreement.h"
#include "common/tensor/aten/catch_torch_errors.h"
#include "common/weights/weights_digest.h"

namespace tandem::parallel {
namespace {

// Adds the values of a range, flat, runs of equal length and distance together.
void AddRange(const ParameterRange& range, const at::Tensor& values, WeightsHasher& hasher) {
  const std::vector<Run> runs = RunsOf(range);
  for (size_t first = 0; first < runs.size();) {
    const int64_t width = runs[first].numel;
    int64_t stride = 0;
    size_t last = first + 1;
    for (; last < runs.size() && runs[last].numel == width; ++last) {
      const int64_t distance = runs[last].in_whole - runs[last - 1].in_whole;
      if (last > first + 1 && distance != stride) break;
      stride = distance;
    }
    const auto rows = static_cast<int64_t>(last - first);
    hasher.AddRows(range.parameter, runs[first].in_whole, stride,
                   values.narrow(0, runs[first].in_range, rows * width).view({rows, width}));
    first = last;
  }
}

}  // namespace

absl::Status UseParametersOn(Strategy& strategy, absl::FunctionRef<int(const Parameter&)> rank_of,
                             absl::FunctionRef<absl::Status(TensorSource parameters)> use) {
  bool visited = false;
  absl::Status status = CatchTorchErrors("use of the parameters", [&] {
    return use([&](TensorVisitor visit) {
      visited = true;
      return VisitParametersOn(strategy, rank_of, visit);
    });
  });
  // This rank visits in any case: the other ranks wait in the visit.
  if (!visited) {
    const absl::Status taken_part = VisitParametersOn(
        strategy, rank_of, [&](const std::string&, const at::Tensor&) { return status; });
    if (status.ok()) status = taken_part;
  }
  return ranks::Agree(*strategy.ranks().patient(), status);
}

absl::Status UseWholeParameters(Strategy& strategy,
                                absl::FunctionRef<bool(const Parameter& parameter)> wanted,
                                absl::FunctionRef<absl::Status(TensorSource parameters)> use) {
  return UseParametersOn(
      strategy, [&](const Parameter& parameter) { return wanted(parameter) ? 0 : -1; },
      [&](TensorSource parameters) {
        return strategy.ranks().rank() == 0 ? use(parameters) : absl::OkStatus();
      });
}

absl::StatusOr<std::string> ParametersDigest(Strategy& strategy, TensorSums& frozen) {
  return CatchTorchErrors("digest of the parameters", [&]() -> absl::StatusOr<std::string> {
    const at::NoGradGuard no_grad;
    std::vector<const Parameter*> parameters;
    for (const Parameter& parameter : strategy.model().DeclaredParameters()) {
      if (parameter.trainable || frozen.empty()) parameters.push_back(&parameter);
    }
    WeightsHasher hasher;
    SourceValues source(strategy.model());
    absl::Status read;
    bool reads_source = false;
    for (size_t i = 0; i < parameters.size(); ++i) {
      // Of ranks that hold the same values, each reads some of the parameters.
      const int reader = static_cast<int>(i % static_cast<size_t>(strategy.ranks().size()));
      if (strategy.model().IsPacked(*parameters[i])) {
        reads_source = true;
        if (reader != strategy.ranks().rank() || !read.ok()) continue;
        const absl::StatusOr<at::Tensor> whole = source.Of(*parameters[i]);
        read = whole.status();
        if (read.ok()) hasher.Add(parameters[i]->spec.name, *whole);
        continue;
      }
      for (const Holding& holding : strategy.Holdings(*parameters[i], reader)) {
        if (holding.rank != strategy.ranks().rank()) continue;
        AddRange(holding.range, strategy.HeldValues(*parameters[i]).detach().reshape(-1), hasher);
      }
    }
    if (reads_source) TANDEM_RETURN_IF_ERROR(ranks::Agree(strategy.ranks(), read));
    const TensorSums& own = hasher.Sums();
    at::Tensor sums = at::empty({static_cast<int64_t>(parameters.size()), 2}, at::kLong);
    int64_t* number = sums.mutable_data_ptr<int64_t>();
    for (const Parameter* const parameter : parameters) {
      const WordSums of_rank = own.Of(parameter->spec.name);
      *number++ = static_cast<int64_t>(of_rank.first);
      *number++ = static_cast<int64_t>(of_rank.second);
    }
    at::Tensor all = sums.to(strategy.ranks().device());
    strategy.ranks().AllReduce(all, ranks::Reduction::kSum);
    sums = all.cpu();
    TensorSums whole = frozen;
    strategy.model().lora().AddTo(whole);
    const int64_t* summed = sums.const_data_ptr<int64_t>();
    for (const Parameter* const parameter : parameters) {
      const WordSums of_parameter = {.first = static_cast<uint64_t>(summed[0]),
                                     .second = static_cast<uint64_t>(summed[1])};
      whole.Add(parameter->spec.name, of_parameter);
      if (!parameter->trainable) frozen.Add(parameter->spec.name, of_parameter);
      summed += 2;
    }
    return whole.Digest();
  });
}

}  // namespace tandem::parallel
