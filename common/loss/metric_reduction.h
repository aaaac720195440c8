// Reduction of the reports of several evaluators, each of which has seen some rows of a batch, as
// on data parallel ranks.
#ifndef TANDEM_COMMON_LOSS_METRIC_REDUCTION_H_
#define TANDEM_COMMON_LOSS_METRIC_REDUCTION_H_

#include <cstdint>
#include <variant>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/types/span.h"

namespace tandem::loss {

// Replaces every number by its sum, or its maximum, over all evaluators, which call it with spans
// of the same lengths.
using MetricReduction =
    absl::FunctionRef<absl::Status(absl::Span<double> sums, absl::Span<double> maxima)>;

// A sum from which a metric is computed. Counts are sent as double, which is exact below 2^53.
using MetricSum = std::variant<double*, int64_t*>;

// Calls `reduce` once with the numbers that the pointers point to, and writes its results there. If
// it fails, nothing changes.
absl::Status ReduceMetrics(MetricReduction reduce, absl::Span<const MetricSum> sums,
                           absl::Span<double* const> maxima);

}  // namespace tandem::loss

#endif  // TANDEM_COMMON_LOSS_METRIC_REDUCTION_H_
