// For tests that hold a layout to what it may communicate.
#ifndef TANDEM_COMMON_RANKS_TESTING_COUNTED_COMMUNICATION_H_
#define TANDEM_COMMON_RANKS_TESTING_COUNTED_COMMUNICATION_H_

#include "absl/functional/function_ref.h"
#include "common/ranks/communicator.h"

namespace tandem::ranks {

// Returns the calls and bytes of each kind of collective that this rank takes part in while `body`
// runs, in the outermost group of `ranks` and in all groups split off from it.
inline CommunicationVolume Communicated(const Communicator& ranks, absl::FunctionRef<void()> body) {
  const CommunicationVolume before = ranks.total_volume();
  body();
  CommunicationVolume during = ranks.total_volume();
  during -= before;
  return during;
}

}  // namespace tandem::ranks

#endif  // TANDEM_COMMON_RANKS_TESTING_COUNTED_COMMUNICATION_H_
