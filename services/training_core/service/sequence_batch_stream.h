// Streams of sequences to evaluate (ComputeLogProbs, ComputeValues): the engine gets those that
// have come together, so that it can pack them into passes.
#ifndef TANDEM_SERVICES_TRAINING_CORE_SERVICE_SEQUENCE_BATCH_STREAM_H_
#define TANDEM_SERVICES_TRAINING_CORE_SERVICE_SEQUENCE_BATCH_STREAM_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "common/base/errors/error.h"
#include "common/base/errors/status_macros.h"
#include "common/rpc/calls/stream_handlers.h"
#include "common/rpc/metrics/phase_timer.h"
#include "services/training_core/engine.h"
#include "services/training_core/service/training_service.h"

namespace tandem::training {

// `Plain` is the engine's struct for one request, with prompt_token_ids, response_token_ids,
// vision_inputs and blobs; FromProto and ToProto are the functions of the service's convert.h.
template <typename Request, typename Response, typename Plain, typename Result>
class SequenceBatchStream final : public rpc::BatchHandler<Request, Response> {
 public:
  using Convert = absl::StatusOr<Plain> (*)(const Request& request);
  using ConvertBack = Response (*)(const Result& result);
  using Evaluate = std::function<absl::StatusOr<BatchResults<Result>>(
      const CallScope& call, const std::vector<Plain>& batch)>;

  static constexpr size_t kMaxWaiting = 4096;

  // `service` outlives the call.
  SequenceBatchStream(TrainingService& service, Convert from_proto, ConvertBack to_proto,
                      Evaluate evaluate)
      : service_(service),
        from_proto_(from_proto),
        to_proto_(to_proto),
        evaluate_(std::move(evaluate)) {}

  size_t max_waiting() const override { return kMaxWaiting; }

  absl::StatusOr<bool> Add(const Request& request, const CallScope&) override {
    const std::string path = PathOf(static_cast<int64_t>(batch_.size()));
    absl::StatusOr<Plain> plain = from_proto_(request);
    if (!plain.ok()) return PrependFieldPath(path, plain.status());
    TANDEM_RETURN_IF_ERROR(
        PrependFieldPath(path, service_.blobs().Collect(plain->vision_inputs, plain->blobs)));
    num_tokens_ +=
        static_cast<int64_t>(plain->prompt_token_ids.size() + plain->response_token_ids.size());
    batch_.push_back(*std::move(plain));
    return num_tokens_ < service_.options().evaluation_tokens;
  }

  absl::Status Answer(const CallScope& call,
                      absl::FunctionRef<void(const Response&)> push) override {
    const rpc::PhaseTimer timer(service_.metrics(), "evaluate");
    const std::vector<Plain> batch = std::exchange(batch_, {});
    num_tokens_ = 0;
    TANDEM_ASSIGN_OR_RETURN(const BatchResults<Result> answers, evaluate_(call, batch));
    for (const Result& result : answers.results) push(to_proto_(result));
    const auto answered = static_cast<int64_t>(answers.results.size());
    if (answered > 0) service_.metrics().Gauge(rpc::metric::kLastProgress).SetToCurrentTime();
    const std::string path = PathOf(answered);
    num_answered_ += answered;
    return PrependFieldPath(path, answers.error);
  }

 private:
  // Returns the path of request `index` of the batch.
  std::string PathOf(int64_t index) const {
    return absl::StrCat("requests[", num_answered_ + index, "]");
  }

  TrainingService& service_;
  const Convert from_proto_;
  const ConvertBack to_proto_;
  const Evaluate evaluate_;
  std::vector<Plain> batch_;
  int64_t num_tokens_ = 0;    // of the batch
  int64_t num_answered_ = 0;  // before the batch
};

}  // namespace tandem::training

#endif  // TANDEM_SERVICES_TRAINING_CORE_SERVICE_SEQUENCE_BATCH_STREAM_H_
