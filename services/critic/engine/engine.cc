#include "services/critic/engine/engine.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>

#include <mutex>
#include <optional>
#include <utility>

#include "common/base/error.h"
#include "common/base/status_macros.h"
#include "common/loss/loss_scale.h"
#include "common/loss/value_loss.h"
#include "common/model/model.h"
#include "common/parallel/strategy.h"
#include "common/tensor/catch_torch_errors.h"
#include "common/tensor/weights_digest.h"
#include "common/training/micro_batches.h"
#include "common/training/weight_snapshot.h"
#include "services/critic/engine/value_step.h"
#include "services/training/training_checkpoint.h"

namespace tandem::critic {
namespace {

std::vector<int64_t> Join(const std::vector<int32_t>& prompt,
                          const std::vector<int32_t>& response) {
  std::vector<int64_t> tokens(prompt.begin(), prompt.end());
  tokens.insert(tokens.end(), response.begin(), response.end());
  return tokens;
}

class TorchEngine : public Engine {
 public:
  static absl::StatusOr<std::unique_ptr<Engine>> Create(const EngineOptions& options);

  EngineInfo Info() const override {
    const std::lock_guard lock(info_mutex_);
    return info_;
  }
  absl::StatusOr<ValuesResult> ComputeValues(const ValuesRequest& request) override;
  absl::StatusOr<TrainStepResult> TrainStep(const TrainStepRequest& request) override;
  absl::StatusOr<checkpoint::Saved> SaveCheckpoint(const std::string& directory,
                                                   const std::string& name, int64_t keep) override;
  absl::Status LoadCheckpoint(const std::string& path) override;
  absl::Status ExportModel(const std::string& path, DType dtype) override;

 private:
  explicit TorchEngine(const EngineOptions& options) : options_(options) {}

  training::SequenceLimits Limits() const;
  absl::StatusOr<TrainStepResult> Update(const TrainStepRequest& request);
  void RefreshInfo();

  const EngineOptions options_;
  mutable std::mutex mutex_;  // one operation at a time
  std::unique_ptr<Model> model_;
  std::unique_ptr<parallel::Strategy> strategy_;
  training::TrainingState state_{.kind = "critic"};

  mutable std::mutex info_mutex_;
  EngineInfo info_;
};

absl::StatusOr<std::unique_ptr<Engine>> TorchEngine::Create(const EngineOptions& options) {
  for (const auto& [field, value] : {std::pair{"micro_batch_tokens", options.micro_batch_tokens},
                                     std::pair{"max_model_len", options.max_model_len},
                                     std::pair{"max_samples", options.max_samples}}) {
    if (value < 1) return InvalidField(field, "must be positive");
  }
  if (options.num_threads > 0) at::set_num_threads(options.num_threads);
  std::unique_ptr<TorchEngine> engine(new TorchEngine(options));
  absl::StatusOr<std::unique_ptr<Model>> model =
      Model::Load(options.model, {.head = HeadKind::kValue,
                                  .untie_embeddings = options.untie_embeddings,
                                  .value_head_seed = options.value_head_seed,
                                  .requires_grad = true});
  if (!model.ok()) return PrependFieldPath("model", model.status());
  engine->model_ = *std::move(model);
  TANDEM_ASSIGN_OR_RETURN(engine->strategy_, parallel::CreateStrategy("single"));
  TANDEM_RETURN_IF_ERROR(
      PrependFieldPath("optimizer", engine->strategy_->Build(*engine->model_, options.optimizer)));
  engine->RefreshInfo();
  return engine;
}

training::SequenceLimits TorchEngine::Limits() const {
  const ModelConfig& config = model_->config();
  return {.vocab_size = config.vocab_size,
          .max_model_len = config.LongestSequence(options_.max_model_len)};
}

void TorchEngine::RefreshInfo() {
  EngineInfo info;
  info.model = model_->Summary(Limits().max_model_len);
  info.weights = {.version = state_.version, .digest = WeightsDigest(model_->Parameters())};
  info.optimizer_steps = strategy_->optimizer_steps();
  info.value_head_from_checkpoint = model_->value_head_source() == ValueHeadSource::kCheckpoint;
  const std::lock_guard lock(info_mutex_);
  info_ = std::move(info);
}

absl::StatusOr<ValuesResult> TorchEngine::ComputeValues(const ValuesRequest& request) {
  const std::lock_guard lock(mutex_);
  TANDEM_RETURN_IF_ERROR(
      training::CheckSequence(request.prompt_token_ids, request.response_token_ids, Limits()));
  return CatchTorchErrors("values", [&]() -> absl::StatusOr<ValuesResult> {
    const at::NoGradGuard no_grad;
    CausalContext context;
    const at::Tensor hidden = model_->HiddenStates(
        MakeRaggedBatch({Join(request.prompt_token_ids, request.response_token_ids)}), context);
    const auto prompt = static_cast<int64_t>(request.prompt_token_ids.size());
    const at::Tensor values =
        model_->Values(hidden.narrow(0, prompt - 1, hidden.size(0) - prompt + 1)).contiguous();
    const float* numbers = values.const_data_ptr<float>();
    ValuesResult result;
    result.values.assign(numbers, numbers + values.numel() - 1);
    result.final_value = numbers[values.numel() - 1];
    result.weights = Info().weights;
    return result;
  });
}

absl::StatusOr<TrainStepResult> TorchEngine::TrainStep(const TrainStepRequest& request) {
  const std::lock_guard lock(mutex_);
  const std::string digest = PayloadDigest(request);
  TANDEM_ASSIGN_OR_RETURN(const std::optional<std::string> stored,
                          training::AdmitStep(state_,
                                              {.run_id = request.run_id,
                                               .step = request.step,
                                               .request_id = request.request_id,
                                               .payload_digest = digest,
                                               .expected_version = request.expected_version},
                                              "expected_version"));
  if (stored.has_value()) {
    TANDEM_ASSIGN_OR_RETURN(TrainStepResult result, DecodeResult(*stored));
    result.replayed = true;
    return result;
  }
  TANDEM_RETURN_IF_ERROR(CheckTrainStep(request, Limits(), options_.max_samples));
  absl::StatusOr<TrainStepResult> result =
      CatchTorchErrors("train step", [&] { return Update(request); });
  if (!result.ok()) return result;
  RefreshInfo();
  result->weights = Info().weights;
  state_.ledger.Record(request.run_id, request.request_id, digest, EncodeResult(*result));
  return result;
}

absl::StatusOr<TrainStepResult> TorchEngine::Update(const TrainStepRequest& request) {
  loss::ValueTokens tokens;
  std::vector<double> weights;
  std::vector<std::vector<int64_t>> inputs, positions;  // a sample; positions of counted rows
  std::vector<int64_t> lengths;
  std::vector<size_t> first_rows = {0};
  for (const ValueSample& sample : request.samples) {
    inputs.push_back(Join(sample.prompt_token_ids, sample.response_token_ids));
    inputs.back().pop_back();  // nothing is predicted from the last token
    positions.emplace_back();
    for (size_t t = 0; t < sample.response_token_ids.size(); ++t) {
      if (!Counts(sample, t)) continue;
      positions.back().push_back(static_cast<int64_t>(sample.prompt_token_ids.size() + t) - 1);
      tokens.returns.push_back(sample.returns[t]);
      tokens.old_values.push_back(sample.old_values[t]);
      weights.push_back(1.0);
    }
    if (positions.back().empty()) inputs.back().clear();
    lengths.push_back(static_cast<int64_t>(inputs.back().size()));
    first_rows.push_back(weights.size());
  }
  TANDEM_ASSIGN_OR_RETURN(
      const loss::LossScales scales,
      loss::ComputeLossScales({}, weights, {static_cast<int64_t>(weights.size())}));
  tokens.scales = scales.scales;
  TANDEM_ASSIGN_OR_RETURN(loss::ValueLossEvaluator evaluator,
                          loss::ValueLossEvaluator::Create({.clip = request.value_clip}, tokens));

  const std::vector<training::MicroBatch> plan =
      training::PlanMicroBatches(lengths, options_.micro_batch_tokens);
  TANDEM_RETURN_IF_ERROR(
      strategy_->ForwardBackward(static_cast<int64_t>(plan.size()), [&](int64_t i) -> absl::Status {
        const training::MicroBatch& range = plan[static_cast<size_t>(i)];
        std::vector<std::vector<int64_t>> sequences;
        std::vector<int64_t> rows;
        int64_t offset = 0;
        for (size_t s = range.begin; s < range.end; ++s) {
          if (inputs[s].empty()) continue;
          for (const int64_t position : positions[s]) rows.push_back(offset + position);
          sequences.push_back(inputs[s]);
          offset += lengths[s];
        }
        CausalContext context;
        const at::Tensor hidden = model_->HiddenStates(MakeRaggedBatch(sequences), context);
        const at::Tensor values =
            model_->Values(hidden.index_select(0, at::tensor(rows, at::kLong)));
        const at::Tensor host = values.detach().to(at::kDouble).contiguous();
        std::vector<double> gradients(rows.size());
        TANDEM_RETURN_IF_ERROR(
            evaluator.Evaluate(static_cast<int64_t>(first_rows[range.begin]),
                               absl::MakeConstSpan(host.const_data_ptr<double>(), rows.size()),
                               absl::MakeSpan(gradients)));
        values.backward(at::tensor(gradients, at::kDouble).to(values.scalar_type()));
        return absl::OkStatus();
      }));
  TANDEM_ASSIGN_OR_RETURN(const parallel::OptimizerReport optimizer, strategy_->OptimizerStep());
  ++state_.version;
  const loss::ValueMetrics metrics = evaluator.Metrics();
  TrainStepResult result;
  result.step = request.step;
  result.metrics = {{"critic/loss", metrics.loss},
                    {"critic/clip_fraction", metrics.clip_fraction},
                    {"critic/explained_variance", metrics.explained_variance},
                    {"critic/grad_norm", optimizer.grad_norm},
                    {"critic/learning_rate", optimizer.learning_rate},
                    {"critic/value_mean", metrics.value_mean},
                    {"critic/return_mean", metrics.return_mean}};
  return result;
}

absl::StatusOr<checkpoint::Saved> TorchEngine::SaveCheckpoint(const std::string& directory,
                                                              const std::string& name,
                                                              int64_t keep) {
  const std::lock_guard lock(mutex_);
  return CatchTorchErrors("checkpoint", [&] {
    return training::SaveTraining(directory, name, keep, *model_, *strategy_, state_);
  });
}

absl::Status TorchEngine::LoadCheckpoint(const std::string& path) {
  const std::lock_guard lock(mutex_);
  return CatchTorchErrors("checkpoint", [&]() -> absl::Status {
    TANDEM_RETURN_IF_ERROR(training::LoadTraining(path, *model_, *strategy_, state_));
    RefreshInfo();
    return absl::OkStatus();
  });
}

absl::Status TorchEngine::ExportModel(const std::string& path, DType dtype) {
  const std::lock_guard lock(mutex_);
  return CatchTorchErrors("export", [&] { return training::ExportModel(*model_, path, dtype); });
}

}  // namespace

absl::StatusOr<std::unique_ptr<Engine>> CreateEngine(const EngineOptions& options) {
  return CatchTorchErrors("model", [&] { return TorchEngine::Create(options); });
}

}  // namespace tandem::critic
