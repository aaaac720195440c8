#include "services/rollout/service/convert.h"

#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "common/base/errors/error.h"
#include "common/base/errors/status_macros.h"
#include "common/config/config.h"
#include "common/rpc/calls/error_table.h"
#include "common/rpc/convert/compute_config.h"
#include "common/rpc/convert/proto_convert.h"

namespace tandem::rollout {

namespace {

DType DTypeOf(const std::string& name) {
  return name == "bfloat16" ? DType::kBFloat16 : DType::kFloat32;
}

Quantization QuantizationOf(types::v1::Quantization proto) {
  switch (proto) {
    case types::v1::QUANTIZATION_INT8:
      return Quantization::kInt8;
    case types::v1::QUANTIZATION_INT4:
      return Quantization::kInt4;
    default:
      return Quantization::kNone;
  }
}

absl::StatusOr<SpeculativeMethod> MethodFromProto(v1::SpeculativeMethod method) {
  switch (method) {
    case v1::SPECULATIVE_METHOD_UNSPECIFIED:
    case v1::SPECULATIVE_METHOD_NONE:
      return SpeculativeMethod::kNone;
    case v1::SPECULATIVE_METHOD_NGRAM:
      return SpeculativeMethod::kNgram;
    case v1::SPECULATIVE_METHOD_JUNIOR:
      return SpeculativeMethod::kJunior;
    case v1::SPECULATIVE_METHOD_HEADS:
      return SpeculativeMethod::kHeads;
    default:
      return InvalidField("method", absl::StrCat("unknown value ", static_cast<int>(method)));
  }
}

absl::StatusOr<AcceptanceRule> AcceptanceRuleFromProto(v1::AcceptanceRule rule) {
  switch (rule) {
    case v1::ACCEPTANCE_RULE_UNSPECIFIED:
    case v1::ACCEPTANCE_RULE_EXACT:
      return AcceptanceRule::kExact;
    case v1::ACCEPTANCE_RULE_REJECTION_SAMPLING:
      return AcceptanceRule::kRejectionSampling;
    default:
      return InvalidField("acceptance_rule",
                          absl::StrCat("unknown value ", static_cast<int>(rule)));
  }
}

absl::StatusOr<SpeculativeParams> SpeculativeFromProto(const v1::SpeculativeConfig& proto) {
  SpeculativeParams params;
  TANDEM_ASSIGN_OR_RETURN(params.method, MethodFromProto(proto.method()));
  TANDEM_ASSIGN_OR_RETURN(params.acceptance_rule, AcceptanceRuleFromProto(proto.acceptance_rule()));
  if (proto.has_num_speculative_tokens()) {
    params.num_speculative_tokens = proto.num_speculative_tokens();
  }
  if (proto.has_prompt_lookup_min()) params.prompt_lookup_min = proto.prompt_lookup_min();
  if (proto.has_prompt_lookup_max()) params.prompt_lookup_max = proto.prompt_lookup_max();
  return params;
}

// Options of a lane, which name no model for a junior that there is not.
LaneOptions ToLaneOptions(const config::v1::LaneConfig& lane) {
  return {.model = lane.model(),
          .dtype = DTypeOf(lane.dtype()),
          .quantization = QuantizationOf(lane.quantization()),
          .max_model_len = lane.max_model_len(),
          .model_revision = lane.model_revision(),
          .lora = rpc::ToLoraOptions(lane.lora()),
          .gpu_memory_utilization = lane.has_gpu_memory_utilization()
                                        ? std::optional(lane.gpu_memory_utilization())
                                        : std::nullopt,
          .activation_dtype = DTypeOf(lane.activation_dtype()),
          .enforce_eager = lane.enforce_eager()};
}

}  // namespace

EngineOptions ToEngineOptions(const config::v1::RolloutServerConfig& config,
                              const RankEnvironment& environment) {
  ComputeOptions compute = rpc::ToComputeOptions(config.compute());
  compute.local_rank = environment.local_rank;
  compute.local_world_size = environment.local_world_size;
  config::v1::RolloutServerConfig alike = config;
  alike.clear_server();  // may differ between ranks
  const config::v1::LaneConfig& senior = config.senior();
  const config::v1::LaneConfig& junior = config.junior();
  return {
      .senior = ToLaneOptions(senior),
      .junior = ToLaneOptions(junior),
      .senior_speculator = senior.speculator(),
      // Cannot fail: resolving has checked the strategy.
      .tandem = rpc::TandemConfigFromProto(config.tandem(), TandemConfig{}).value(),
      .max_num_seqs = config.max_num_seqs(),
      .max_batched_tokens = config.max_batched_tokens(),
      .max_queue = config.max_queue(),
      .on_weight_update = config.on_weight_update() == config::v1::ON_WEIGHT_UPDATE_KEEP
                              ? OnWeightUpdate::kKeep
                              : OnWeightUpdate::kRecompute,
      .allow_not_finite_weights = config.allow_not_finite_weights(),
      .compute = std::move(compute),
      .rank_timeouts = {.collective = absl::Seconds(config.collective_timeout_seconds()),
                        .silence = absl::Seconds(config.heartbeat_timeout_seconds())},
      .layout = {.tensor_parallel_size = senior.tensor_parallel_size(),
                 .junior_tensor_parallel_size = junior.tensor_parallel_size(),
                 .junior_gpu_devices = {junior.gpu_devices().begin(), junior.gpu_devices().end()},
                 .enable_expert_parallel = senior.enable_expert_parallel(),
                 .junior_enable_expert_parallel = junior.enable_expert_parallel()},
      .environment = environment,
      .kv_cache_bytes = config.kv_cache_bytes(),
      .kv_cache_dtype = config.kv_cache_dtype().empty()
                            ? std::nullopt
                            : std::optional(DTypeOf(config.kv_cache_dtype())),
      .blob_cache_bytes = config.server().blob_cache_bytes(),
      .configuration = config::ToYaml(alike)};
}

absl::StatusOr<PromptRequest> PromptFromProto(const v1::Prompt& prompt,
                                              const TandemConfig& defaults) {
  PromptRequest request;
  request.prompt_token_ids.assign(prompt.prompt_token_ids().begin(),
                                  prompt.prompt_token_ids().end());
  if (!prompt.has_sampling()) return InvalidField("sampling", "is required");
  absl::StatusOr<SamplingParams> sampling = rpc::SamplingParamsFromProto(prompt.sampling());
  if (!sampling.ok()) return PrependFieldPath("sampling", sampling.status());
  request.sampling = *std::move(sampling);
  absl::StatusOr<TandemConfig> tandem = rpc::TandemConfigFromProto(prompt.tandem(), defaults);
  if (!tandem.ok()) return PrependFieldPath("tandem", tandem.status());
  request.tandem = *std::move(tandem);
  request.seed = prompt.seed();
  if (prompt.num_samples() < 0) {
    return InvalidField("num_samples",
                        absl::StrCat("must not be negative, got ", prompt.num_samples()));
  }
  request.num_samples = prompt.num_samples() == 0 ? 1 : prompt.num_samples();
  request.first_sample_index = prompt.first_sample_index();
  request.num_top_logprobs = prompt.num_top_logprobs();
  const v1::ResponseSoFar& response = prompt.response();
  request.response_token_ids.assign(response.token_ids().begin(), response.token_ids().end());
  TANDEM_ASSIGN_OR_RETURN(
      request.response_authors,
      rpc::AuthorsFromProto("response.authorship_mask", response.authorship_mask()));
  request.return_other_logprobs = prompt.return_other_logprobs();
  request.return_routed_experts = prompt.return_routed_experts();
  request.stream_tokens = prompt.stream_tokens();
  request.priority = prompt.priority();
  absl::StatusOr<SpeculativeParams> speculative = SpeculativeFromProto(prompt.speculative());
  if (!speculative.ok()) return PrependFieldPath("speculative", speculative.status());
  request.speculative = *speculative;
  TANDEM_ASSIGN_OR_RETURN(request.vision_inputs,
                          rpc::VisionInputsFromProto(prompt.vision_inputs()));
  return request;
}

v1::GenerateResponse TokensToProto(const std::string& request_id, const TokensDelta& delta) {
  v1::GenerateResponse response;
  v1::TokensEvent* event = response.mutable_tokens();
  event->set_request_id(request_id);
  event->set_sample_index(delta.sample_index);
  event->set_offset(static_cast<int32_t>(delta.offset));
  event->mutable_token_ids()->Add(delta.token_ids.begin(), delta.token_ids.end());
  event->set_authorship_mask(delta.authorship_mask.data(), delta.authorship_mask.size());
  return response;
}

v1::GenerateResponse FinishedToProto(const std::string& request_id, const Trajectory& trajectory,
                                     const SampleDrafts& drafts) {
  v1::GenerateResponse response;
  v1::FinishedEvent* event = response.mutable_finished();
  event->set_request_id(request_id);
  rpc::TrajectoryToProto(trajectory, event->mutable_trajectory());
  event->mutable_trajectory()->set_accepted_draft_mask(drafts.accepted_mask.data(),
                                                       drafts.accepted_mask.size());
  event->set_draft_tokens(static_cast<int32_t>(drafts.counts.drafted));
  event->set_accepted_draft_tokens(static_cast<int32_t>(drafts.counts.accepted));
  return response;
}

v1::GenerateResponse FailedToProto(const std::string& request_id, const absl::Status& status) {
  v1::GenerateResponse response;
  response.mutable_failed()->set_request_id(request_id);
  *response.mutable_failed()->mutable_status() = rpc::ToRpcStatus(status);
  return response;
}

absl::StatusOr<ScoreRequest> ScoreFromProto(const v1::ScoreRequest& proto) {
  ScoreRequest request;
  request.senior = proto.senior();
  request.junior = proto.junior();
  if (proto.has_temperature()) request.temperature = proto.temperature();
  request.num_top_logprobs = proto.num_top_logprobs();
  for (const v1::ScoreSequence& sequence : proto.sequences()) {
    auto images = rpc::VisionInputsFromProto(sequence.vision_inputs());
    if (!images.ok()) {
      return PrependFieldPath(absl::StrCat("sequences[", request.sequences.size(), "]"),
                              images.status());
    }
    request.sequences.push_back({{sequence.token_ids().begin(), sequence.token_ids().end()},
                                 sequence.first_scored_token(),
                                 *std::move(images)});
  }
  return request;
}

v1::ScoreResponse ScoreToProto(const ScoreResult& result) {
  v1::ScoreResponse response;
  rpc::WeightsVersionToProto(result.weights, response.mutable_weights());
  for (const SequenceScores& scores : result.sequences) {
    v1::SequenceScores* out = response.add_sequences();
    if (!scores.senior_logprobs.empty()) {
      rpc::FloatsToProto(scores.senior_logprobs, out->mutable_senior_logprobs());
    }
    if (!scores.junior_logprobs.empty()) {
      rpc::FloatsToProto(scores.junior_logprobs, out->mutable_junior_logprobs());
    }
    if (scores.senior_top_tokens.count > 0) {
      rpc::TopTokensToProto(scores.senior_top_tokens, out->mutable_senior_top_token_ids(),
                            out->mutable_senior_top_logprobs());
    }
    if (scores.junior_top_tokens.count > 0) {
      rpc::TopTokensToProto(scores.junior_top_tokens, out->mutable_junior_top_token_ids(),
                            out->mutable_junior_top_logprobs());
    }
  }
  return response;
}

void InfoToProto(const EngineInfo& info, const TandemConfig& defaults,
                 const WeightsVersion& weights, bool paused, v1::GetServerInfoResponse* response) {
  types::v1::ServerInfo* server = response->mutable_server();
  rpc::WeightsVersionToProto(weights, server->mutable_weights());
  rpc::ModelSummaryToProto(info.senior, server->mutable_model());
  if (info.junior.has_value()) rpc::ModelSummaryToProto(*info.junior, response->mutable_junior());
  response->set_junior_version(info.junior_version);
  rpc::TandemConfigToProto(defaults, response->mutable_tandem());
  response->set_max_num_seqs(static_cast<int32_t>(info.max_num_seqs));
  response->mutable_sentence_boundary_token_ids()->Add(info.sentence_boundary_token_ids.begin(),
                                                       info.sentence_boundary_token_ids.end());
  response->mutable_word_boundary_token_ids()->Add(info.word_boundary_token_ids.begin(),
                                                   info.word_boundary_token_ids.end());
  response->set_paused(paused);
  response->set_speculator_heads(static_cast<int32_t>(info.speculator_heads));
}

}  // namespace tandem::rollout
