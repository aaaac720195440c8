#include "common/rpc/metrics/metric_names.h"

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace tandem::rpc {

std::string PrometheusName(absl::string_view report_name) {
  std::string name(absl::StripSuffix(report_name, "/total"));
  for (char& c : name) {
    if (c == '/' || c == '-' || c == '.') c = '_';
  }
  return absl::StartsWith(name, "tandem_") ? name : absl::StrCat("tandem_", name);
}

}  // namespace tandem::rpc
