// Moments of gRPC and of ours. Both are converted by the time that is left, on gRPC's own steady
// clock: a deadline as std::chrono::system_clock would move with the wall clock.
#ifndef TANDEM_COMMON_RPC_GRPC_TIME_H_
#define TANDEM_COMMON_RPC_GRPC_TIME_H_

#include <grpc/support/time.h>

#include "absl/time/time.h"
#include "common/base/steady_time.h"

namespace tandem::rpc {

inline gpr_timespec ToGrpcTime(SteadyTime time) {
  if (time == SteadyTime::InfiniteFuture()) return gpr_inf_future(GPR_CLOCK_MONOTONIC);
  const int64_t left = absl::ToInt64Nanoseconds(time - SteadyTime::Now());
  return gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC), gpr_time_from_nanos(left, GPR_TIMESPAN));
}

inline SteadyTime FromGrpcTime(gpr_timespec time) {
  if (gpr_time_cmp(time, gpr_inf_future(time.clock_type)) == 0) return SteadyTime::InfiniteFuture();
  const gpr_timespec left = gpr_time_sub(time, gpr_now(time.clock_type));
  return SteadyTime::Now() + absl::Seconds(left.tv_sec) + absl::Nanoseconds(left.tv_nsec);
}

}  // namespace tandem::rpc

#endif  // TANDEM_COMMON_RPC_GRPC_TIME_H_
