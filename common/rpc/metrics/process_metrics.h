// Memory, processor time and open files of this process, under the names that every Prometheus
// client library gives them.
#ifndef TANDEM_COMMON_RPC_METRICS_PROCESS_METRICS_H_
#define TANDEM_COMMON_RPC_METRICS_PROCESS_METRICS_H_

#include "common/rpc/metrics/metrics.h"

namespace tandem::rpc {

// Reads the numbers from /proc/self and the control group, and sets their metrics. A number that
// the system does not give keeps its last value.
void UpdateProcessMetrics(Metrics& metrics);

}  // namespace tandem::rpc

#endif  // TANDEM_COMMON_RPC_METRICS_PROCESS_METRICS_H_
