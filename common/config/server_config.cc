#include "common/config/server_config.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>

#include <cstdint>
#include <initializer_list>
#include <limits>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "common/base/errors/error.h"
#include "common/base/errors/field_check.h"
#include "common/base/errors/status_macros.h"
#include "common/base/files/paths/path_check.h"
#include "common/base/machine/host_port.h"
#include "common/coauthoring/tandem_config.h"
#include "common/parallel/strategy_name.h"

namespace tandem::config {
namespace {

using types::v1::SelectionStrategy;

// TANDEM_DEFAULT(options, grpc_port, 7701): sets an optional field that is not set.
#define TANDEM_DEFAULT(message, field, value)                     \
  do {                                                            \
    if (!(message)->has_##field()) (message)->set_##field(value); \
  } while (false)

absl::Status CheckOneOf(absl::string_view path, absl::string_view value,
                        std::initializer_list<absl::string_view> choices) {
  for (const absl::string_view choice : choices) {
    if (value == choice) return absl::OkStatus();
  }
  return InvalidField(
      path, absl::StrCat("must be one of ", absl::StrJoin(choices, ", "), ", got \"", value, "\""));
}

absl::Status CheckPatterns(const google::protobuf::RepeatedPtrField<std::string>& patterns) {
  for (int i = 0; i < patterns.size(); ++i) {
    TANDEM_RETURN_IF_ERROR(CheckGiven(absl::StrCat("freeze[", i, "]"), patterns[i]));
  }
  return absl::OkStatus();
}

absl::Status Resolve(v1::TlsOptions* tls) {
  const bool has_certificate = !tls->certificate_file().empty();
  if (has_certificate && tls->private_key_file().empty()) {
    return InvalidField("server.tls.private_key_file",
                        "is required by server.tls.certificate_file");
  }
  if (!has_certificate && !tls->private_key_file().empty()) {
    return InvalidField("server.tls.certificate_file",
                        "is required by server.tls.private_key_file");
  }
  TANDEM_DEFAULT(tls, require_client_certificate, has_certificate && !tls->ca_file().empty());
  if (tls->require_client_certificate() && (!has_certificate || tls->ca_file().empty())) {
    return InvalidField("server.tls.require_client_certificate",
                        "needs server.tls.certificate_file and server.tls.ca_file");
  }
  return absl::OkStatus();
}

// A server that other machines reach has to know its clients.
absl::Status CheckExposure(const ServerOptions& options) {
  if (options.insecure() || IsLoopbackHost(options.host())) return absl::OkStatus();
  if (options.tls().certificate_file().empty()) {
    return InvalidField("server.host", absl::StrCat(options.host(),
                                                    " is not a loopback address; it needs TLS "
                                                    "(server.tls), or server.insecure: true"));
  }
  if (HasTokens(options.tokens()) || options.tls().require_client_certificate())
    return absl::OkStatus();
  return InvalidField(
      "server.host",
      absl::StrCat(
          options.host(),
          " is not a loopback address, so anyone who can reach it could call the server: set "
          "server.tls.ca_file, server.tokens, or server.insecure: true"));
}

absl::Status Resolve(ServerOptions* options, const DefaultPorts& ports) {
  if (options->host().empty()) options->set_host("127.0.0.1");
  TANDEM_DEFAULT(options, grpc_port, ports.grpc);
  TANDEM_DEFAULT(options, metrics_port, ports.metrics);
  TANDEM_DEFAULT(options, drain_seconds, 30);
  if (options->log_level().empty()) options->set_log_level("info");
  TANDEM_DEFAULT(options, keepalive_seconds, 30);
  TANDEM_DEFAULT(options, keepalive_timeout_seconds, 20);
  TANDEM_DEFAULT(options, default_deadline_seconds, 600);
  TANDEM_DEFAULT(options, blob_cache_bytes, int64_t{1} << 30);

  TANDEM_RETURN_IF_ERROR(Resolve(options->mutable_tls()));
  TANDEM_RETURN_IF_ERROR(CheckExposure(*options));
  if (options->tokens().own_file().empty() && !options->tokens().admin_file().empty()) {
    options->mutable_tokens()->set_own_file(options->tokens().admin_file());
  }
  for (int i = 0; i < options->path_roots_size(); ++i) {
    TANDEM_RETURN_IF_ERROR(
        CheckPath(absl::StrCat("server.path_roots[", i, "]"), options->path_roots(i)));
  }
  TANDEM_RETURN_IF_ERROR(CheckInRange("server.grpc_port", options->grpc_port(), 0, 65535));
  TANDEM_RETURN_IF_ERROR(CheckInRange("server.metrics_port", options->metrics_port(), 0, 65535));
  if (!options->advertised_address().empty()) {
    TANDEM_RETURN_IF_ERROR(
        CheckHostPort("server.advertised_address", options->advertised_address()));
  }
  if (options->grpc_port() != 0 && options->grpc_port() == options->metrics_port()) {
    return InvalidField("server.metrics_port", "must differ from server.grpc_port");
  }
  TANDEM_RETURN_IF_ERROR(
      CheckInRange("server.drain_seconds", options->drain_seconds(), 0.0, 86400.0));
  TANDEM_RETURN_IF_ERROR(
      CheckOneOf("server.log_level", options->log_level(), {"debug", "info", "warning", "error"}));
  TANDEM_RETURN_IF_ERROR(
      CheckInRange("server.keepalive_seconds", options->keepalive_seconds(), 1.0, 86400.0));
  TANDEM_RETURN_IF_ERROR(CheckInRange("server.keepalive_timeout_seconds",
                                      options->keepalive_timeout_seconds(), 1.0, 86400.0));
  TANDEM_RETURN_IF_ERROR(CheckAtLeast("server.blob_cache_bytes", options->blob_cache_bytes(), 1));
  return CheckInRange("server.default_deadline_seconds", options->default_deadline_seconds(), 1e-3,
                      1e7);
}

absl::Status Resolve(v1::ComputeOptions* compute) {
  if (compute->device().empty()) compute->set_device("cpu");
  if (compute->dtype().empty()) compute->set_dtype("float32");
  if (compute->kernels().empty()) compute->set_kernels("auto");
  TANDEM_RETURN_IF_ERROR(CheckOneOf("compute.device", compute->device(), {"cpu", "cuda"}));
  TANDEM_RETURN_IF_ERROR(CheckOneOf("compute.dtype", compute->dtype(), {"float32", "bfloat16"}));
  TANDEM_RETURN_IF_ERROR(CheckOneOf("compute.kernels", compute->kernels(), {"auto", "aten"}));
  TANDEM_DEFAULT(compute, product_rows, 0);
  TANDEM_RETURN_IF_ERROR(CheckInRange("compute.product_rows", compute->product_rows(), 0, 1 << 16));
  if (compute->product_rows() > 0 && compute->device() == "cpu") {
    return InvalidField("compute.product_rows", "does not apply to compute.device cpu");
  }
  TANDEM_DEFAULT(compute, ranks_per_gpu, 1);
  TANDEM_RETURN_IF_ERROR(CheckInRange("compute.ranks_per_gpu", compute->ranks_per_gpu(), 1, 128));
  if (compute->ranks_per_gpu() > 1 && compute->device() == "cpu") {
    return InvalidField("compute.ranks_per_gpu", "does not apply to compute.device cpu");
  }
  return CheckInRange("compute.num_threads", compute->num_threads(), 0, 1024);
}

absl::Status Resolve(types::v1::TandemConfig* config, bool has_junior) {
  const tandem::TandemConfig defaults;  // the rule's own defaults live there
  TANDEM_DEFAULT(config, enabled, has_junior);
  if (config->selection_strategy() == SelectionStrategy::SELECTION_STRATEGY_UNSPECIFIED) {
    config->set_selection_strategy(SelectionStrategy::SELECTION_STRATEGY_BERNOULLI);
  }
  TANDEM_DEFAULT(config, prob_senior, defaults.prob_senior);
  TANDEM_DEFAULT(config, chunk_size, defaults.chunk_size);
  TANDEM_DEFAULT(config, max_gap_tokens, defaults.max_gap_tokens);
  if (config->enabled() && !has_junior) {
    return InvalidField("tandem.enabled", "needs junior.model");
  }
  TANDEM_RETURN_IF_ERROR(CheckInRange("tandem.prob_senior", config->prob_senior(), 0, 1));
  // 0 stands for "not given" and is refused where the strategy reads it.
  const int min_chunk_size =
      config->selection_strategy() == SelectionStrategy::SELECTION_STRATEGY_CHUNK ? 1 : 0;
  TANDEM_RETURN_IF_ERROR(CheckAtLeast("tandem.chunk_size", config->chunk_size(), min_chunk_size));
  TANDEM_RETURN_IF_ERROR(CheckAtLeast("tandem.max_gap_tokens", config->max_gap_tokens(), 1));
  const auto& ids = config->boundary_token_ids();
  // The vocabulary's size is checked once there is one.
  return CheckTokenIds("tandem.boundary_token_ids", std::span(ids.data(), ids.size()),
                       std::numeric_limits<int32_t>::max());
}

absl::Status Resolve(v1::OptimizerOptions* optimizer) {
  TANDEM_DEFAULT(optimizer, learning_rate, 1e-6);
  TANDEM_DEFAULT(optimizer, beta1, 0.9);
  TANDEM_DEFAULT(optimizer, beta2, 0.999);
  TANDEM_DEFAULT(optimizer, epsilon, 1e-8);
  TANDEM_DEFAULT(optimizer, weight_decay, 0);
  TANDEM_DEFAULT(optimizer, max_grad_norm, 1);
  TANDEM_DEFAULT(optimizer, warmup_steps, 0);
  if (optimizer->schedule() == v1::LEARNING_RATE_SCHEDULE_UNSPECIFIED) {
    optimizer->set_schedule(v1::LEARNING_RATE_SCHEDULE_CONSTANT);
  }
  TANDEM_DEFAULT(optimizer, min_learning_rate, 0);

  TANDEM_RETURN_IF_ERROR(
      CheckInRange("optimizer.learning_rate", optimizer->learning_rate(), 0.0, 10.0));
  TANDEM_RETURN_IF_ERROR(CheckBelow("optimizer.beta1", optimizer->beta1(), 0, 1));
  TANDEM_RETURN_IF_ERROR(CheckBelow("optimizer.beta2", optimizer->beta2(), 0, 1));
  TANDEM_RETURN_IF_ERROR(CheckAbove("optimizer.epsilon", optimizer->epsilon(), 0));
  TANDEM_RETURN_IF_ERROR(CheckAtLeast("optimizer.weight_decay", optimizer->weight_decay(), 0));
  TANDEM_RETURN_IF_ERROR(CheckAtLeast("optimizer.max_grad_norm", optimizer->max_grad_norm(), 0));
  TANDEM_RETURN_IF_ERROR(CheckAtLeast("optimizer.warmup_steps", optimizer->warmup_steps(), 0));
  if (optimizer->schedule() != v1::LEARNING_RATE_SCHEDULE_CONSTANT &&
      !optimizer->has_total_steps()) {
    return InvalidField("optimizer.total_steps", "is required by this schedule");
  }
  if (optimizer->has_total_steps()) {
    TANDEM_RETURN_IF_ERROR(CheckAtLeast("optimizer.total_steps", optimizer->total_steps(), 1));
    if (optimizer->schedule() != v1::LEARNING_RATE_SCHEDULE_CONSTANT &&
        optimizer->total_steps() <= optimizer->warmup_steps()) {
      return InvalidField("optimizer.total_steps", "must be above optimizer.warmup_steps");
    }
  }
  return CheckInRange("optimizer.min_learning_rate", optimizer->min_learning_rate(), 0.0,
                      optimizer->learning_rate());
}

absl::Status Resolve(v1::BatchOptions* batch) {
  TANDEM_DEFAULT(batch, micro_batch_tokens, 2048);
  if (batch->loss_impl().empty()) batch->set_loss_impl("auto");
  TANDEM_RETURN_IF_ERROR(CheckAtLeast("batch.micro_batch_tokens", batch->micro_batch_tokens(), 1));
  TANDEM_RETURN_IF_ERROR(CheckAtLeast("batch.logits_chunk_bytes", batch->logits_chunk_bytes(), 0));
  return CheckOneOf("batch.loss_impl", batch->loss_impl(),
                    {"auto", "cce", "torch_compile", "pytorch"});
}

absl::Status CheckSharedPrefixes(const v1::StrategyOptions& strategy,
                                 const v1::ComputeOptions& compute) {
  const auto refuse = [](const std::string& by) {
    return FieldError(absl::StatusCode::kUnimplemented, "batch.shared_prefixes",
                      absl::StrCat(by, " does not support it"));
  };
  if (strategy.context_parallel_size() > 1) return refuse("strategy.context_parallel_size above 1");
  if (compute.device() != "cpu") return refuse(absl::StrCat("compute.device ", compute.device()));
  return absl::OkStatus();
}

// Refuses a field that belongs to another strategy than the named one.
absl::Status CheckStrategyFields(const v1::StrategyOptions& strategy) {
  const google::protobuf::Descriptor& message = *v1::StrategyOptions::descriptor();
  for (int i = 0; i < message.field_count(); ++i) {
    const google::protobuf::FieldDescriptor& field = *message.field(i);
    const std::string& owner = field.options().GetExtension(v1::only_for_strategy);
    if (owner.empty() || owner == strategy.name()) continue;
    if (!strategy.GetReflection()->HasField(strategy, &field)) continue;
    return InvalidField(absl::StrCat("strategy.", field.name()),
                        absl::StrCat("belongs to the strategy ", owner, ", but strategy.name is ",
                                     strategy.name()));
  }
  return absl::OkStatus();
}

absl::Status ResolveZero(v1::StrategyOptions* strategy) {
  constexpr int64_t kBucket = 500'000'000;
  TANDEM_DEFAULT(strategy, stage, 2);
  TANDEM_DEFAULT(strategy, reduce_bucket_size, kBucket);
  TANDEM_DEFAULT(strategy, allgather_bucket_size, kBucket);
  TANDEM_DEFAULT(strategy, overlap_comm, true);
  TANDEM_DEFAULT(strategy, offload_optimizer, false);
  TANDEM_RETURN_IF_ERROR(CheckInRange("strategy.stage", strategy->stage(), 1, 3));
  TANDEM_RETURN_IF_ERROR(
      CheckAtLeast("strategy.reduce_bucket_size", strategy->reduce_bucket_size(), 1));
  return CheckAtLeast("strategy.allgather_bucket_size", strategy->allgather_bucket_size(), 1);
}

// Checks sizes only; the strategy checks whether they fit the model.
absl::Status ResolveMegatron(v1::StrategyOptions* strategy) {
  TANDEM_DEFAULT(strategy, tensor_model_parallel_size, 1);
  TANDEM_DEFAULT(strategy, pipeline_model_parallel_size, 1);
  TANDEM_DEFAULT(strategy, context_parallel_size, 1);
  TANDEM_DEFAULT(strategy, expert_model_parallel_size, 1);
  TANDEM_DEFAULT(strategy, virtual_pipeline_model_parallel_size, 1);
  TANDEM_DEFAULT(strategy, use_distributed_optimizer, true);
  for (const auto& [field, size] :
       {std::pair{"tensor_model_parallel_size", strategy->tensor_model_parallel_size()},
        std::pair{"pipeline_model_parallel_size", strategy->pipeline_model_parallel_size()},
        std::pair{"context_parallel_size", strategy->context_parallel_size()},
        std::pair{"expert_model_parallel_size", strategy->expert_model_parallel_size()},
        std::pair{"virtual_pipeline_model_parallel_size",
                  strategy->virtual_pipeline_model_parallel_size()}}) {
    TANDEM_RETURN_IF_ERROR(CheckInRange(absl::StrCat("strategy.", field), size, 1, 1 << 16));
  }
  return absl::OkStatus();
}

// `prefix` is put before the fields' names in errors.
template <typename Config>
absl::Status ResolveRankTimeouts(absl::string_view prefix, Config* config) {
  TANDEM_DEFAULT(config, heartbeat_timeout_seconds, 15);
  TANDEM_DEFAULT(config, collective_timeout_seconds, 600);
  TANDEM_RETURN_IF_ERROR(CheckInRange(absl::StrCat(prefix, "heartbeat_timeout_seconds"),
                                      config->heartbeat_timeout_seconds(), 1.0, 86400.0));
  return CheckInRange(absl::StrCat(prefix, "collective_timeout_seconds"),
                      config->collective_timeout_seconds(), 1.0, 86400.0);
}

absl::Status Resolve(v1::StrategyOptions* strategy) {
  if (strategy->name().empty()) strategy->set_name("single");
  TANDEM_RETURN_IF_ERROR(CheckStrategyName(strategy->name()));
  TANDEM_RETURN_IF_ERROR(CheckStrategyFields(*strategy));
  if (strategy->name() == "zero") TANDEM_RETURN_IF_ERROR(ResolveZero(strategy));
  if (strategy->name() == "megatron") TANDEM_RETURN_IF_ERROR(ResolveMegatron(strategy));
  if (strategy->recompute_granularity().empty()) strategy->set_recompute_granularity("none");
  TANDEM_RETURN_IF_ERROR(CheckOneOf("strategy.recompute_granularity",
                                    strategy->recompute_granularity(),
                                    {"none", "selective", "full"}));
  return ResolveRankTimeouts("strategy.", strategy);
}

absl::Status ResolveWeightDtype(v1::ComputeOptions* compute) {
  const std::string field = "compute.weight_dtype";
  if (compute->weight_dtype().empty()) compute->set_weight_dtype("float32");
  TANDEM_RETURN_IF_ERROR(CheckOneOf(field, compute->weight_dtype(), {"float32", "bfloat16"}));
  if (compute->weight_dtype() == "float32") return absl::OkStatus();
  for (const auto& [name, value, needed] : {std::tuple{"device", compute->device(), "cpu"},
                                            std::tuple{"dtype", compute->dtype(), "float32"}}) {
    if (value == needed) continue;
    return InvalidField(field, absl::StrCat(compute->weight_dtype(), " needs compute.", name, " ",
                                            needed, ", not ", value));
  }
  return absl::OkStatus();
}

absl::Status ResolveActivationDtype(v1::ComputeOptions* compute,
                                    const v1::StrategyOptions& strategy) {
  const std::string field = "compute.activation_dtype";
  if (compute->activation_dtype().empty()) compute->set_activation_dtype("float32");
  TANDEM_RETURN_IF_ERROR(CheckOneOf(field, compute->activation_dtype(), {"float32", "bfloat16"}));
  if (compute->activation_dtype() == "float32") return absl::OkStatus();
  for (const auto& [name, value, needed] :
       {std::tuple{"weight_dtype", compute->weight_dtype(), "bfloat16"},
        std::tuple{"kernels", compute->kernels(), "auto"}}) {
    if (value == needed) continue;
    return InvalidField(field, absl::StrCat(compute->activation_dtype(), " needs compute.", name,
                                            " ", needed, ", not ", value));
  }
  if (strategy.name() != "zero" || strategy.stage() != 3) return absl::OkStatus();
  return FieldError(absl::StatusCode::kUnimplemented, field,
                    "bfloat16 is not supported with strategy.stage 3 yet");
}

// Resolves the adapters of a configuration that has some; without settings it has none.
template <typename Config>
absl::Status ResolveLora(Config* config) {
  if (config->lora().ByteSizeLong() == 0) config->clear_lora();
  if (!config->has_lora()) return absl::OkStatus();
  v1::LoraOptions* const lora = config->mutable_lora();
  TANDEM_RETURN_IF_ERROR(CheckAtLeast("lora.rank", lora->rank(), 0));
  if (lora->has_alpha()) TANDEM_RETURN_IF_ERROR(CheckAbove("lora.alpha", lora->alpha(), 0));
  if (!lora->path().empty()) return CheckPath("lora.path", lora->path());
  if (lora->rank() == 0) {
    return InvalidField("lora.rank", "is required by the other settings of lora");
  }
  TANDEM_DEFAULT(lora, alpha, 32);
  if (lora->target_modules().empty()) lora->add_target_modules("all-linear");
  return absl::OkStatus();
}

// Resolves the storage of the matrices that the adapters of a configuration do not train.
template <typename Config>
absl::Status ResolveFrozenStorage(Config* config) {
  if (config->dtype().empty()) config->set_dtype("float32");
  TANDEM_RETURN_IF_ERROR(CheckOneOf("dtype", config->dtype(), {"float32", "bfloat16"}));
  if (config->quantization() == types::v1::QUANTIZATION_UNSPECIFIED) {
    config->set_quantization(types::v1::QUANTIZATION_NONE);
  }
  const bool quantised = config->quantization() != types::v1::QUANTIZATION_NONE;
  if (!quantised && config->dtype() == "float32") return absl::OkStatus();
  const std::string field = quantised ? "quantization" : "dtype";
  if (!config->has_lora()) {
    return InvalidField(field, "needs lora: matrices that train are float32");
  }
  const v1::ComputeOptions& compute = config->compute();
  for (const auto& [name, value, needed] :
       {std::tuple{"compute.device", compute.device(), "cpu"},
        std::tuple{"compute.kernels", compute.kernels(), "auto"},
        std::tuple{"compute.dtype", compute.dtype(), "float32"},
        std::tuple{"compute.weight_dtype", compute.weight_dtype(), "float32"}}) {
    if (value == needed) continue;
    return FieldError(absl::StatusCode::kUnimplemented, field,
                      absl::StrCat("stores frozen matrices packed, which needs ", name, " ", needed,
                                   ", not ", value));
  }
  if (config->strategy().name() == "zero" && config->strategy().stage() == 3) {
    return FieldError(absl::StatusCode::kUnimplemented, field,
                      "stores frozen matrices packed, which strategy.stage 3 does not gather; "
                      "stages 1 and 2 keep them whole on every rank");
  }
  return absl::OkStatus();
}

// Resolves the settings that trainer and critic have in common.
template <typename Config>
absl::Status ResolveTraining(Config* config, const DefaultPorts& ports) {
  TANDEM_RETURN_IF_ERROR(Resolve(config->mutable_server(), ports));
  TANDEM_RETURN_IF_ERROR(Resolve(config->mutable_compute()));
  TANDEM_RETURN_IF_ERROR(ResolveWeightDtype(config->mutable_compute()));
  TANDEM_RETURN_IF_ERROR(CheckGiven("model", config->model()));
  TANDEM_RETURN_IF_ERROR(Resolve(config->mutable_optimizer()));
  TANDEM_RETURN_IF_ERROR(Resolve(config->mutable_batch()));
  TANDEM_RETURN_IF_ERROR(Resolve(config->mutable_strategy()));
  TANDEM_RETURN_IF_ERROR(ResolveActivationDtype(config->mutable_compute(), config->strategy()));
  if (config->batch().shared_prefixes()) {
    TANDEM_RETURN_IF_ERROR(CheckSharedPrefixes(config->strategy(), config->compute()));
  }
  TANDEM_RETURN_IF_ERROR(CheckPatterns(config->freeze()));
  TANDEM_RETURN_IF_ERROR(ResolveLora(config));
  if (config->has_lora() && !config->freeze().empty()) {
    return InvalidField("freeze", "must be empty with lora: only its adapters train");
  }
  TANDEM_RETURN_IF_ERROR(ResolveFrozenStorage(config));
  if (!config->shutdown_checkpoint_directory().empty()) {
    TANDEM_RETURN_IF_ERROR(
        CheckPath("shutdown_checkpoint_directory", config->shutdown_checkpoint_directory()));
  }
  TANDEM_DEFAULT(config, max_model_len, 2048);
  TANDEM_DEFAULT(config, max_samples, 4096);
  TANDEM_DEFAULT(config, checkpoint_snapshot, true);
  TANDEM_DEFAULT(config, router_aux_loss_coef, 0);
  TANDEM_DEFAULT(config, router_z_loss_coef, 0);
  TANDEM_RETURN_IF_ERROR(CheckAtLeast("max_model_len", config->max_model_len(), 2));
  TANDEM_RETURN_IF_ERROR(
      CheckInRange("router_aux_loss_coef", config->router_aux_loss_coef(), 0.0, 1000.0));
  TANDEM_RETURN_IF_ERROR(
      CheckInRange("router_z_loss_coef", config->router_z_loss_coef(), 0.0, 1000.0));
  return CheckInRange("max_samples", config->max_samples(), 1, 1 << 20);
}

// Refuses settings of a junior that there is not, unless they are the defaults.
absl::Status CheckNoJuniorSettings(v1::LaneConfig junior) {
  if (junior.tensor_parallel_size() == 1) junior.clear_tensor_parallel_size();
  if (junior.quantization() == types::v1::QUANTIZATION_NONE) junior.clear_quantization();
  if (junior.enforce_eager()) junior.clear_enforce_eager();
  std::vector<const google::protobuf::FieldDescriptor*> set;
  junior.GetReflection()->ListFields(junior, &set);
  if (set.empty()) return absl::OkStatus();
  return InvalidField(absl::StrCat("junior.", set[0]->name()), "needs junior.model");
}

// Checks the number of devices only; the server checks them against its ranks.
absl::Status CheckGpuDevices(const v1::LaneConfig& lane, const v1::ComputeOptions& compute) {
  const auto& devices = lane.gpu_devices();
  if (devices.empty()) return absl::OkStatus();
  if (compute.device() != "cuda") {
    return InvalidField("gpu_devices",
                        absl::StrCat("needs compute.device cuda, not ", compute.device()));
  }
  if (devices.size() != lane.tensor_parallel_size()) {
    return InvalidField("gpu_devices",
                        absl::StrCat("names ", devices.size(), " devices, but the junior has ",
                                     lane.tensor_parallel_size(), " ranks"));
  }
  if (compute.ranks_per_gpu() > 1) {
    return InvalidField("gpu_devices", absl::StrCat("does not go with compute.ranks_per_gpu ",
                                                    compute.ranks_per_gpu()));
  }
  for (int i = 0; i < devices.size(); ++i) {
    TANDEM_RETURN_IF_ERROR(CheckInRange(absl::StrCat("gpu_devices[", i, "]"), devices[i], 0, 127));
  }
  return absl::OkStatus();
}

absl::Status CheckQuantization(const std::string& field, types::v1::Quantization quantization,
                               const v1::ComputeOptions& compute) {
  if (quantization == types::v1::QUANTIZATION_NONE) return absl::OkStatus();
  if (compute.device() != "cpu") {
    return FieldError(absl::StatusCode::kUnimplemented, field,
                      absl::StrCat("compute.device ", compute.device(),
                                   " does not support quantised linear maps; only cpu does"));
  }
  if (compute.kernels() != "auto") {
    return FieldError(absl::StatusCode::kUnimplemented, field,
                      absl::StrCat("compute.kernels ", compute.kernels(),
                                   " does not support quantised linear maps; only auto does"));
  }
  return absl::OkStatus();
}

absl::Status CheckMemoryUtilization(const std::string& field, double fraction,
                                    const v1::ComputeOptions& compute) {
  TANDEM_RETURN_IF_ERROR(CheckInRange(field, fraction, 0.0, 1.0));
  TANDEM_RETURN_IF_ERROR(CheckAbove(field, fraction, 0));
  if (compute.device() == "cpu") {
    return InvalidField(field, "does not apply to compute.device cpu");
  }
  return absl::OkStatus();
}

// A commit is 40 lower-case hexadecimal digits; "" is none.
absl::Status CheckRevision(const std::string& field, const std::string& revision) {
  constexpr size_t kCommitLength = 40;
  const bool is_commit = revision.size() == kCommitLength &&
                         revision.find_first_not_of("0123456789abcdef") == std::string::npos;
  if (revision.empty() || is_commit) return absl::OkStatus();
  return InvalidField(field,
                      absl::StrCat("must be a commit, ", kCommitLength,
                                   " lower-case hexadecimal digits, got \"", revision, "\""));
}

// Needs the lane's other settings resolved.
absl::Status ResolveActivationDtype(v1::LaneConfig* lane, const v1::ComputeOptions& compute) {
  const std::string field = "activation_dtype";
  if (lane->activation_dtype().empty()) lane->set_activation_dtype("float32");
  TANDEM_RETURN_IF_ERROR(CheckOneOf(field, lane->activation_dtype(), {"float32", "bfloat16"}));
  if (lane->activation_dtype() == "float32") return absl::OkStatus();
  if (compute.device() != "cpu" || compute.kernels() != "auto") {
    return InvalidField(field,
                        absl::StrCat("bfloat16 needs compute.device cpu and compute.kernels auto, "
                                     "not ",
                                     compute.device(), " and ", compute.kernels()));
  }
  if (lane->dtype() != "bfloat16") {
    return InvalidField(field, absl::StrCat("bfloat16 needs dtype bfloat16, not ", lane->dtype()));
  }
  if (lane->quantization() == types::v1::QUANTIZATION_NONE) return absl::OkStatus();
  return FieldError(absl::StatusCode::kUnimplemented, field,
                    "bfloat16 is not supported with quantised linear maps yet");
}

absl::Status CheckGraphs(const v1::LaneConfig& lane, const v1::ComputeOptions& compute) {
  if (lane.enforce_eager()) return absl::OkStatus();
  constexpr char kField[] = "enforce_eager";
  if (compute.device() != "cuda") {
    return InvalidField(kField, absl::StrCat("false asks for captured CUDA graphs, which need "
                                             "compute.device cuda, not ",
                                             compute.device()));
  }
  if (compute.kernels() == "aten") {
    return FieldError(absl::StatusCode::kUnimplemented, kField,
                      "false is not supported with compute.kernels aten");
  }
  if (lane.tensor_parallel_size() > 1) {
    return FieldError(absl::StatusCode::kUnimplemented, kField,
                      "false is not supported with a tensor_parallel_size above 1 yet");
  }
  if (!lane.speculator().empty()) {
    return FieldError(absl::StatusCode::kUnimplemented, kField,
                      "false is not supported with a speculator yet");
  }
  return absl::OkStatus();
}

// Resolves the settings that both lanes have. Errors name the field within the lane.
absl::Status Resolve(v1::LaneConfig* lane, int32_t max_model_len,
                     const v1::ComputeOptions& compute) {
  if (lane->dtype().empty()) lane->set_dtype(compute.dtype());
  if (lane->quantization() == types::v1::QUANTIZATION_UNSPECIFIED) {
    lane->set_quantization(types::v1::QUANTIZATION_NONE);
  }
  TANDEM_DEFAULT(lane, max_model_len, max_model_len);
  TANDEM_DEFAULT(lane, tensor_parallel_size, 1);
  TANDEM_DEFAULT(lane, enforce_eager, true);
  TANDEM_RETURN_IF_ERROR(CheckRevision("model_revision", lane->model_revision()));
  TANDEM_RETURN_IF_ERROR(CheckOneOf("dtype", lane->dtype(), {"float32", "bfloat16"}));
  TANDEM_RETURN_IF_ERROR(CheckQuantization("quantization", lane->quantization(), compute));
  TANDEM_RETURN_IF_ERROR(ResolveActivationDtype(lane, compute));
  TANDEM_RETURN_IF_ERROR(CheckAtLeast("max_model_len", lane->max_model_len(), 2));
  TANDEM_RETURN_IF_ERROR(
      CheckInRange("tensor_parallel_size", lane->tensor_parallel_size(), 1, 1 << 16));
  TANDEM_RETURN_IF_ERROR(CheckGpuDevices(*lane, compute));
  if (lane->has_gpu_memory_utilization()) {
    TANDEM_RETURN_IF_ERROR(
        CheckMemoryUtilization("gpu_memory_utilization", lane->gpu_memory_utilization(), compute));
  }
  return CheckGraphs(*lane, compute);
}

// Leaves the junior's settings as they are where there is no junior.
absl::Status ResolveLanes(RolloutServerConfig* config) {
  v1::LaneConfig* const senior = config->mutable_senior();
  if (!senior->gpu_devices().empty()) {
    return InvalidField("senior.gpu_devices", "is a setting of the junior only");
  }
  TANDEM_RETURN_IF_ERROR(PrependFieldPath("senior", Resolve(senior, 2048, config->compute())));
  TANDEM_RETURN_IF_ERROR(PrependFieldPath("senior", ResolveLora(senior)));
  if (config->junior().model().empty()) return CheckNoJuniorSettings(config->junior());
  v1::LaneConfig* const junior = config->mutable_junior();
  if (junior->has_lora()) return InvalidField("junior.lora", "is a setting of the senior only");
  if (!junior->speculator().empty()) {
    return InvalidField("junior.speculator", "is a setting of the senior only");
  }
  return PrependFieldPath("junior", Resolve(junior, senior->max_model_len(), config->compute()));
}

absl::Status Resolve(v1::SpeculatorOptions* options) {
  if (options->adapter().empty()) {
    if (options->ByteSizeLong() == 0) return absl::OkStatus();
    return InvalidField("speculator.adapter", "is required by the other settings of speculator");
  }
  if (!options->optimizer().has_learning_rate()) {
    return InvalidField("speculator.optimizer.learning_rate", "is required with an adapter");
  }
  for (const auto& [name, value] :
       {std::pair{"n_predict", options->n_predict()}, std::pair{"inner_dim", options->inner_dim()},
        std::pair{"emb_dim", options->emb_dim()}, std::pair{"proj_dim", options->proj_dim()}}) {
    TANDEM_RETURN_IF_ERROR(CheckAtLeast(absl::StrCat("speculator.", name), value, 0));
  }
  return PrependFieldPath("speculator", Resolve(options->mutable_optimizer()));
}

}  // namespace

absl::Status Resolve(RolloutServerConfig* config) {
  TANDEM_RETURN_IF_ERROR(Resolve(config->mutable_server(), kRolloutPorts));
  TANDEM_RETURN_IF_ERROR(Resolve(config->mutable_compute()));
  if (!config->compute().weight_dtype().empty()) {
    return InvalidField("compute.weight_dtype",
                        "a rollout server has senior.dtype and junior.dtype instead");
  }
  if (!config->compute().activation_dtype().empty()) {
    return InvalidField(
        "compute.activation_dtype",
        "a rollout server has senior.activation_dtype and junior.activation_dtype instead");
  }
  TANDEM_RETURN_IF_ERROR(CheckGiven("senior.model", config->senior().model()));
  TANDEM_RETURN_IF_ERROR(Resolve(config->mutable_tandem(), !config->junior().model().empty()));
  TANDEM_RETURN_IF_ERROR(ResolveLanes(config));
  TANDEM_DEFAULT(config, max_num_seqs, 64);
  TANDEM_DEFAULT(config, max_batched_tokens, 2048);
  TANDEM_DEFAULT(config, max_queue, 4096);
  TANDEM_DEFAULT(config, kv_cache_bytes, 0);
  if (config->on_weight_update() == v1::ON_WEIGHT_UPDATE_UNSPECIFIED) {
    config->set_on_weight_update(v1::ON_WEIGHT_UPDATE_RECOMPUTE);
  }
  TANDEM_RETURN_IF_ERROR(CheckInRange("max_num_seqs", config->max_num_seqs(), 1, 1 << 16));
  TANDEM_RETURN_IF_ERROR(
      CheckInRange("max_batched_tokens", config->max_batched_tokens(), 1, 1 << 24));
  TANDEM_RETURN_IF_ERROR(CheckInRange("max_queue", config->max_queue(), 1, 1 << 24));
  TANDEM_RETURN_IF_ERROR(CheckAtLeast("kv_cache_bytes", config->kv_cache_bytes(), 0));
  for (const auto& [name, lane] :
       {std::pair{"senior", &config->senior()}, std::pair{"junior", &config->junior()}}) {
    if (config->kv_cache_bytes() == 0 || !lane->has_gpu_memory_utilization()) continue;
    return InvalidField(
        "kv_cache_bytes",
        absl::StrCat("must be 0 with ", name, ".gpu_memory_utilization, which sizes the cache"));
  }
  if (!config->kv_cache_dtype().empty()) {
    TANDEM_RETURN_IF_ERROR(
        CheckOneOf("kv_cache_dtype", config->kv_cache_dtype(), {"float32", "bfloat16"}));
  }
  return ResolveRankTimeouts("", config);
}

absl::Status Resolve(TrainerServerConfig* config) {
  TANDEM_RETURN_IF_ERROR(ResolveTraining(config, kTrainerPorts));
  if (!config->has_speculator()) return absl::OkStatus();
  if (config->speculator().freeze_base_model() && !config->freeze().empty()) {
    return InvalidField("freeze", "must be empty with speculator.freeze_base_model");
  }
  for (const auto& [field, coefficient] :
       {std::pair{"router_aux_loss_coef", config->router_aux_loss_coef()},
        std::pair{"router_z_loss_coef", config->router_z_loss_coef()}}) {
    if (config->speculator().freeze_base_model() && coefficient > 0) {
      return InvalidField(field, "must be 0 with speculator.freeze_base_model");
    }
  }
  return Resolve(config->mutable_speculator());
}

absl::Status Resolve(CriticServerConfig* config) { return ResolveTraining(config, kCriticPorts); }

bool HasTokens(const v1::TokenOptions& tokens) {
  return !tokens.reader_file().empty() || !tokens.user_file().empty() ||
         !tokens.admin_file().empty();
}

LogLevel LogLevelOf(const ServerOptions& options) {
  return ParseLogLevel(options.log_level()).value_or(LogLevel::kInfo);
}

}  // namespace tandem::config
