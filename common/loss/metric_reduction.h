// Reports of a loss of which several evaluators have seen a part of the rows each, as on ranks that
// share a batch.
#ifndef TANDEM_COMMON_LOSS_METRIC_REDUCTION_H_
#define TANDEM_COMMON_LOSS_METRIC_REDUCTION_H_

#include <cstdint>
#include <variant>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/types/span.h"

namespace tandem::loss {

// Replaces every number by its sum, or its maximum, over all evaluators. They call it with spans of
// the same lengths.
using MetricReduction =
    absl::FunctionRef<absl::Status(absl::Span<double> sums, absl::Span<double> maxima)>;

// A sum behind a metric. Counts travel as double, which is exact below 2^53.
using MetricSum = std::variant<double*, int64_t*>;

// Calls `reduce` once with what the pointers show, and writes what it leaves there. When it fails,
// nothing changes.
absl::Status ReduceMetrics(MetricReduction reduce, absl::Span<const MetricSum> sums,
                           absl::Span<double* const> maxima);

}  // namespace tandem::loss

#endif  // TANDEM_COMMON_LOSS_METRIC_REDUCTION_H_
