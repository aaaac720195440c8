// What ranks tell each other that not all of them know: errors, numbers, answers from outside.
#ifndef TANDEM_COMMON_PARALLEL_RANK_AGREEMENT_H_
#define TANDEM_COMMON_PARALLEL_RANK_AGREEMENT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/base/status_macros.h"
#include "common/base/struct_bytes.h"
#include "common/parallel/communicator.h"

namespace tandem::parallel {

// The same status on every rank: OK if all are, else that of the lowest rank that has an error.
// Collective. Throws c10::Error.
absl::Status Agree(Communicator& ranks, const absl::Status& status);

// The same; the message begins with the rank, "rank 2: ", unless it is rank 0.
absl::Status AgreeByName(Communicator& ranks, const absl::Status& status);

// The bytes, or the error, that `compute` returns on rank 0; it is not called on the others.
// Collective. Throws c10::Error.
absl::StatusOr<std::string> BytesFromRankZero(
    Communicator& ranks, absl::FunctionRef<absl::StatusOr<std::string>()> compute);

// The same for a struct (common/base/struct_bytes.h).
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

// Gives every rank what the others have computed, or the first error of one: output i is that of
// rank `owner(i)`. Collective. Throws c10::Error.
absl::Status ExchangeOutputs(Communicator& ranks, const absl::Status& status,
                             absl::FunctionRef<int(int64_t index)> owner,
                             std::vector<std::vector<double>>& outputs);

// What `compute` says of 0 .. count-1, on every rank; of i on rank i modulo their number.
// Collective. Throws c10::Error for the communication.
absl::StatusOr<std::vector<std::vector<double>>> ShareOutOver(
    Communicator& ranks, int64_t count,
    absl::FunctionRef<absl::StatusOr<std::vector<double>>(int64_t index)> compute);

// Replaces every number by its sum or maximum over the ranks. Collective. Throws c10::Error.
void ReduceNumbers(Communicator& ranks, absl::Span<double> numbers, Reduction reduction);

}  // namespace tandem::parallel

#endif  // TANDEM_COMMON_PARALLEL_RANK_AGREEMENT_H_
