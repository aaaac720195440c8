// One Generate call: the prompts of its client, and the events that go back.
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
#include "common/rpc/byte_budget.h"
#include "common/rpc/write_queue.h"
#include "services/rollout/engine/engine.h"
#include "tandem/rollout/v1/rollout.pb.h"

namespace tandem::rollout {

struct GenerateStreamOptions {
  // Fills what a prompt's TandemConfig leaves open.
  TandemConfig tandem;
  // Samples that one batch of prompts may ask for, each prompt for one at least.
  int64_t max_batch_samples = 4096;
  absl::Time deadline = absl::InfiniteFuture();
};

// What the engine's listeners, the reactor and the service's ticker share. Thread-safe. Outlives
// the call; after Detach nothing is written any more. It knows no gRPC beyond the write queue.
class GenerateStream : public std::enable_shared_from_this<GenerateStream> {
 public:
  using Outbox = rpc::WriteQueue<v1::GenerateResponse>;

  // Events that may wait for a slow reader before no more prompts are read.
  static constexpr size_t kMaxWaitingEvents = 256;

  // `outbox` and `budget`, of the bytes of batches that are not complete, are used until Detach;
  // `engine` outlives this object's calls.
  GenerateStream(Engine* engine, const GenerateStreamOptions& options, rpc::ByteBudget* budget,
                 Outbox* outbox)
      : engine_(engine), options_(options), budget_(budget), outbox_(outbox) {}

  // A message of the client. Not OK: the whole stream ends with this error, as for a batch of more
  // prompts than max_batch_samples, of which not even a refusal of each is kept. Messages and the
  // half-close come one after the other.
  absl::Status OnMessage(const v1::GenerateRequest& request);

  // The client half-closed: ends the stream when every response is done.
  void OnHalfClose();

  // The client is gone: frees every sequence.
  void OnClientGone();

  // The call is over.
  void Detach();

  // Refuses new prompts and ends the stream once nothing runs.
  void Drain();

  // Sends a heartbeat when nothing was written for `interval`. Frees the sequences of a stream that
  // ended before they were done.
  void Tick(absl::Time now, absl::Duration interval);

  // True while the reactor may read the next message.
  bool WantsMore() const;

  // Sequences that run or wait.
  int64_t unfinished_sequences() const;

 private:
  class Listener;

  // A prompt that is not done.
  struct Pending {
    std::optional<PromptId> id;  // known once the engine has it
    int64_t samples_left = 0;
  };

  // Prompts that are admitted together, or not at all, once the last of their messages is there.
  struct Batch {
    explicit Batch(rpc::ByteBudget& budget) : bytes(budget) {}
    std::vector<std::pair<std::string, PromptRequest>> prompts;  // by the client's request_id
    int64_t num_prompts = 0;                                     // that came, refused ones too
    int64_t samples = 0;
    rpc::ByteBudget::Share bytes;
    absl::Status refused;  // why none of them, nor of those still to come, is taken
  };

  absl::Status Submit(const v1::SubmitPrompts& submit);
  void Collect(const v1::Prompt& prompt);
  void RefuseBatch(const absl::Status& status);
  void AdmitBatch();
  void Cancel(const v1::CancelPrompts& cancel);
  void Fail(const std::string& request_id, const absl::Status& status);

  void OnTokens(const std::string& request_id, const TokensDelta& delta);
  void OnFinished(const std::string& request_id, const Trajectory& trajectory);
  void OnFailed(const std::string& request_id, const absl::Status& status);

  // With mutex_ held.
  void Push(v1::GenerateResponse event);
  void EndIfDone();

  Engine* const engine_;
  const GenerateStreamOptions options_;
  rpc::ByteBudget* const budget_;
  std::unique_ptr<Batch> batch_;  // the one that is being collected; used by the reader alone
  mutable std::mutex mutex_;
  Outbox* outbox_;  // null after Detach
  std::map<std::string, Pending> pending_;
  int64_t unfinished_sequences_ = 0;
  absl::Time last_event_ = absl::Now();
  bool half_closed_ = false;
  bool draining_ = false;
  bool client_gone_ = false;
};

}  // namespace tandem::rollout

#endif  // TANDEM_SERVICES_ROLLOUT_SERVICE_GENERATE_STREAM_H_
