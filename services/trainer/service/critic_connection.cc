#include "services/trainer/service/critic_connection.h"

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/not_finite.h"
#include "common/base/status_macros.h"
#include "common/rpc/float_field.h"
#include "common/rpc/proto_convert.h"

namespace tandem::trainer {
namespace {

// ComputeValuesRequest and ValueSample carry the tokens in the same fields.
template <typename Proto>
void SetTokens(const CriticConnection::Sequence& sequence, Proto* proto) {
  proto->mutable_prompt_token_ids()->Add(sequence.prompt_token_ids.begin(),
                                         sequence.prompt_token_ids.end());
  proto->mutable_response_token_ids()->Add(sequence.response_token_ids.begin(),
                                           sequence.response_token_ids.end());
}

class GrpcCriticConnection final : public CriticConnection {
 public:
  explicit GrpcCriticConnection(std::shared_ptr<const client::CriticClient> client)
      : client_(std::move(client)) {}

  absl::StatusOr<Values> ComputeValues(const Call& call, const Step& step,
                                       const std::vector<Sequence>& sequences) override {
    std::vector<critic::v1::ComputeValuesRequest> requests(sequences.size());
    for (size_t i = 0; i < sequences.size(); ++i) {
      SetTokens(sequences[i], &requests[i]);
      requests[i].mutable_step()->set_run_id(step.run_id);
      requests[i].mutable_step()->set_request_id(step.request_id);
    }
    TANDEM_ASSIGN_OR_RETURN(const auto responses,
                            client_->ComputeValues(call.scope, requests, call.progress));
    Values out;
    for (size_t i = 0; i < responses.size(); ++i) {
      const auto length = static_cast<int64_t>(sequences[i].response_token_ids.size());
      const std::string path = absl::StrCat("responses[", i, "]");
      auto values = rpc::FloatField("values", responses[i].values(), length);
      if (!values.ok()) return BadAnswer(path, values.status());
      auto final_value = rpc::FloatField("final_value", responses[i].final_value(), 1);
      if (!final_value.ok()) return BadAnswer(path, final_value.status());
      out.values.push_back(*std::move(values));
      out.final_values.push_back(final_value->front());
      out.weights = rpc::WeightsVersionFromProto(responses[i].weights());
    }
    return out;
  }

  absl::StatusOr<std::map<std::string, double>> TrainStep(const Call& call,
                                                          const TrainRequest& request) override {
    critic::v1::TrainStepHeader header;
    header.set_run_id(request.step.run_id);
    header.set_step(request.step.step);
    header.set_request_id(request.step.request_id);
    header.set_expected_version(request.expected_version);
    header.set_value_clip(request.value_clip);
    header.set_num_mini_batches(static_cast<int32_t>(request.updates.num_mini_batches));
    header.set_num_epochs(static_cast<int32_t>(request.updates.num_epochs));
    std::vector<critic::v1::ValueSample> samples(request.sequences.size());
    for (size_t i = 0; i < samples.size(); ++i) {
      SetTokens(request.sequences[i], &samples[i]);
      rpc::FloatsToProto(request.old_values[i], samples[i].mutable_old_values());
      rpc::FloatsToProto(request.returns[i], samples[i].mutable_returns());
      if (request.loss_masks.empty()) continue;
      samples[i].mutable_loss_mask()->assign(request.loss_masks[i].begin(),
                                             request.loss_masks[i].end());
    }
    TANDEM_ASSIGN_OR_RETURN(const auto response, client_->TrainStep(call.scope, header, samples));
    call.progress();
    if (response.skipped()) {
      return NotFiniteError(absl::StrCat("the critic skipped it: ", response.skip_reason()));
    }
    return std::map<std::string, double>(response.metrics().begin(), response.metrics().end());
  }

 private:
  // What the critic answered wrongly is not the trainer's caller's fault.
  static absl::Status BadAnswer(const std::string& path, const absl::Status& status) {
    return absl::InternalError(
        absl::StrCat("the critic's answer is malformed: ", path, ".", status.message()));
  }

  const std::shared_ptr<const client::CriticClient> client_;
};

}  // namespace

std::shared_ptr<CriticConnection> MakeCriticConnection(
    std::shared_ptr<const client::CriticClient> client) {
  return std::make_shared<GrpcCriticConnection>(std::move(client));
}

}  // namespace tandem::trainer
