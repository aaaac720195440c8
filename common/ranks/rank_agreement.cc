#include "common/ranks/rank_agreement.h"

#include <ATen/ATen.h>

#include <map>
#include <utility>
#include <vector>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "common/tensor/aten/catch_torch_errors.h"

namespace tandem::ranks {
namespace {

struct PlainStatus {
  int code = 0;
  std::string message;
  std::map<std::string, std::string> payloads;
};

struct Answer {
  PlainStatus status;
  std::string bytes;  // if the status is OK
};

PlainStatus ToPlain(const absl::Status& status) {
  PlainStatus plain = {
      .code = status.raw_code(), .message = std::string(status.message()), .payloads = {}};
  status.ForEachPayload([&](absl::string_view url, const absl::Cord& payload) {
    plain.payloads[std::string(url)] = std::string(payload);
  });
  return plain;
}

absl::Status FromPlain(const PlainStatus& plain) {
  absl::Status status(static_cast<absl::StatusCode>(plain.code), plain.message);
  for (const auto& [url, payload] : plain.payloads) status.SetPayload(url, absl::Cord(payload));
  return status;
}

}  // namespace

absl::Status Agree(Communicator& ranks, const absl::Status& status) {
  if (ranks.size() == 1) return status;
  TANDEM_ASSIGN_OR_RETURN(const auto all, GatherStructs(ranks, ToPlain(status)));
  for (const PlainStatus& theirs : all) {
    if (theirs.code != 0) return FromPlain(theirs);
  }
  return absl::OkStatus();
}

absl::Status AgreeByName(Communicator& ranks, const absl::Status& status) {
  if (status.ok() || ranks.rank() == 0) return Agree(ranks, status);
  PlainStatus named = ToPlain(status);
  named.message = absl::StrCat("rank ", ranks.rank(), ": ", named.message);
  return Agree(ranks, FromPlain(named));
}

absl::StatusOr<std::string> BytesFromRankZero(
    Communicator& ranks, absl::FunctionRef<absl::StatusOr<std::string>()> compute) {
  Answer answer;
  if (ranks.rank() == 0) {
    absl::StatusOr<std::string> bytes = CatchTorchErrors("rank 0", compute);
    answer.status = ToPlain(bytes.status());
    if (bytes.ok()) answer.bytes = *std::move(bytes);
  }
  TANDEM_ASSIGN_OR_RETURN(answer, FromBytes<Answer>(ranks.BroadcastBytes(ToBytes(answer), 0)));
  TANDEM_RETURN_IF_ERROR(FromPlain(answer.status));
  return std::move(answer.bytes);
}

absl::Status ExchangeOutputs(Communicator& ranks, const absl::Status& status,
                             absl::FunctionRef<int(int64_t)> owner,
                             std::vector<std::vector<double>>& outputs) {
  TANDEM_RETURN_IF_ERROR(Agree(ranks, status));
  TANDEM_ASSIGN_OR_RETURN(auto of_ranks, GatherStructs(ranks, outputs));
  for (size_t i = 0; i < outputs.size(); ++i) {
    outputs[i] = std::move(of_ranks[static_cast<size_t>(owner(static_cast<int64_t>(i)))][i]);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::vector<double>>> ParallelMapOver(
    Communicator& ranks, int64_t count,
    absl::FunctionRef<absl::StatusOr<std::vector<double>>(int64_t)> compute) {
  std::vector<std::vector<double>> outputs(static_cast<size_t>(count));
  const absl::Status status = CatchTorchErrors("forward", [&]() -> absl::Status {
    for (int64_t i = ranks.rank(); i < count; i += ranks.size()) {
      TANDEM_ASSIGN_OR_RETURN(outputs[static_cast<size_t>(i)], compute(i));
    }
    return absl::OkStatus();
  });
  const auto owner = [&](int64_t i) { return static_cast<int>(i % ranks.size()); };
  TANDEM_RETURN_IF_ERROR(ExchangeOutputs(ranks, status, owner, outputs));
  return outputs;
}

void ReduceNumbers(Communicator& ranks, absl::Span<double> numbers, Reduction reduction) {
  at::Tensor tensor =
      at::from_blob(numbers.data(), {static_cast<int64_t>(numbers.size())}, at::kDouble);
  at::Tensor there = tensor.to(ranks.device());
  ranks.AllReduce(there, reduction);
  tensor.copy_(there);
}

}  // namespace tandem::ranks
