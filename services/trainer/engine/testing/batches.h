// For tests: valid batches, which tests damage one field at a time.
#ifndef TANDEM_SERVICES_TRAINER_ENGINE_TESTING_BATCHES_H_
#define TANDEM_SERVICES_TRAINER_ENGINE_TESTING_BATCHES_H_

#include <cstdint>
#include <string>
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
