// The golden list of metrics: every Prometheus name that a Tandem server exports, once. Dashboards,
// alerts and docs/reference/metrics.md use only names from here; tests/watching reads this file.
#ifndef TANDEM_COMMON_RPC_METRICS_METRIC_NAMES_H_
#define TANDEM_COMMON_RPC_METRICS_METRIC_NAMES_H_

#include <array>
#include <string>

#include "absl/strings/string_view.h"

namespace tandem::rpc {

enum class MetricType { kCounter, kGauge, kHistogram };

struct MetricSpec {
  MetricType type;
  const char* name;
  const char* help;
  // Label names, in the order in which label values are given.
  std::array<const char*, 3> labels = {};

  constexpr size_t num_labels() const {
    size_t n = 0;
    while (n < labels.size() && labels[n] != nullptr) ++n;
    return n;
  }
};

namespace metric {

// Every RPC of every server, from the server's interceptor.
inline constexpr MetricSpec kRpcHandled{MetricType::kCounter,
                                        "grpc_server_handled_total",
                                        "Calls that ended, by status code.",
                                        {"grpc_service", "grpc_method", "grpc_code"}};
inline constexpr MetricSpec kRpcSeconds{MetricType::kHistogram,
                                        "grpc_server_handling_seconds",
                                        "Time from the start of a call to its status.",
                                        {"grpc_service", "grpc_method"}};
inline constexpr MetricSpec kRpcLive{MetricType::kGauge,
                                     "grpc_server_live_calls",
                                     "Calls in progress.",
                                     {"grpc_service", "grpc_method"}};

// Every server.
inline constexpr MetricSpec kServerReady{MetricType::kGauge, "tandem_server_ready",
                                         "1 while health answers SERVING, else 0."};
inline constexpr MetricSpec kServerInfo{MetricType::kGauge,
                                        "tandem_server_info",
                                        "Always 1; the labels say what the server is.",
                                        {"role", "version"}};
inline constexpr MetricSpec kServerStart{MetricType::kGauge, "tandem_server_start_time_seconds",
                                         "Unix time at which the process started."};
inline constexpr MetricSpec kConnections{MetricType::kGauge, "tandem_connections",
                                         "Connections of the gRPC port."};
inline constexpr MetricSpec kConnectionsClosed{
    MetricType::kCounter,
    "tandem_connections_closed_total",
    "Connections that the server closed because they exceeded a limit, by limit.",
    {"reason"}};
inline constexpr MetricSpec kAuthDenials{
    MetricType::kCounter,
    "tandem_auth_denials_total",
    "Clients and calls that were rejected because of their TLS (not_tls, certificate_missing, "
    "certificate_refused, handshake_failed) or their token (token_missing, token_unknown, "
    "insufficient_role).",
    {"reason"}};
inline constexpr MetricSpec kCertificateExpiry{
    MetricType::kGauge, "tandem_certificate_expiry_timestamp_seconds",
    "Unix time at which the server's certificate expires; absent without TLS."};
inline constexpr MetricSpec kResidentMemory{MetricType::kGauge, "process_resident_memory_bytes",
                                            "Memory of the process that is in RAM."};
inline constexpr MetricSpec kAvailableMemory{
    MetricType::kGauge, "tandem_available_memory_bytes",
    "Memory that the machine and its control groups still leave for the process."};
inline constexpr MetricSpec kCpuSeconds{MetricType::kCounter, "process_cpu_seconds_total",
                                        "Processor time of all threads, user and system."};
inline constexpr MetricSpec kThreads{MetricType::kGauge, "process_threads",
                                     "Threads of the process."};
inline constexpr MetricSpec kOpenFiles{MetricType::kGauge, "process_open_fds",
                                       "Open file descriptors."};
inline constexpr MetricSpec kServerRank{MetricType::kGauge, "tandem_server_rank",
                                        "Rank of this process among the server's processes."};
inline constexpr MetricSpec kServerRanks{MetricType::kGauge, "tandem_server_ranks",
                                         "Processes of the server."};
inline constexpr MetricSpec kWeightsVersion{MetricType::kGauge, "tandem_weights_version",
                                            "Version of the weights that the server holds."};
inline constexpr MetricSpec kSpeculatorVersion{
    MetricType::kGauge, "tandem_speculator_version",
    "Version of the speculator's weights, with senior.speculator; below tandem_weights_version "
    "if updates contain no speculator."};
inline constexpr MetricSpec kLastProgress{
    MetricType::kGauge, "tandem_last_progress_timestamp_seconds",
    "Unix time of the last forward pass or train step; 0 before the first."};
inline constexpr MetricSpec kCallQueueDepth{MetricType::kGauge, "tandem_call_queue_depth",
                                            "Calls waiting for a worker."};
inline constexpr MetricSpec kCallQueueCapacity{MetricType::kGauge, "tandem_call_queue_capacity",
                                               "Most calls that may wait; more are refused."};
inline constexpr MetricSpec kBlobBytes{
    MetricType::kGauge, "tandem_blob_bytes",
    "Bytes of images and videos that the server holds, including uploads in progress."};
inline constexpr MetricSpec kBlobCapacity{
    MetricType::kGauge, "tandem_blob_capacity_bytes",
    "Bytes of images and videos that the server may hold; 0 if its model takes none."};
inline constexpr MetricSpec kBlobBytesReceived{MetricType::kCounter,
                                               "tandem_blob_bytes_received_total",
                                               "Bytes of images and videos that were uploaded."};
inline constexpr MetricSpec kBlobsDropped{
    MetricType::kCounter, "tandem_blobs_dropped_total",
    "Images and videos that the server dropped to make room for others."};

// Rollout server.
inline constexpr MetricSpec kSequencesRunning{MetricType::kGauge, "tandem_sequences_running",
                                              "Sequences being generated."};
inline constexpr MetricSpec kSequencesWaiting{MetricType::kGauge, "tandem_sequences_waiting",
                                              "Sequences in the queue."};
inline constexpr MetricSpec kQueueCapacity{MetricType::kGauge, "tandem_queue_capacity",
                                           "Most sequences that may wait; more are refused."};
inline constexpr MetricSpec kGenerateStreams{MetricType::kGauge, "tandem_generate_streams",
                                             "Open Generate streams."};
inline constexpr MetricSpec kTokensGenerated{MetricType::kCounter,
                                             "tandem_generated_tokens_total",
                                             "Response tokens, by author (senior or junior).",
                                             {"author"}};
inline constexpr MetricSpec kPromptTokens{
    MetricType::kCounter, "tandem_prompt_tokens_total",
    "Prompt tokens of admitted prompts (samples share them)."};
inline constexpr MetricSpec kHandoffs{MetricType::kCounter, "tandem_handoffs_total",
                                      "Changes of author inside a response."};
inline constexpr MetricSpec kCatchUpTokens{
    MetricType::kCounter,
    "tandem_lane_catch_up_tokens_total",
    "Response tokens of the other author that a lane processed, by lane.",
    {"lane"}};
inline constexpr MetricSpec kDraftTokens{
    MetricType::kCounter,
    "tandem_draft_tokens_total",
    "Drafts of speculative decoding that forward passes verified, by method and position after the "
    "last token (1 to 15).",
    {"method", "position"}};
inline constexpr MetricSpec kAcceptedDraftTokens{
    MetricType::kCounter,
    "tandem_accepted_draft_tokens_total",
    "Accepted drafts, which are response tokens without a forward pass of their own, by method and "
    "position.",
    {"method", "position"}};
inline constexpr MetricSpec kForwardPasses{MetricType::kCounter, "tandem_forward_passes_total",
                                           "Forward passes of either model."};
inline constexpr MetricSpec kKvTokens{
    MetricType::kGauge,
    "tandem_kv_tokens",
    "Tokens that fit the blocks of the KV cache held by sequences, by lane.",
    {"lane"}};
inline constexpr MetricSpec kKvCapacity{MetricType::kGauge, "tandem_kv_capacity_tokens",
                                        "Tokens that the KV cache of the senior can hold."};
inline constexpr MetricSpec kPrefixCacheTokens{
    MetricType::kCounter, "tandem_prefix_cache_hit_tokens_total",
    "Tokens that a lane did not have to process because its KV cache contained them."};
inline constexpr MetricSpec kPreemptions{
    MetricType::kCounter, "tandem_preemptions_total",
    "Preempted sequences, which give up their KV-cache blocks and process their tokens again."};
inline constexpr MetricSpec kPaused{MetricType::kGauge, "tandem_generation_paused",
                                    "1 while generation is paused, else 0."};

// Receivers of weights.
inline constexpr MetricSpec kWeightBytesReceived{MetricType::kCounter,
                                                 "tandem_weight_bytes_received_total",
                                                 "Bytes of weight updates that were accepted, by "
                                                 "transport (stream; of a sender on the same "
                                                 "machine also file, or gpu: its memory).",
                                                 {"transport"}};
inline constexpr MetricSpec kWeightUpdates{MetricType::kCounter,
                                           "tandem_weight_updates_total",
                                           "Weight updates, by result (committed or failed).",
                                           {"result"}};

// Trainer and critic servers.
inline constexpr MetricSpec kTrainSteps{
    MetricType::kCounter,
    "tandem_train_steps_total",
    "Train steps, by result (applied; skipped, not_finite: without an update; replayed; failed).",
    {"result"}};
inline constexpr MetricSpec kOptimizerSteps{MetricType::kGauge, "tandem_optimizer_steps",
                                            "Optimizer updates applied so far."};
inline constexpr MetricSpec kStepSeconds{
    MetricType::kHistogram,
    "tandem_step_seconds",
    "Time of a step, by phase (train, publish, save, load, "
    "export, evaluate; write: of a checkpoint, beside others).",
    {"phase"}};
inline constexpr MetricSpec kTrainedTokens{MetricType::kCounter, "tandem_trained_tokens_total",
                                           "Response tokens of applied train steps."};
inline constexpr MetricSpec kDroppedSamples{
    MetricType::kCounter, "tandem_dropped_samples_total",
    "Samples left out of their train step because they were too old (stale_samples)."};
inline constexpr MetricSpec kCheckpoints{MetricType::kCounter,
                                         "tandem_checkpoints_total",
                                         "Checkpoints, by result (ok, failed).",
                                         {"result"}};
inline constexpr MetricSpec kCheckpointBytes{MetricType::kGauge, "tandem_checkpoint_bytes",
                                             "Size of the last checkpoint."};
inline constexpr MetricSpec kCheckpointTime{
    MetricType::kGauge, "tandem_checkpoint_timestamp_seconds",
    "Unix time of the last checkpoint; 0 before the first."};
inline constexpr MetricSpec kWeightBytesSent{MetricType::kCounter, "tandem_weight_bytes_sent_total",
                                             "Bytes of weight updates that were sent."};
inline constexpr MetricSpec kPublishResults{
    MetricType::kCounter,
    "tandem_weight_publications_total",
    "Publications to one receiver, by result (ok or failed).",
    {"result"}};

inline constexpr MetricSpec kSpeculatorAccuracy{
    MetricType::kGauge,
    "tandem_speculator_accuracy",
    "Fraction of its targets that a head of the speculator would have drafted, in the last step "
    "that trained it.",
    {"head"}};

}  // namespace metric

// Metrics of a step report that become gauges of the last step, by their report name; the
// Prometheus name is PrometheusName(name).
struct ReportMetric {
  const char* name;
  const char* help;
};
inline constexpr ReportMetric kReportMetrics[] = {
    {"reward/mean", "Mean reward of the last step."},
    {"reward/std", "Standard deviation of the rewards of the last step."},
    {"loss/total", "Loss of the last step."},
    {"loss/policy", "Policy part of the loss."},
    {"loss/kl", "KL term of the loss, with its coefficient."},
    {"loss/entropy", "Entropy term of the loss, with its coefficient; negative for a bonus."},
    {"policy/entropy", "Mean entropy of the policy on weighted tokens, nats."},
    {"policy/kl_to_ref", "Mean KL estimate to the reference policy on weighted tokens, nats."},
    {"loss/distillation", "Divergence from the teachers in the loss, with its coefficient."},
    {"distillation/divergence", "Mean divergence from the teachers on weighted tokens, nats."},
    {"distillation/teacher_rest", "Mean mass of the teachers outside of their likeliest tokens."},
    {"distillation/student_rest", "Mean mass of the policy outside of these tokens."},
    {"policy/junior_kl", "Mean KL towards the junior on the tokens that it wrote, nats."},
    {"policy/clip_fraction", "Fraction of weighted tokens whose ratio was clipped."},
    {"policy/ppo_kl", "Mean of old minus new log-probability."},
    {"policy/grad_norm", "Global gradient norm before clipping."},
    {"policy/learning_rate", "Learning rate of the last step."},
    {"router/aux_loss", "Load-balancing loss of the routers, without its coefficient."},
    {"router/z_loss", "Z-loss of the routers, without its coefficient."},
    {"router/max_load_ratio",
     "Load of the most loaded expert of any layer, relative to the mean of its layer."},
    {"mismatch/k1", "Mean of rollout minus trainer log-probability."},
    {"mismatch/k3", "K3 estimate of the KL from rollout to trainer."},
    {"mismatch/effective_sample_size", "Effective fraction of the tokens; 1 without mismatch."},
    {"mismatch/max_abs_logprob_diff", "Largest difference of rollout and trainer log-probability."},
    {"mismatch/masked_fraction", "Fraction of weighted tokens whose policy term was masked."},
    {"tandem/senior_token_fraction", "Fraction of response tokens that the senior wrote."},
    {"tandem/junior_token_fraction", "Fraction of response tokens that the junior wrote."},
    {"tandem/switches_per_seq", "Mean number of changes of author in a response."},
    {"tandem/tokens_per_sent", "Response tokens per sentence."},
    {"tokens/prompt", "Prompt tokens of the last step."},
    {"tokens/response", "Response tokens of the last step."},
    {"critic/loss", "Value loss of the last step."},
    {"critic/clip_fraction", "Fraction of tokens whose value was clipped."},
    {"critic/explained_variance", "Explained variance of the returns."},
    {"critic/grad_norm", "Global gradient norm of the critic before clipping."},
    {"critic/value_mean", "Mean predicted value."},
    {"critic/return_mean", "Mean return of the last step."},
    {"critic/router_aux_loss", "Load-balancing loss of the critic's routers, without coefficient."},
    {"critic/router_z_loss", "Z-loss of the critic's routers, without coefficient."},
    {"critic/router_max_load_ratio",
     "Load of the critic's most loaded expert of any layer, relative to the mean of its layer."},
    {"critic/learning_rate", "Learning rate of the critic in the last step."},
    {"speculator/loss", "Sum over the speculator's heads of their mean cross-entropy, nats."},
    {"speculator/grad_norm", "Gradient norm of the speculator before clipping."},
    {"speculator/learning_rate", "Learning rate of the speculator in the last step."},
};

// "reward/mean" → "tandem_reward_mean"; "tandem/switches_per_seq" → "tandem_switches_per_seq". A
// last part "total" is dropped, since such a name is a counter's: "loss/total" → "tandem_loss".
std::string PrometheusName(absl::string_view report_name);

}  // namespace tandem::rpc

#endif  // TANDEM_COMMON_RPC_METRICS_METRIC_NAMES_H_
