// This process's rank among those of its server, from torchrun's environment variables.
#ifndef TANDEM_COMMON_BASE_MACHINE_RANK_ENVIRONMENT_H_
#define TANDEM_COMMON_BASE_MACHINE_RANK_ENVIRONMENT_H_

#include <string>

#include "absl/status/statusor.h"

namespace tandem {

struct RankEnvironment {
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;        // on this machine: the index of its device
  int local_world_size = 1;  // ranks on this machine, which share its cores
  // Where rank 0 hosts the store of the rendezvous.
  std::string master_addr = "127.0.0.1";
  int master_port = 0;
};

// From RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, LOCAL_WORLD_SIZE (default: WORLD_SIZE, all ranks
// on one machine) and LOCAL_RANK (default: RANK modulo LOCAL_WORLD_SIZE). None of them set: a world
// of one. INVALID_ARGUMENT names the variable that is missing or does not fit.
absl::StatusOr<RankEnvironment> ReadRankEnvironment();

}  // namespace tandem

#endif  // TANDEM_COMMON_BASE_MACHINE_RANK_ENVIRONMENT_H_
