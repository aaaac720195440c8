// For tests: valid batches, which tests damage one field at a time.
#ifndef TANDEM_SERVICES_TRAINER_ENGINE_TESTING_BATCHES_H_
#define TANDEM_SERVICES_TRAINER_ENGINE_TESTING_BATCHES_H_

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "services/trainer/engine/types.h"

namespace tandem::trainer {

// Digest of the weights that wrote the test batches.
inline constexpr char kTestDigest[] = "test-digest";

// Returns four tandem samples in two groups, of lengths 5 to 8, with ids below 61.
inline PolicyBatch TestBatch() {
  PolicyBatch batch;
  for (int i = 0; i < 4; ++i) {
    PolicySample sample;
    Trajectory& t = sample.trajectory;
    t.prompt_token_ids = {1, 5 + i, 7};
    for (int k = 0; k < 5 + i; ++k) {
      t.response_token_ids.push_back(3 + (11 * i + 7 * k) % 58);
      t.authorship_mask.push_back((k + i) % 3 != 1 ? Author::kSenior : Author::kJunior);
      t.author_logprobs.push_back(-1.0f - 0.1f * static_cast<float>(k));
      t.other_logprobs.push_back(-1.5f - 0.1f * static_cast<float>(k));
    }
    t.senior_versions = {{.weights = {0, kTestDigest}, .count = 5 + i}};
    t.junior_version = "junior";
    t.finish_reason = i % 2 == 0 ? FinishReason::kStop : FinishReason::kLength;
    t.seed = 9;
    t.sample_index = static_cast<uint64_t>(i % 2);
    sample.group_id = i < 2 ? "a" : "b";
    sample.reward = i % 2;
    batch.samples.push_back(sample);
  }
  return batch;
}

inline const std::vector<int32_t> kCommonPrompt = {1, 5, 7, 30, 2, 19, 44};

// Gives the samples of a group the same prompt; those of the two groups begin alike.
inline void GiveCommonPrompts(PolicyBatch& batch) {
  for (PolicySample& sample : batch.samples) {
    sample.trajectory.prompt_token_ids = kCommonPrompt;
    if (sample.group_id == "b") sample.trajectory.prompt_token_ids[4] = 3;
  }
}

// Gives every sample the experts of a senior with `layers` layers of `num_experts` experts, of
// which a token takes two, and has the step replay them.
inline void ReplayRouting(PolicyBatch& batch, int64_t layers, int64_t num_experts) {
  batch.objective.routing_replay = true;
  uint64_t state = 7;
  for (PolicySample& sample : batch.samples) {
    Trajectory& t = sample.trajectory;
    t.routed_experts = {.layers = layers, .experts_per_token = 2, .ids = {}};
    const auto tokens =
        static_cast<int64_t>(t.prompt_token_ids.size() + t.response_token_ids.size()) - 1;
    for (int64_t i = 0; i < tokens * layers; ++i) {
      state = state * 6364136223846793005 + 1442695040888963407;
      const auto first =
          static_cast<int64_t>((state >> 33) % static_cast<uint64_t>(num_experts - 1));
      const auto gap =
          static_cast<int64_t>((state >> 13) % static_cast<uint64_t>(num_experts - 1 - first));
      t.routed_experts.ids.push_back(static_cast<uint16_t>(first));
      t.routed_experts.ids.push_back(static_cast<uint16_t>(first + 1 + gap));
    }
  }
}

// Returns what a teacher says of `length` tokens: at each place `top_k` of 61 tokens, which
// have about half of its mass.
inline TeacherTokens TestTeacher(std::string name, int64_t top_k, size_t length) {
  TeacherTokens teacher = {.name = std::move(name),
                           .top_tokens = {.count = top_k, .ids = {}, .logprobs = {}}};
  for (size_t t = 0; t < length; ++t) {
    for (int64_t i = 0; i < top_k; ++i) {
      teacher.top_tokens.ids.push_back(
          static_cast<int32_t>((5 * static_cast<int64_t>(t) + 7 * i + 3) % 61));
      teacher.top_tokens.logprobs.push_back(std::log(0.5f / static_cast<float>(top_k)) +
                                            0.1f * static_cast<float>(i % 2 == 0 ? 1 : -1));
    }
  }
  return teacher;
}

// Has the step distil from two teachers, whose tokens the samples bring.
inline void Distil(PolicyBatch& batch, loss::DivergenceKind kind, int64_t top_k = 4) {
  batch.objective.distillation = {
      .coefficient = 0.7, .divergence = {.kind = kind, .beta = 0.3}, .top_k = top_k};
  for (size_t i = 0; i < batch.samples.size(); ++i) {
    PolicySample& sample = batch.samples[i];
    sample.teacher = TestTeacher(i % 2 == 0 ? "even" : "odd", top_k,
                                 sample.trajectory.response_token_ids.size());
  }
}

inline TrainStepRequest TestRequest(PolicyBatch batch = TestBatch()) {
  TrainStepRequest request;
  request.run_id = "run";
  request.step = 1;
  request.request_id = "request-1";
  request.payload_digest = "payload-1";
  request.batch = std::move(batch);
  return request;
}

}  // namespace tandem::trainer

#endif  // TANDEM_SERVICES_TRAINER_ENGINE_TESTING_BATCHES_H_
