// What ranks tell each other about errors: one of them may have met one that the others have not.
#ifndef TANDEM_COMMON_PARALLEL_RANK_AGREEMENT_H_
#define TANDEM_COMMON_PARALLEL_RANK_AGREEMENT_H_

#include "absl/status/status.h"
#include "common/parallel/communicator.h"

namespace tandem::parallel {

// The same status on every rank: OK if all are, else that of the lowest rank that has an error.
// Collective. Throws c10::Error.
absl::Status Agree(Communicator& ranks, const absl::Status& status);

}  // namespace tandem::parallel

#endif  // TANDEM_COMMON_PARALLEL_RANK_AGREEMENT_H_
