// The sending side of tandem.weights.v1.
#ifndef TANDEM_COMMON_RPC_TRANSFER_WEIGHT_SENDER_H_
#define TANDEM_COMMON_RPC_TRANSFER_WEIGHT_SENDER_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/base/call_scope.h"
#include "common/weights/weight_transfer.h"
#include "tandem/weights/v1/weights.grpc.pb.h"

namespace tandem::rpc {

struct WeightSenderOptions {
  // Attempts since a chunk last arrived: as long as some do, the sender goes on. Between two
  // attempts it waits `backoff`, doubled each time.
  int max_attempts = 5;
  absl::Duration backoff = absl::Milliseconds(200);
  absl::Duration rpc_timeout = absl::Seconds(120);     // of one call
  absl::Duration version_timeout = absl::Seconds(10);  // of the question what is served
  // Whether the receiver takes a version that is not above the one that it serves.
  bool allow_rollback = false;
  CallScope call;  // that the weights are sent for
};

struct SentWeights {
  WeightsVersion weights;  // that the receiver serves now
  // The components that it takes beside the model, with their versions before the update.
  std::map<std::string, WeightsVersion> components = {};
  int64_t bytes = 0;  // of the update; 0 if the receiver served it already
  // How the receiver got the bytes: in messages, in the source's file, or from memory of its GPU.
  enum class Transport { kStream, kFile, kGpu } transport = Transport::kStream;
};

// The wishes of a receiver for a copy of weights.
struct WantedWeights {
  TensorTypes types;
  // Whether it may read memory of a GPU of this process.
  bool reads_gpu_memory = false;
};

// Returns what a receiver wants now. Errors of its GetVersion.
absl::StatusOr<WantedWeights> AskWanted(weights::v1::WeightService::StubInterface& receiver,
                                        const WeightSenderOptions& options = {});

// Sends the weights to one receiver and commits them; blocks. A receiver is sent the components
// that it takes, and one that serves the weights already nothing. Tensors travel in the types that
// it wants, or as float32 where `source` has no other; UNAVAILABLE if `source` has neither, as for
// a receiver that was restarted with another type after its types were asked for. A receiver that
// can open the source's file reads the tensors there. `update_id` names
// the update: reuse it to go on, at the receiver's next chunk, with one that was interrupted.
// Retries UNAVAILABLE, DATA_LOSS of a chunk, and timeouts of a single call; DEADLINE_EXCEEDED or
// CANCELLED as soon as `options.call` is over, and then the update stays open, so that the caller
// can go on with it; after any other error it is aborted. The answer's digest is the one that the
// receiver serves and equals the manifest's; another one is DATA_LOSS. INTERNAL if `source` cannot
// be read.
absl::StatusOr<SentWeights> SendWeights(weights::v1::WeightService::StubInterface& receiver,
                                        const std::string& update_id, const WeightSource& source,
                                        const WeightSenderOptions& options = {});

}  // namespace tandem::rpc

#endif  // TANDEM_COMMON_RPC_TRANSFER_WEIGHT_SENDER_H_
