#include "common/loss/metric_reduction.h"

#include <cstddef>
#include <type_traits>
#include <vector>

#include "common/base/errors/status_macros.h"

namespace tandem::loss {

absl::Status ReduceMetrics(MetricReduction reduce, absl::Span<const MetricSum> sums,
                           absl::Span<double* const> maxima) {
  std::vector<double> summed, largest;
  for (const MetricSum& sum : sums) {
    summed.push_back(std::visit([](const auto* x) { return static_cast<double>(*x); }, sum));
  }
  for (const double* maximum : maxima) largest.push_back(*maximum);
  TANDEM_RETURN_IF_ERROR(reduce(absl::MakeSpan(summed), absl::MakeSpan(largest)));
  for (size_t i = 0; i < sums.size(); ++i) {
    std::visit([&](auto* x) { *x = static_cast<std::remove_pointer_t<decltype(x)>>(summed[i]); },
               sums[i]);
  }
  for (size_t i = 0; i < maxima.size(); ++i) *maxima[i] = largest[i];
  return absl::OkStatus();
}

}  // namespace tandem::loss
