// One Generate call: the prompts of its client, and the events for it.
#ifndef TANDEM_SERVICES_ROLLOUT_SERVICE_GENERATE_STREAM_H_
#define TANDEM_SERVICES_ROLLOUT_SERVICE_GENERATE_STREAM_H_

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "common/base/steady_time.h"
#include "common/rpc/calls/byte_budget.h"
#include "common/rpc/calls/write_queue.h"
#include "common/rpc/transfer/blob_store.h"
#include "services/rollout/engine/engine.h"
#include "tandem/rollout/v1/rollout.pb.h"

namespace tandem::rollout {

struct GenerateStreamOptions {
  // Defaults for unset fields of a prompt's TandemConfig.
  TandemConfig tandem;
  // Limit for the samples of one batch of prompts; a prompt counts as one at least.
  int64_t max_batch_samples;
  SteadyTime deadline = SteadyTime::InfiniteFuture();
  uint64_t stream = 0;  // see Submission
};

// The state that the engine's listeners, the reactor and the service's ticker share. Thread-safe.
// It outlives the call, and writes nothing after Detach. It knows no gRPC beyond the write queue.
class GenerateStream : public std::enable_shared_from_this<GenerateStream> {
 public:
  using Outbox = rpc::WriteQueue<v1::GenerateResponse>;

  // Number of events that may wait for a slow reader before reading of prompts stops.
  static constexpr size_t kMaxWaitingEvents = 256;

  // `outbox` and `budget`, of the bytes of batches that are not complete, are used until Detach;
  // `engine` and `blobs`, of the prompts' images, outlive this object's calls.
  GenerateStream(Engine* engine, const GenerateStreamOptions& options, rpc::BlobStore* blobs,
                 rpc::ByteBudget* budget, Outbox* outbox)
      : engine_(engine), options_(options), blobs_(blobs), budget_(budget), outbox_(outbox) {}

  // Takes a message of the client. An error ends the whole stream, for example for a batch of more
  // prompts than max_batch_samples. Messages and the half-close come one after the other.
  absl::Status OnMessage(const v1::GenerateRequest& request);

  // Takes the client's half-close: the stream ends when every response is done.
  void OnHalfClose();

  // Takes the end of the client: frees every sequence.
  void OnClientGone();

  // Takes the end of the call.
  void Detach();

  // Refuses new prompts and ends the stream once nothing runs.
  void Drain();

  // Sends a heartbeat if nothing was written for `interval`. Frees the sequences of a stream that
  // ended early.
  void Tick(SteadyTime now, absl::Duration interval);

  // Whether the reactor may read the next message.
  bool WantsMore() const;

  // Returns the number of sequences that run or wait.
  int64_t unfinished_sequences() const;

 private:
  class Listener;

  // A prompt in progress.
  struct Pending {
    std::optional<PromptId> id;  // known once the engine has accepted the prompt
    int64_t samples_left = 0;
  };

  // Prompts that are admitted together, or not at all, when the last of their messages has come.
  struct Batch {
    explicit Batch(rpc::ByteBudget& budget) : bytes(budget) {}
    std::vector<std::pair<std::string, PromptRequest>> prompts;  // by the client's request_id
    int64_t num_prompts = 0;                                     // that have come, refused ones too
    int64_t samples = 0;
    rpc::ByteBudget::Share bytes;
    absl::Status refused;  // why the batch is refused, with its prompts still to come
  };

  absl::Status Submit(const v1::SubmitPrompts& submit);
  void Collect(const v1::Prompt& prompt);
  void RefuseBatch(const absl::Status& status);
  void AdmitBatch();
  void Cancel(const v1::CancelPrompts& cancel);
  void Fail(const std::string& request_id, const absl::Status& status);

  void OnTokens(const std::string& request_id, const TokensDelta& delta);
  void OnFinished(const std::string& request_id, const Trajectory& trajectory,
                  const SampleDrafts& drafts);
  void OnFailed(const std::string& request_id, const absl::Status& status);

  // Called with mutex_ held.
  void Push(v1::GenerateResponse event);
  void EndIfDone();

  Engine* const engine_;
  const GenerateStreamOptions options_;
  rpc::BlobStore* const blobs_;
  rpc::ByteBudget* const budget_;
  std::unique_ptr<Batch> batch_;  // the batch that is being collected; used by the reader alone
  mutable std::mutex mutex_;
  Outbox* outbox_;  // null after Detach
  std::map<std::string, Pending> pending_;
  int64_t unfinished_sequences_ = 0;
  SteadyTime last_event_ = SteadyTime::Now();
  bool half_closed_ = false;
  bool draining_ = false;
  bool client_gone_ = false;
};

}  // namespace tandem::rollout

#endif  // TANDEM_SERVICES_ROLLOUT_SERVICE_GENERATE_STREAM_H_
