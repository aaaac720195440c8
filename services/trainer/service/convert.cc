#include "services/trainer/service/convert.h"

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/errors/error.h"
#include "common/base/errors/field_check.h"
#include "common/base/errors/status_macros.h"
#include "common/rpc/convert/float_field.h"
#include "common/rpc/convert/proto_convert.h"
#include "services/trainer/service/objective_convert.h"
#include "services/training_core/service/step_header.h"
#include "services/training_core/service/token_fields.h"

namespace tandem::trainer {
namespace {

absl::StatusOr<Trajectory> TrajectoryFromProto(const types::v1::Trajectory& proto) {
  TANDEM_ASSIGN_OR_RETURN(Trajectory out, rpc::TrajectoryFromProto(proto));
  TANDEM_RETURN_IF_ERROR(CheckFinite("author_logprobs", out.author_logprobs));
  TANDEM_RETURN_IF_ERROR(CheckFinite("other_logprobs", out.other_logprobs));
  TANDEM_RETURN_IF_ERROR(CheckFinite("log_keep_mass", out.log_keep_mass));
  return out;
}

absl::StatusOr<OptimizerOverrides> FromProto(const v1::OptimizerOverrides& proto) {
  OptimizerOverrides out;
  if (proto.has_learning_rate()) {
    TANDEM_RETURN_IF_ERROR(CheckInRange("learning_rate", proto.learning_rate(), 0, 10));
    out.learning_rate = proto.learning_rate();
  }
  if (proto.has_beta1()) {
    TANDEM_RETURN_IF_ERROR(CheckBelow("beta1", proto.beta1(), 0, 1));
    out.beta1 = proto.beta1();
  }
  if (proto.has_beta2()) {
    TANDEM_RETURN_IF_ERROR(CheckBelow("beta2", proto.beta2(), 0, 1));
    out.beta2 = proto.beta2();
  }
  if (proto.has_epsilon()) {
    TANDEM_RETURN_IF_ERROR(CheckAbove("epsilon", proto.epsilon(), 0));
    out.epsilon = proto.epsilon();
  }
  if (proto.has_weight_decay()) {
    TANDEM_RETURN_IF_ERROR(CheckAtLeast("weight_decay", proto.weight_decay(), 0));
    out.weight_decay = proto.weight_decay();
  }
  if (proto.has_max_grad_norm()) {
    TANDEM_RETURN_IF_ERROR(CheckAtLeast("max_grad_norm", proto.max_grad_norm(), 0));
    out.max_grad_norm = proto.max_grad_norm();
  }
  return out;
}

absl::StatusOr<SupervisedObjective> Checked(SupervisedObjective objective,
                                            const ObjectiveSupport& support) {
  TANDEM_RETURN_IF_ERROR(CheckSupervisedObjective(objective, support));
  return objective;
}

// Reads the rows of a tensor [length, width] into `values`, and returns its width.
template <typename T>
absl::StatusOr<int64_t> TokenRows(const std::string& path, const types::v1::Tensor& tensor,
                                  types::v1::DataType dtype, int64_t length,
                                  std::vector<T>& values) {
  if (tensor.dtype() != dtype) {
    return InvalidField(path + ".dtype",
                        absl::StrCat("must be ", types::v1::DataType_Name(dtype), ", got ",
                                     types::v1::DataType_Name(tensor.dtype())));
  }
  if (tensor.shape_size() != 2 || tensor.shape(0) != length || tensor.shape(1) < 1) {
    return InvalidField(path + ".shape", absl::StrCat("must be [", length, ", top_k]"));
  }
  const int64_t width = tensor.shape(1);
  const auto bytes = static_cast<int64_t>(tensor.data().size());
  const int64_t column_bytes = length * static_cast<int64_t>(sizeof(T));
  if (bytes % column_bytes != 0 || bytes / column_bytes != width) {
    return InvalidField(path + ".data",
                        absl::StrCat("must hold ", width, " numbers for each token"));
  }
  values.resize(tensor.data().size() / sizeof(T));
  std::memcpy(values.data(), tensor.data().data(), tensor.data().size());
  return width;
}

// Reads what a teacher says of `length` tokens.
absl::StatusOr<TeacherTokens> FromProto(const v1::TeacherTokens& proto, int64_t length) {
  TeacherTokens out{.name = proto.name(), .top_tokens = {}};
  if (!proto.has_top_token_ids() && !proto.has_top_logprobs()) return out;
  TANDEM_ASSIGN_OR_RETURN(out.top_tokens.count,
                          TokenRows("top_token_ids", proto.top_token_ids(),
                                    types::v1::DATA_TYPE_INT32, length, out.top_tokens.ids));
  TANDEM_ASSIGN_OR_RETURN(const int64_t width,
                          TokenRows("top_logprobs", proto.top_logprobs(),
                                    types::v1::DATA_TYPE_FLOAT32, length, out.top_tokens.logprobs));
  if (width != out.top_tokens.count) {
    return InvalidField("top_logprobs.shape", "must be that of top_token_ids");
  }
  TANDEM_RETURN_IF_ERROR(CheckFinite("top_logprobs", out.top_tokens.logprobs));
  return out;
}

// Reads the teacher of a sample, if it has one.
template <typename Proto>
absl::Status CopyTeacher(const Proto& proto, int64_t length, TeacherTokens& teacher) {
  if (!proto.has_teacher()) return absl::OkStatus();
  absl::StatusOr<TeacherTokens> read = FromProto(proto.teacher(), length);
  if (!read.ok()) return PrependFieldPath("teacher", read.status());
  teacher = *std::move(read);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<TrainStepRequest> FromProto(const v1::TrainStepHeader& proto, int64_t max_samples,
                                           const ObjectiveSupport& support) {
  TANDEM_RETURN_IF_ERROR(training::CheckStepHeader(proto, max_samples));
  TrainStepRequest out;
  out.run_id = proto.run_id();
  out.step = proto.step();
  out.request_id = proto.request_id();
  out.expected_version = proto.expected_version();
  out.defer_digest = proto.defer_digest();
  absl::StatusOr<OptimizerOverrides> optimizer = FromProto(proto.optimizer());
  if (!optimizer.ok()) return PrependFieldPath("optimizer", optimizer.status());
  out.optimizer = *optimizer;
  switch (proto.objective_case()) {
    case v1::TrainStepHeader::kPolicy: {
      // The engine checks it again; this check comes before the samples are sent.
      TANDEM_ASSIGN_OR_RETURN(PolicyObjective objective, ResolveObjective(proto.policy(), support));
      out.batch = PolicyBatch{.objective = objective, .samples = {}};
      return out;
    }
    case v1::TrainStepHeader::kSupervised: {
      auto objective = FromProto(proto.supervised());
      // As above.
      if (objective.ok()) objective = Checked(*std::move(objective), support);
      if (!objective.ok()) return PrependFieldPath("supervised", objective.status());
      out.batch = SupervisedBatch{.objective = *std::move(objective), .samples = {}};
      return out;
    }
    case v1::TrainStepHeader::OBJECTIVE_NOT_SET:
      break;
  }
  return InvalidField("objective", "is required: policy or supervised");
}

absl::StatusOr<PolicySample> FromProto(const v1::PolicySample& proto) {
  PolicySample out;
  if (!proto.has_trajectory()) return InvalidField("trajectory", "is required");
  auto trajectory = TrajectoryFromProto(proto.trajectory());
  if (!trajectory.ok()) return PrependFieldPath("trajectory", trajectory.status());
  out.trajectory = *std::move(trajectory);
  out.group_id = proto.group_id();
  if (proto.has_reward()) {
    TANDEM_RETURN_IF_ERROR(CheckFinite("reward", proto.reward()));
    out.reward = proto.reward();
  }
  const auto length = static_cast<int64_t>(out.trajectory.response_token_ids.size());
  if (proto.has_advantages()) {
    TANDEM_ASSIGN_OR_RETURN(out.advantages,
                            rpc::FloatField("advantages", proto.advantages(), length));
  }
  if (proto.has_old_logprobs()) {
    TANDEM_ASSIGN_OR_RETURN(out.old_logprobs,
                            rpc::FloatField("old_logprobs", proto.old_logprobs(), length));
  }
  if (proto.has_reference_logprobs()) {
    TANDEM_ASSIGN_OR_RETURN(
        out.reference_logprobs,
        rpc::FloatField("reference_logprobs", proto.reference_logprobs(), length));
  }
  TANDEM_RETURN_IF_ERROR(CopyTeacher(proto, length, out.teacher));
  return out;
}

absl::StatusOr<SupervisedSample> FromProto(const v1::SupervisedSample& proto) {
  SupervisedSample out;
  TANDEM_RETURN_IF_ERROR(training::CopyTokens(proto, out));
  const auto length = static_cast<int64_t>(out.response_token_ids.size());
  TANDEM_RETURN_IF_ERROR(CopyTeacher(proto, length, out.teacher));
  if (proto.has_weights()) {
    TANDEM_ASSIGN_OR_RETURN(out.weights, rpc::FloatField("weights", proto.weights(), length));
  }
  return out;
}

absl::StatusOr<LogProbsRequest> FromProto(const v1::ComputeLogProbsRequest& proto) {
  LogProbsRequest out;
  TANDEM_RETURN_IF_ERROR(training::CopyTokens(proto, out));
  if (proto.has_temperature()) out.temperature = proto.temperature();
  TANDEM_RETURN_IF_ERROR(CheckAbove("temperature", out.temperature, 0));
  out.reference = proto.reference();
  return out;
}

v1::ComputeLogProbsResponse ToProto(const LogProbsResult& result) {
  v1::ComputeLogProbsResponse proto;
  rpc::FloatsToProto(result.logprobs, proto.mutable_logprobs());
  rpc::FloatsToProto(result.entropies, proto.mutable_entropies());
  if (result.weights != WeightsVersion()) {
    rpc::WeightsVersionToProto(result.weights, proto.mutable_weights());
  }
  return proto;
}

v1::StepReport ToProto(const StepReport& report) {
  v1::StepReport proto;
  proto.set_run_id(report.run_id);
  proto.set_step(report.step);
  rpc::WeightsVersionToProto(report.weights, proto.mutable_weights());
  proto.set_skipped(report.skipped);
  proto.set_skip_reason(report.skip_reason);
  proto.mutable_metrics()->insert(report.metrics.begin(), report.metrics.end());
  return proto;
}

}  // namespace tandem::trainer
