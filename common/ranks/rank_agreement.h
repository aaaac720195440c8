// Agreement among ranks: one status, one result, or one sum on all of them, where at first only
// some ranks know it.
#ifndef TANDEM_COMMON_RANKS_RANK_AGREEMENT_H_
#define TANDEM_COMMON_RANKS_RANK_AGREEMENT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/base/errors/status_macros.h"
#include "common/base/struct_bytes.h"
#include "common/ranks/communicator.h"

namespace tandem::ranks {

// Returns the same status on every rank: OK if all are, else the error of the lowest rank that has
// one. Collective. Throws c10::Error.
absl::Status Agree(Communicator& ranks, const absl::Status& status);

// As Agree; the message of an error begins with its rank, "rank 2: ", unless that is rank 0.
absl::Status AgreeByName(Communicator& ranks, const absl::Status& status);

// Calls `compute` on rank 0 alone, and returns its bytes or its error on every rank. Collective.
// Throws c10::Error.
absl::StatusOr<std::string> BytesFromRankZero(
    Communicator& ranks, absl::FunctionRef<absl::StatusOr<std::string>()> compute);

// As BytesFromRankZero, for a struct (common/base/struct_bytes.h).
template <typename T>
absl::StatusOr<T> FromRankZero(Communicator& ranks,
                               absl::FunctionRef<absl::StatusOr<T>()> compute) {
  if (ranks.size() == 1) return compute();
  TANDEM_ASSIGN_OR_RETURN(const std::string bytes,
                          BytesFromRankZero(ranks, [&]() -> absl::StatusOr<std::string> {
                            TANDEM_ASSIGN_OR_RETURN(const T value, compute());
                            return ToBytes(value);
                          }));
  return FromBytes<T>(bytes);
}

// Returns the struct of every rank, in their order. Collective. Throws c10::Error.
template <typename T>
absl::StatusOr<std::vector<T>> GatherStructs(Communicator& ranks, const T& own) {
  std::vector<T> all;
  for (const std::string& bytes : ranks.AllGatherBytes(ToBytes(own))) {
    TANDEM_ASSIGN_OR_RETURN(all.emplace_back(), FromBytes<T>(bytes));
  }
  return all;
}

// Replaces outputs[i] by that of rank owner(i), on every rank; or returns the error of the lowest
// rank whose `status` is one. Collective. Throws c10::Error.
absl::Status ExchangeOutputs(Communicator& ranks, const absl::Status& status,
                             absl::FunctionRef<int(int64_t index)> owner,
                             std::vector<std::vector<double>>& outputs);

// Runs compute(i) for i in 0 .. count-1, on rank i modulo their number, and returns all results on
// every rank. Collective. Throws c10::Error where communication fails.
absl::StatusOr<std::vector<std::vector<double>>> ParallelMapOver(
    Communicator& ranks, int64_t count,
    absl::FunctionRef<absl::StatusOr<std::vector<double>>(int64_t index)> compute);

// Replaces every number by its sum or maximum over the ranks. Collective. Throws c10::Error.
void ReduceNumbers(Communicator& ranks, absl::Span<double> numbers, Reduction reduction);

}  // namespace tandem::ranks

#endif  // TANDEM_COMMON_RANKS_RANK_AGREEMENT_H_
