#include "services/critic/service/convert.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/errors/error.h"
#include "common/base/errors/field_check.h"
#include "common/base/errors/status_macros.h"
#include "common/rpc/convert/float_field.h"
#include "common/rpc/convert/proto_convert.h"
#include "common/steps/training_state.h"
#include "services/training_core/service/step_header.h"
#include "services/training_core/service/token_fields.h"

namespace tandem::critic {

absl::StatusOr<TrainStepRequest> FromProto(const v1::TrainStepHeader& proto, int64_t max_samples) {
  TANDEM_RETURN_IF_ERROR(training::CheckStepHeader(proto, max_samples));
  TrainStepRequest out;
  out.run_id = proto.run_id();
  out.step = proto.step();
  out.request_id = proto.request_id();
  out.expected_version = proto.expected_version();
  out.defer_digest = proto.defer_digest();
  if (proto.has_value_clip()) out.value_clip = proto.value_clip();
  TANDEM_RETURN_IF_ERROR(CheckAtLeast("value_clip", out.value_clip, 0));
  if (proto.has_num_mini_batches()) out.updates.num_mini_batches = proto.num_mini_batches();
  if (proto.has_num_epochs()) out.updates.num_epochs = proto.num_epochs();
  TANDEM_RETURN_IF_ERROR(training::CheckUpdateOptions(out.updates));
  return out;
}

absl::StatusOr<ValueSample> FromProto(const v1::ValueSample& proto) {
  ValueSample out;
  TANDEM_RETURN_IF_ERROR(training::CopyTokens(proto, out));
  const auto length = static_cast<int64_t>(out.response_token_ids.size());
  if (proto.has_weights()) {
    for (const auto& [name, is_set] : {std::pair("old_values", proto.has_old_values()),
                                       std::pair("returns", proto.has_returns()),
                                       std::pair("loss_mask", !proto.loss_mask().empty())}) {
      if (is_set) return InvalidField(name, "must not be set with weights");
    }
    TANDEM_ASSIGN_OR_RETURN(out.weights, rpc::FloatField("weights", proto.weights(), length + 1));
    return out;
  }
  if (!proto.has_old_values()) return InvalidField("old_values", "is required");
  if (!proto.has_returns()) return InvalidField("returns", "is required");
  TANDEM_ASSIGN_OR_RETURN(out.old_values,
                          rpc::FloatField("old_values", proto.old_values(), length));
  TANDEM_ASSIGN_OR_RETURN(out.returns, rpc::FloatField("returns", proto.returns(), length));
  if (!proto.loss_mask().empty() && static_cast<int64_t>(proto.loss_mask().size()) != length) {
    return InvalidField("loss_mask", absl::StrCat("has ", proto.loss_mask().size(), " entries for ",
                                                  length, " response tokens"));
  }
  for (size_t i = 0; i < proto.loss_mask().size(); ++i) {
    const auto value = static_cast<uint8_t>(proto.loss_mask()[i]);
    if (value > 1) {
      return InvalidField(absl::StrCat("loss_mask[", i, "]"),
                          absl::StrCat("must be 0 or 1, got ", static_cast<int>(value)));
    }
    out.loss_mask.push_back(value);
  }
  return out;
}

absl::StatusOr<ValuesRequest> FromProto(const v1::ComputeValuesRequest& proto) {
  ValuesRequest out;
  TANDEM_RETURN_IF_ERROR(training::CopyTokens(proto, out));
  if (proto.has_step()) {
    TANDEM_RETURN_IF_ERROR(PrependFieldPath(
        "step", training::CheckStepNames(proto.step().run_id(), proto.step().request_id())));
    out.run_id = proto.step().run_id();
    out.request_id = proto.step().request_id();
  }
  return out;
}

v1::ComputeValuesResponse ToProto(const ValuesResult& result) {
  v1::ComputeValuesResponse proto;
  rpc::FloatsToProto(result.values, proto.mutable_values());
  rpc::FloatsToProto({&result.final_value, 1}, proto.mutable_final_value());
  rpc::WeightsVersionToProto(result.weights, proto.mutable_weights());
  return proto;
}

v1::TrainStepResponse ToProto(const StepResult& result) {
  const StepReport& report = result.report;
  v1::TrainStepResponse proto;
  proto.set_step(report.step);
  rpc::WeightsVersionToProto(report.weights, proto.mutable_weights());
  proto.mutable_metrics()->insert(report.metrics.begin(), report.metrics.end());
  proto.set_replayed(result.replayed);
  proto.set_skipped(report.skipped);
  proto.set_skip_reason(report.skip_reason);
  return proto;
}

}  // namespace tandem::critic
