#include "common/parallel/held_values.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <deque>
#include <optional>
#include <utility>
#include <vector>

#include "common/base/errors/status_macros.h"
#include "common/base/files/file_descriptor.h"
#include "common/parallel/source_values.h"
#include "common/ranks/rank_agreement.h"
#include "common/tensor/aten/catch_torch_errors.h"

namespace tandem::parallel {
namespace {

// Sends under way at a time: a rank goes on to the next parameters while the ranks that want the
// former ones write them to disk.
constexpr size_t kMaxSends = 16;

// Returns the view of a whole parameter that a range of it fills, of the shape of its shard's rows
// if the range is the whole shard, else flat.
at::Tensor ViewOf(const ParameterRange& range, const at::Tensor& whole) {
  if (range.shard.count > 1) return range.shard.Of(whole);
  return whole.view(-1).narrow(0, range.offset, range.numel);
}

// Returns the whole parameter from the values of its holders.
at::Tensor Receive(ranks::Communicator& ranks, const std::vector<Holding>& holdings,
                   const Parameter& parameter, const at::Tensor& own) {
  if (holdings.size() == 1 && holdings[0].rank == ranks.rank()) {
    return own.view(parameter.spec.shape);
  }
  at::Tensor whole = at::empty(parameter.spec.shape, at::device(ranks.device()).dtype(at::kFloat));
  for (const Holding& holding : holdings) {
    const at::Tensor target = ViewOf(holding.range, whole);
    if (holding.rank == ranks.rank()) {
      target.copy_(own.view(target.sizes()));
      continue;
    }
    at::Tensor values =
        target.is_contiguous() ? target : at::empty(target.sizes(), whole.options());
    ranks.Recv(values, holding.rank);
    if (!values.is_same(target)) target.copy_(values);
  }
  return whole;
}

// Calls `visit` with parts of a tensor, in order, whose values make up one transfer each.
void ForEachTransfer(const at::Tensor& tensor,
                     absl::FunctionRef<void(const at::Tensor& rows, int64_t first)> visit) {
  if (tensor.numel() == 0) return;
  const auto row_bytes = static_cast<int64_t>(tensor.nbytes()) / tensor.size(0);
  const int64_t rows =
      std::max<int64_t>(1, static_cast<int64_t>(kTransferBytes) / std::max<int64_t>(1, row_bytes));
  for (int64_t first = 0; first < tensor.size(0); first += rows) {
    const at::Tensor part = tensor.narrow(0, first, std::min(rows, tensor.size(0) - first));
    visit(part, first);
    NoteTransfer(Transfer::kRead, part.nbytes());
  }
}

// A contiguous tensor is flattened, so that long rows are divided, too.
at::Tensor Divisible(const at::Tensor& tensor) {
  if (tensor.is_contiguous()) return tensor.view(-1);
  return tensor;
}

}  // namespace

ParameterRange WholeRange(const Parameter& parameter) {
  return {.parameter = parameter.spec.name,
          .shape = parameter.spec.shape,
          .numel = parameter.spec.numel()};
}

absl::Status VisitParametersOn(Strategy& strategy, absl::FunctionRef<int(const Parameter&)> rank_of,
                               TensorVisitor visit) {
  return CatchTorchErrors("visit of parameters", [&] {
    const at::NoGradGuard no_grad;
    ranks::Communicator& ranks = *strategy.ranks().patient();
    std::deque<std::pair<at::Tensor, ranks::CollectiveHandle>> sends;
    absl::Status status;
    SourceValues source(strategy.model());
    for (const Parameter& parameter : strategy.model().DeclaredParameters()) {
      const int wanted_by = rank_of(parameter);
      if (wanted_by < 0) continue;
      if (strategy.model().IsPacked(parameter)) {
        if (wanted_by != ranks.rank() || !status.ok()) continue;
        status = CatchTorchErrors("visit", [&]() -> absl::Status {
          TANDEM_ASSIGN_OR_RETURN(const at::Tensor whole, source.Of(parameter));
          return visit(parameter.spec.name, whole.to(at::kFloat));
        });
        continue;
      }
      const std::vector<Holding> holdings = strategy.Holdings(parameter, wanted_by);
      const bool holds = std::any_of(holdings.begin(), holdings.end(), [&](const Holding& holding) {
        return holding.rank == ranks.rank();
      });
      const at::Tensor own =
          holds ? strategy.HeldValues(parameter).detach().contiguous() : at::Tensor();
      if (wanted_by == ranks.rank()) {
        const at::Tensor whole = Receive(ranks, holdings, parameter, own);
        if (!status.ok()) continue;
        status = CatchTorchErrors("visit", [&] { return visit(parameter.spec.name, whole); });
      } else if (holds) {
        if (sends.size() == kMaxSends) {
          sends.front().second.Wait();
          sends.pop_front();
        }
        ranks::CollectiveHandle send = ranks.SendAsync(own, wanted_by);
        sends.emplace_back(own, std::move(send));
      }
    }
    for (auto& [values, send] : sends) send.Wait();
    return ranks::Agree(ranks, status);
  });
}

absl::Status Strategy::VisitParameters(TensorVisitor visit) {
  return VisitParametersOn(
      *this, [](const Parameter&) { return 0; }, visit);
}

at::Tensor Strategy::HeldValues(const Parameter& parameter) const {
  return parameter.value.defined() ? parameter.value.detach() : at::Tensor();
}

at::Tensor Strategy::PartOf(const at::Tensor& whole, const Parameter& parameter) const {
  return parameter.value.defined() ? parameter.shard.Of(whole) : at::Tensor();
}

absl::Status Strategy::LoadParameters(const NamedTensors& parameters) {
  return CatchTorchErrors("cannot replace parameters", [&]() -> absl::Status {
    TANDEM_ASSIGN_OR_RETURN(const auto matched, model().Match(parameters));
    for (const auto& [parameter, whole] : matched) {
      if (parameter->packed != nullptr) {
        parameter->CopyFrom(whole);
        NoteTransfer(Transfer::kRead, whole.nbytes());
        continue;
      }
      const at::Tensor part = PartOf(whole, *parameter);
      if (part.defined()) CopyMapped(HeldValues(*parameter), part);
    }
    OnParametersReplaced();
    return absl::OkStatus();
  });
}

void CopyMapped(const at::Tensor& to, const at::Tensor& from) {
  const at::NoGradGuard no_grad;
  const bool flat = to.is_contiguous() && from.is_contiguous();
  const at::Tensor target = flat ? to.view(-1) : to;
  ForEachTransfer(flat ? from.view(-1) : from, [&](const at::Tensor& rows, int64_t first) {
    target.narrow(0, first, rows.size(0)).copy_(rows);
  });
}

bool AllFinite(const at::Tensor& values) {
  bool finite = true;
  ForEachTransfer(Divisible(values), [&](const at::Tensor& rows, int64_t) {
    finite = finite && at::isfinite(rows).all().item<bool>();
  });
  return finite;
}

}  // namespace tandem::parallel
