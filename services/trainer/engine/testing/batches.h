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
      t.authorship_mask.push_back((k + i) % 3 != 1);
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
